"""The fused forms of the layer on the host: one pipeline over microbatches, for MegaKernel and MegaKernel INC alike.

The implementations differ only in the communication model of the heap, which supplies the four rank programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from inc_runtime.collectives import rank_programs
from inc_runtime.collectives.microbatch import Call, ReceivedRows, RoutedTokens
from inc_runtime.config import LayerShape
from inc_runtime.one_sided import OneSided
from inc_runtime.routing import route
from megakernel import experts as stage
from megakernel.experts import HostExperts
from megakernel.pipeline import StageGroup, schedule


@dataclass(frozen=True)
class LayerInput:
    """What a call brings: `tokens` [N, H] in the row format, and either router logits or chosen experts.

    `logits` [N, E] float32, `bias` [E] float32; or `expert_ids` [N, k] int32 and `weights` [N, k] float32. Checked before.
    """

    shape: LayerShape
    tokens: np.ndarray
    logits: np.ndarray | None = None
    bias: np.ndarray | None = None
    expert_ids: np.ndarray | None = None
    weights: np.ndarray | None = None

    def route(self, rows: slice) -> RoutedTokens:
        """Stage 1: the experts and weights of these tokens."""
        if self.logits is not None:
            return RoutedTokens(self.tokens[rows], *route(self.logits[rows], self.shape, self.bias))
        assert self.expert_ids is not None and self.weights is not None
        return RoutedTokens(self.tokens[rows], self.expert_ids[rows], self.weights[rows])


def run_fused(pe: OneSided, call: Call, experts: HostExperts, given: LayerInput, output: np.ndarray) -> None:
    """Run all microbatches of one call and fill `output` [N, H].

    Advances the magic of this heap by the number of microbatches, also for a rank without tokens.
    """
    programs = rank_programs(pe.layout.dims.model)
    first_magic = int(pe.memory["magic"][0]) + 1
    for group, number in schedule(call.pipeline.num_microbatches, call.pipeline.depth):
        magic = first_magic + number
        rows = call.pipeline.tokens_of(number)
        num_rows = len(given.tokens[rows])
        if group is StageGroup.SEND:
            with pe.stage("route", magic, rows=num_rows):
                routed = given.route(rows)
            programs.push_microbatch(pe, call, magic, routed)
        elif group is StageGroup.EXPERTS:
            received = programs.wait_for_expert_rows(pe, call, magic)
            run_experts(pe, magic, experts, received)
            programs.publish_partial_sums(pe, call, magic)
        else:
            output[rows] = programs.wait_for_token_sums(pe, call, magic, num_rows)
    pe.memory["magic"][0] = first_magic + call.pipeline.num_microbatches - 1


def run_experts(pe: OneSided, magic: int, experts: HostExperts, received: ReceivedRows) -> None:
    """Stages 3 to 7 of one microbatch, tile by tile, so that no intermediate of the experts leaves local memory."""
    with pe.stage("group", magic, rows=len(received)):
        grouped = stage.group(received, experts)
    dtype = stage.format_of(received)
    partial = torch.zeros(len(received), received.rows.shape[1])
    for expert, positions in stage.expert_tiles(grouped):
        rows = positions.stop - positions.start
        with pe.stage("matmul_gate_up", magic, rows=rows):
            projections = stage.matmul_gate_up(stage.gather_tile(received, grouped, positions), experts.gate_up[expert])
        with pe.stage("swiglu", magic, rows=rows):
            activations = stage.swiglu(projections, dtype)
        with pe.stage("matmul_down", magic, rows=rows):
            outputs = stage.matmul_down(activations, experts.down[expert])
        with pe.stage("reduce", magic, rows=rows):
            stage.reduce(partial, grouped, positions, outputs[:rows])
    stage.write_partial_sums(received, partial)
