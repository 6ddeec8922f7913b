"""The end of a comparison: each case against both references, the table, the JSON rows, the pictures."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from inc_runtime.errors import ConfigurationError, ResultWrong
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.job import WORKLOAD_FILE, JobPlan
from inc_runtime.op_trace import Event, count
from inc_runtime.protocol import Role
from inc_runtime.report import LEGEND, Row, load_case, table, write_rows
from inc_runtime.show_trace import save_case, write_pictures
from megakernel.implementations import Case, case_of_name
from megakernel.memory import memory_bytes
from megakernel.reference import bf16_bound, max_abs_error, relative_error
from megakernel.simulated_case import Outcome, simulate_case, simulate_steps
from megakernel.stages import TEN_STAGES
from megakernel.workload import Workload, WorkloadFile

SwitchProgram = Callable[..., None]
LIBRARY_STEPS = 3
"""Transfers in a row of the Baseline's library collectives: counts, rows, sums."""


def conclude(plan: JobPlan, folder: Path, json_path: Path | None, switch_program: SwitchProgram) -> None:
    """On rank 0 of a host job: gather what all PEs left in `folder`, report it, and keep one folder per case."""
    file = WorkloadFile(folder / WORKLOAD_FILE, plan.tokens_of_rank)
    reference = file.array("reference")
    transformers = file.array("transformers") if file.has("transformers") else None
    rows = []
    for name, _, _ in plan.cases:
        case = case_of_name(name)
        output, time_us, events = load_case(folder / name, plan.world)
        steps = simulate_steps(case, plan, switch_program) if case.needs_heap else LIBRARY_STEPS
        outcome = Outcome(output, reference, time_us, events)
        rows.append(make_row(case, plan, outcome, transformers, steps, source="measured_host", placement="host"))
        keep(plan, name, events)
    shutil.rmtree(folder)
    report(plan, rows, json_path)


def conclude_simulated(
    plan: JobPlan, workload: Workload, json_path: Path | None, switch_program: SwitchProgram, seed: int
) -> int:
    """Run one case in the simulator's virtual time, in this process, and report it."""
    case = case_of_name(plan.cases[0][0])
    if not case.needs_heap:
        raise ConfigurationError("the baseline uses library collectives, which the simulator does not have. Use --backend host.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / WORKLOAD_FILE
        workload.prepare(path, sum(plan.tokens_of_rank), plan.world.num_ranks)
        outcome = simulate_case(case, plan, workload, path, switch_program, seed)
    steps = simulate_steps(case, plan, switch_program)
    row = make_row(case, plan, outcome, None, steps, source="simulated", placement="simulated")
    keep(plan, case.name, outcome.events)
    report(plan, [row], json_path)
    return 0


def make_row(
    case: Case, plan: JobPlan, outcome: Outcome, transformers: np.ndarray | None, steps: int, *, source: str, placement: str
) -> Row:
    """Compare one case with its references, count its events and its memory."""
    counters = count(outcome.events, plan.world)
    return Row(
        implementation=case.implementation.value,
        collective=case.model.value,
        source=source,
        placement=placement,
        num_ranks=plan.world.num_ranks,
        num_tokens=len(outcome.output),
        relative_error=relative_error(outcome.output, outcome.reference),
        max_abs_error=max_abs_error(outcome.output, outcome.reference),
        transformers_error=None if transformers is None else relative_error(outcome.output, transformers),
        rows_sent_per_rank=counters.dispatch_rows_sent,
        rows_received_per_rank=counters.combine_rows_received,
        row_bytes=counters.row_bytes_sent + counters.row_bytes_received,
        wire_bytes=counters.wire_bytes_sent + counters.wire_bytes_received,
        packets=counters.dispatch_packets + counters.combine_packets,
        steps=steps,
        time_us=outcome.time_us,
        rank_memory_bytes=memory_bytes(
            case.implementation, case.model, plan.shape, plan.pipeline, max(plan.tokens_of_rank), plan.world
        ),
        switch_memory_bytes=switch_memory_bytes(case, plan),
    )


def switch_memory_bytes(case: Case, plan: JobPlan) -> int:
    """Token rows that the larger of the two switches holds, private memory included; nothing where there is none of ours."""
    if not case.needs_heap:
        return 0
    layout = HeapLayout(Dims.of(case.model, plan.world, plan.shape, plan.pipeline))
    return max(layout.row_bytes(role) for role in (Role.DISPATCH_SWITCH, Role.COMBINE_SWITCH))


def keep(plan: JobPlan, name: str, events: list[Event]) -> None:
    """Keep the events of one case in a folder of its own, in place of those of an earlier run."""
    target = plan.output / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    save_case(target, events, plan.world, {stage.name: stage.unit.value for stage in TEN_STAGES})


def report(plan: JobPlan, rows: list[Row], json_path: Path | None) -> None:
    """Print the table and write what belongs to it. Raises ResultWrong when a result is outside the bfloat16 bound."""
    print(table(rows))
    print(LEGEND)
    tokens = sum(plan.tokens_of_rank)
    print(
        f"W = {plan.world.num_ranks}, {tokens} tokens, m_b = {plan.pipeline.microbatch_tokens}, D = {plan.pipeline.depth}, "
        f"G = {plan.pipeline.ranks_per_phase}; source {rows[0].source}, placement {rows[0].placement}"
    )
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(json_path, rows)
    shown = next((name for name, _, _ in plan.cases if name.startswith("megakernel_inc-")), plan.cases[-1][0])
    for path in write_pictures(plan.output / shown):
        print(f"wrote {path}")
    bound = bf16_bound(max(tokens, 1), plan.shape, sum_roundings=1 + plan.pipeline.local_bypass)
    wrong = [f"{r.implementation} on {r.collective} ({r.relative_error:.2e})" for r in rows if not r.relative_error <= bound]
    if wrong:
        raise ResultWrong(f"relative error above the bfloat16 bound of {bound:.2e}: {', '.join(wrong)}.")
    print(f"every result is within the bfloat16 bound of {bound:.1e} of the float64 reference")
