"""What a compute rank does for one row of the comparison: build the layer, run it, time it, keep its output."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from inc_runtime.backends.host import HostPe
from inc_runtime.job import WORKLOAD_FILE, JobPlan
from inc_runtime.op_trace import OpTrace, save_events
from megakernel.checkpoint import ExpertWeights
from megakernel.experts import bf16_to_numpy
from megakernel.implementations import Case, case_of_name
from megakernel.library_group import LibraryGroup
from megakernel.moe_layer import MoELayer
from megakernel.workload import RankTokens, Workload, WorkloadFile


def rank_runner(plan: JobPlan, workload: Workload, rank: int, iterations: int) -> Callable[[str, HostPe | None, Path], None]:
    """What `run_pe` calls for each case on this rank: (case name, PE or None, folder of the case).

    The experts are read and widened to float32 once, for all cases.
    """
    loaded: list[ExpertWeights] = []
    ranks = LibraryGroup(None, OpTrace(rank, enabled=False))

    def run(name: str, pe: HostPe | None, folder: Path) -> None:
        if not loaded:
            bf16 = workload.experts(plan.shape.experts_of_rank(rank, plan.world.num_ranks))
            loaded.append(ExpertWeights(bf16.experts, bf16.gate_up.float(), bf16.down.float()))
        tokens = WorkloadFile(folder.parent / WORKLOAD_FILE, plan.tokens_of_rank).of_rank(rank)
        run_case(case_of_name(name), pe, plan, loaded[0], tokens, ranks, iterations, folder)

    return run


def run_case(
    case: Case,
    pe: HostPe | None,
    plan: JobPlan,
    experts: ExpertWeights,
    tokens: RankTokens,
    ranks: LibraryGroup,
    iterations: int,
    folder: Path,
) -> None:
    """Run one case on this rank; ranks start each call together. Leaves output, times and events in `folder`.

    One warm-up call comes first. The events are those of the last call alone.
    """
    layer = MoELayer(plan.shape, plan.pipeline, case.implementation, pe, experts, model=case.model)
    output = torch.full_like(tokens.hidden_states, torch.nan)
    times_us = []
    for _ in range(iterations + 1):
        layer.trace.events.clear()
        ranks.barrier()
        start = time.perf_counter()
        layer(tokens.hidden_states, tokens.router_logits, out=output)
        times_us.append((time.perf_counter() - start) * 1e6)
    np.save(folder / f"output-{ranks.rank}.npy", bf16_to_numpy(output).view(np.uint16))
    (folder / f"times-{ranks.rank}.json").write_text(json.dumps({"start_us": start * 1e6, "times_us": times_us[1:]}))
    save_events(folder / f"events-{ranks.rank}.jsonl", layer.trace.events)
