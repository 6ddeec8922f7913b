"""One case on the simulated backend: the same rank programs in virtual time, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from inc_runtime.backends.link_model import LinkModel
from inc_runtime.backends.simulated import SimulatedPe, Simulation
from inc_runtime.collectives.microbatch import Call
from inc_runtime.config import LayerShape
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.job import JobPlan
from inc_runtime.op_trace import Event
from megakernel.experts import HostExperts, bf16_to_numpy
from megakernel.fused_layer import LayerInput, run_fused
from megakernel.implementations import Case
from megakernel.workload import RandomWorkload, Workload, WorkloadFile

SwitchProgram = Callable[[SimulatedPe], None]


@dataclass(frozen=True)
class Outcome:
    """`output` and `reference` [num_tokens, H] float64, virtual `time_us` of the whole call, events of all PEs."""

    output: np.ndarray
    reference: np.ndarray
    time_us: float
    events: list[Event]


def simulate_case(
    case: Case, plan: JobPlan, workload: Workload, path: Path, switch_program: SwitchProgram, seed: int
) -> Outcome:
    """Run one call of the layer on a prepared workload. Local work takes no virtual time; transfers follow the link model."""
    file = WorkloadFile(path, plan.tokens_of_rank)
    layout = HeapLayout(Dims.of(case.model, plan.world, plan.shape, plan.pipeline))
    simulation = Simulation(plan.world, layout, seed=seed, jitter_us=plan.delay_us, sum_order=plan.pipeline.sum_order)
    outputs: dict[int, np.ndarray] = {}

    def rank_program(pe: SimulatedPe) -> None:
        tokens = file.of_rank(pe.pe)
        own = workload.experts(plan.shape.experts_of_rank(pe.pe, plan.world.num_ranks))
        experts = HostExperts(own.experts.start, own.gate_up.float(), own.down.float())
        given = LayerInput(plan.shape, bf16_to_numpy(tokens.hidden_states), logits=tokens.router_logits.numpy())
        outputs[pe.pe] = np.full(given.tokens.shape, np.nan, given.tokens.dtype)
        run_fused(pe, Call(plan.shape, plan.pipeline), experts, given, outputs[pe.pe])

    simulation.spawn_world(rank_program, switch_program)
    simulation.run()
    events = simulation.events()
    output = np.concatenate([outputs[rank] for rank in range(plan.world.num_ranks)]).astype(np.float64)
    time_us = max(event.end_us for event in events if event.kind == "wait" and event.pe < plan.world.num_ranks)
    return Outcome(output, file.array("reference"), time_us, events)


def simulate_steps(case: Case, plan: JobPlan, switch_program: SwitchProgram) -> int:
    """Steps of one microbatch in which every rank sends one token to every rank, on links without a bandwidth limit."""
    num_ranks = plan.world.num_ranks
    shape = LayerShape(num_ranks, num_ranks, 8, 1)
    pipeline = replace(plan.pipeline, bound_tokens=1, microbatch_tokens=1, depth=1)
    layout = HeapLayout(Dims.of(case.model, plan.world, shape, pipeline))
    simulation = Simulation(plan.world, layout, link=LinkModel(latency_us=1.0, port_gbps=float("inf")))
    weights = RandomWorkload(shape)

    def rank_program(pe: SimulatedPe) -> None:
        own = weights.experts(range(pe.pe, pe.pe + 1))
        experts = HostExperts(pe.pe, own.gate_up.float(), own.down.float())
        tokens = np.zeros((1, 8), ml_dtypes.bfloat16)
        given = LayerInput(shape, tokens, logits=np.zeros((1, num_ranks), np.float32))
        run_fused(pe, Call(shape, pipeline), experts, given, tokens.copy())

    simulation.spawn_world(rank_program, switch_program)
    simulation.run()
    waits = [event.end_us for event in simulation.events() if event.kind == "wait" and event.name == "token_sums"]
    return round(max(waits))
