"""How tests run a whole layer on the simulated backend: random experts, random routing, one call per list entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch

from inc_runtime.backends.link_model import LinkModel
from inc_runtime.backends.simulated import SimulatedPe, Simulation
from inc_runtime.collectives.microbatch import Call
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, check
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.one_sided import Flag
from inc_runtime.protocol import World, signal_word
from megakernel.experts import HostExperts
from megakernel.fused_layer import LayerInput, run_fused
from switch_emulator.run_switch import run_switch


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
) -> tuple[list[list[np.ndarray]], Simulation]:
    """Run `calls[c][rank]` in order on one heap. Returns outputs[c][rank] [N, H] bfloat16 and the finished simulation."""
    check(layer.shape, pipeline, world.num_ranks)
    layout = HeapLayout(Dims.of(model, world, layer.shape, pipeline))
    simulation = Simulation(world, layout, seed=seed, jitter_us=jitter_us, stage_cost=stage_cost, link=link)
    outputs = [[np.full(given.tokens.shape, np.nan, ml_dtypes.bfloat16) for given in call] for call in calls]

    def rank_program(pe: SimulatedPe) -> None:
        experts = layer.experts_of(pe.pe, world.num_ranks)
        for number, call in enumerate(calls):
            run_fused(pe, Call(layer.shape, pipeline), experts, call[pe.pe], outputs[number][pe.pe])
        stop = signal_word(int(pe.memory["magic"][0]) + 1, True)
        for switch in range(world.num_ranks, world.num_pes):
            pe.signal(switch, Flag("stop", (pe.pe,)), stop, magic=0)

    for pe in range(world.num_pes):
        if pe < world.num_ranks:
            simulation.spawn(pe, rank_program)
        else:
            simulation.spawn(pe, lambda pe: run_switch(pe, pipeline.sum_order))
    simulation.run()
    return outputs, simulation
