"""How tests run whole layers on the simulated backend: random experts, random routing, one call per list entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import torch

from inc_runtime.backends.link_model import LinkModel
from inc_runtime.backends.simulated import SimulatedPe, Simulation
from inc_runtime.collectives.microbatch import Call
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, check
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.protocol import World
from megakernel import fused_layer
from megakernel.experts import HostExperts
from megakernel.fused_layer import LayerInput
from switch_emulator import run_switch

torch.set_num_threads(1)


@dataclass
class Layer:
    """One MoE layer with seeded random experts: `gate_up` [E, 2I, H], `down` [E, H, I], bfloat16 values in float32."""

    shape: LayerShape
    seed: int = 0
    gate_up: torch.Tensor = field(init=False)
    down: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        e, h, i = self.shape.num_experts, self.shape.hidden_size, self.shape.intermediate_size
        self.gate_up = (torch.randn(e, 2 * i, h, generator=generator) / h**0.5).bfloat16().float()
        self.down = (torch.randn(e, h, i, generator=generator) / i**0.5).bfloat16().float()

    def experts_of(self, rank: int, num_ranks: int) -> HostExperts:
        own = self.shape.experts_of_rank(rank, num_ranks)
        return HostExperts(own.start, self.gate_up[own.start : own.stop], self.down[own.start : own.stop])


def random_tokens(rng: np.random.Generator, num_tokens: int, hidden_size: int) -> np.ndarray:
    return rng.standard_normal((num_tokens, hidden_size)).astype(ml_dtypes.bfloat16)


def given_experts(shape: LayerShape, tokens: np.ndarray, expert_ids: np.ndarray, weights: np.ndarray) -> LayerInput:
    return LayerInput(shape, tokens, expert_ids=expert_ids.astype(np.int32), weights=weights.astype(np.float32))


def simulate(
    layer: Layer,
    model: CommunicationModel,
    pipeline: Pipeline,
    world: World,
    calls: Sequence[Sequence[LayerInput]],
    *,
    seed: int = 0,
    jitter_us: float = 0.0,
    stage_cost=None,
    link: LinkModel | None = None,
    layers: Sequence[Layer] | None = None,
    pipelines: Sequence[Pipeline] | None = None,
    rank_pipelines: Mapping[int, Pipeline] | None = None,
    late_us: Mapping[int, float] | None = None,
    wait_limit_us: float | None = None,
    traced: bool = True,
) -> tuple[list[list[np.ndarray]], Simulation]:
    """Run `calls[c][rank]` in order on one heap. Returns outputs[c][rank] [N, H] and the finished simulation.

    `layers` and `pipelines` give one entry per call where calls differ; `rank_pipelines` lets one rank disagree with the
    others. `late_us` delays the experts of a PE.
    """
    layers = layers or [layer] * len(calls)
    pipelines = pipelines or [pipeline] * len(calls)
    for one, carried in zip(layers, pipelines, strict=True):
        check(one.shape, carried, world.num_ranks)
    widest = replace(layer.shape, top_k=max(one.shape.top_k for one in layers))
    layout = HeapLayout(Dims.of(model, world, widest, pipeline))
    simulation = Simulation(
        world,
        layout,
        seed=seed,
        jitter_us=jitter_us,
        stage_cost=stage_cost,
        link=link,
        wait_limit_us=wait_limit_us,
        traced=traced,
        sum_order=pipeline.sum_order,
    )
    outputs = [[np.full(given.tokens.shape, np.nan, given.tokens.dtype) for given in call] for call in calls]

    def rank_program(pe: SimulatedPe) -> None:
        for number, call in enumerate(calls):
            one, carried = layers[number], pipelines[number]
            carried = (rank_pipelines or {}).get(pe.pe, carried)
            experts = one.experts_of(pe.pe, world.num_ranks)
            fused_layer.run_fused(pe, Call(one.shape, carried, number), experts, call[pe.pe], outputs[number][pe.pe])

    for pe, delay in (late_us or {}).items():
        delay_experts(simulation.pes[pe], delay)
    simulation.spawn_world(rank_program, lambda pe: run_switch.run_switch(pe))
    simulation.run()
    return outputs, simulation


def delay_experts(pe: SimulatedPe, delay_us: float) -> None:
    """Make the experts of one rank late by `delay_us` of virtual time in every microbatch."""
    spend = pe._spend

    def slow(stage: str, rows: int) -> None:
        if stage == "group":
            pe.simulation.sleep(delay_us)
        spend(stage, rows)

    pe._spend = slow  # type: ignore[method-assign]
