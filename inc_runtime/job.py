"""One job of several cases, as each of its PEs lives it. The programs of ranks and switches are handed in by the CLI."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inc_runtime.backends.host import HostPe
from inc_runtime.backends.host_memory import job_key
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.environment import Environment
from inc_runtime.errors import PeerMissing
from inc_runtime.op_trace import save_events
from inc_runtime.protocol import World

WORKLOAD_FILE = "workload.safetensors"


@dataclass(frozen=True)
class JobPlan:
    """What all PEs of a job agree on. `tokens_of_rank` [W]; a case is (name, model, needs a heap)."""

    shape: LayerShape
    pipeline: Pipeline
    world: World
    tokens_of_rank: tuple[int, ...]
    cases: tuple[tuple[str, CommunicationModel, bool], ...]
    output: Path
    delay_us: float = 0.0

    def work_folder(self, environment: Environment) -> Path:
        """A folder that only the PEs of this job use."""
        return self.output / f"job-{job_key(environment)}"


def wait_for_file(path: Path, who: str, limit_s: float) -> None:
    """Wait until `path` exists. Raises PeerMissing that names `who` should have written it."""
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise PeerMissing(f"waited {limit_s:.0f} s for {who} to write {path.name}. Look at what it printed last.")
        time.sleep(0.005)


def run_pe(
    plan: JobPlan,
    *,
    prepare: Callable[[Path], None],
    run_rank_case: Callable[[str, HostPe | None, Path], None],
    run_switch_case: Callable[[HostPe], None],
    on_case: Callable[[str], None],
) -> Path:
    """Run all cases on this PE. Returns the work folder, where everything is once `wait_for_all` returns.

    `prepare(path)` runs on rank 0 and writes the workload; `run_rank_case(name, pe, folder)` runs one case on a rank;
    `run_switch_case(pe)` serves on a switch until the ranks stop. `on_case(name)` is called as each case begins.
    """
    environment = Environment.read()
    folder = plan.work_folder(environment)
    workload = folder / WORKLOAD_FILE
    rank = environment.rank
    if rank == 0:
        for name, _, _ in plan.cases:
            (folder / name).mkdir(parents=True, exist_ok=True)
        prepare(workload)
    wait_for_file(workload, "rank 0", environment.start_limit_s)
    for name, model, needs_heap in plan.cases:
        on_case(name)
        is_rank = rank < plan.world.num_ranks
        if not needs_heap:
            if is_rank:
                run_rank_case(name, None, folder / name)
            continue
        with HostPe.join(
            plan.shape,
            plan.pipeline,
            model,
            num_ranks=plan.world.num_ranks,
            num_dispatch_switches=plan.world.num_dispatch_switches,
            num_combine_switches=plan.world.num_combine_switches,
            delay_us=plan.delay_us,
            poison=True,
            traced=True,
        ) as pe:
            if is_rank:
                run_rank_case(name, pe, folder / name)
            else:
                run_switch_case(pe)
        if not is_rank:
            save_events(folder / name / f"events-{rank}.jsonl", pe.trace.events)
    (folder / f"done-{rank}").touch()
    return folder


def wait_for_all(plan: JobPlan, folder: Path) -> None:
    """On rank 0: wait until every PE has left its results."""
    limit_s = Environment.read().wait_limit_s
    for pe in range(plan.world.num_pes):
        wait_for_file(folder / f"done-{pe}", plan.world.name_of(pe), limit_s)
