"""What the role programs leave in memory: the exchange of `exchange_kernel.cu`, trivial expert and all, simulated."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from inc_runtime.backends.simulated import SimulatedPe, Simulation
from inc_runtime.collectives import rank_programs
from inc_runtime.collectives.microbatch import Call, RoutedTokens
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, check
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.protocol import World
from megakernel.pipeline import StageGroup, schedule
from switch_emulator.run_switch import run_switch


@dataclass(frozen=True)
class Options:
    """Options of the exchange that a whole run is made with. `row_group_tokens`: cut-through; 0: none."""

    local_bypass: bool = False
    row_group_tokens: int = 0

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--local-bypass", action="store_true", help="rows of a rank's own experts stay on it")
        parser.add_argument("--row-group-tokens", type=int, default=0, help="the dispatch switch cuts through in such groups")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Options:
        return cls(options.local_bypass, options.row_group_tokens)

    def on(self, pipeline: Pipeline) -> Pipeline:
        groups = min(self.row_group_tokens, pipeline.microbatch_tokens) or None
        return replace(pipeline, local_bypass=self.local_bypass, row_group_tokens=groups)

    def __str__(self) -> str:
        groups = f", groups of {self.row_group_tokens}" if self.row_group_tokens else ""
        return ", local bypass" * self.local_bypass + groups


@dataclass(frozen=True)
class Case:
    """Several calls on one heap. `num_tokens[call][rank]` tokens of small integers: every order of a sum gives the same bytes."""

    name: str
    shape: LayerShape
    pipeline: Pipeline
    num_tokens: tuple[tuple[int, ...], ...]
    model: CommunicationModel = CommunicationModel.INC_ALL_TO_ALL
    seed: int = 0

    def layout(self, world: World) -> HeapLayout:
        check(self.shape, self.pipeline, world.num_ranks)
        return HeapLayout(Dims.of(self.model, world, self.shape, self.pipeline))

    def given(self, call: int, rank: int) -> RoutedTokens:
        """Tokens of one rank in one call; some choices are -1, some tokens choose an expert twice."""
        rng = np.random.default_rng((self.seed, call, rank))
        n, k = self.num_tokens[call][rank], self.shape.top_k
        tokens = rng.integers(-8, 8, (n, self.shape.hidden_size)).astype(ml_dtypes.bfloat16)
        expert_ids = rng.integers(-1, self.shape.num_experts, (n, k)).astype(np.int32)
        return RoutedTokens(tokens, expert_ids, rng.random((n, k), np.float32))


def exchange(pe: SimulatedPe, call: Call, given: RoutedTokens, output: np.ndarray) -> None:
    """One call of one rank over the role programs. Twin: `run` in exchange_kernel.cu."""
    programs = rank_programs(pe.layout.dims.model)
    first_magic = int(pe.memory["magic"][0]) + 1
    own = call.shape.experts_of_rank(pe.pe, pe.world.num_ranks)
    for group, number in schedule(call.pipeline.num_microbatches, call.pipeline.depth):
        magic, rows = first_magic + number, call.pipeline.tokens_of(number)
        part = RoutedTokens(given.tokens[rows], given.expert_ids[rows], given.weights[rows])
        if group is StageGroup.SEND:
            programs.push_microbatch(pe, call, magic, part)
        elif group is StageGroup.EXPERTS:
            received = programs.wait_for_expert_rows(pe, call, magic)
            ids = received.routing["expert_ids"][received.valid]
            factor = ((ids >= own.start) & (ids < own.stop)).sum(axis=1).astype(np.float32)
            products = received.rows[received.valid].astype("f4") * factor[:, None]
            received.rows[received.valid] = products.astype(ml_dtypes.bfloat16)
            programs.publish_partial_sums(pe, call, magic)
        else:
            output[rows] = programs.wait_for_token_sums(pe, call, magic, len(part))
    pe.memory["magic"][0] = first_magic + call.pipeline.num_microbatches - 1


def expected(case: Case, world: World, num_calls: int) -> tuple[list[dict[str, np.ndarray]], list[np.ndarray]]:
    """Memory of every PE after the first `num_calls` calls, and the outputs of all ranks in the last of them."""
    simulation = Simulation(world, case.layout(world), traced=False, sum_order=case.pipeline.sum_order)
    last = num_calls - 1
    outputs = [np.zeros((n, case.shape.hidden_size), ml_dtypes.bfloat16) for n in case.num_tokens[last]]

    def rank_program(pe: SimulatedPe) -> None:
        for number in range(num_calls):
            given = case.given(number, pe.pe)
            output = outputs[pe.pe] if number == last else np.zeros_like(given.tokens)
            exchange(pe, Call(case.shape, case.pipeline, layer=number), given, output)

    simulation.spawn_world(rank_program, run_switch)
    simulation.run()
    memory = [dict(pe.memory) for pe in simulation.pes]
    if not case.model.in_network:
        give_back_all_cells(memory, world)
    return memory, outputs


def give_back_all_cells(memory: list[dict[str, np.ndarray]], world: World) -> None:
    """Raise every credit that a relay still owes: a kernel gives each cell back at once, the role program several together."""
    for rank in range(world.num_ranks):
        for index, credits in enumerate(memory[rank]["relay_credits"]):
            credits[...] = memory[world.num_ranks + index]["relay_arrived"][rank] | np.uint64(1)
            credits[credits == 1] = 0
