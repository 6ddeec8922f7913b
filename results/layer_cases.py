"""What the layer is measured on: model shapes, tokens and experts of scale 1, and the float64 result to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from inc_runtime.config import OLMOE_1B_7B, LayerShape
from megakernel.checkpoint import ExpertWeights
from megakernel.reference import bf16_bound, moe_layer_reference, relative_error, route_reference
from megakernel.workload import Routing, routing_bias
from results.layer_timing import Ranks

SHAPES = {
    "olmoe": OLMOE_1B_7B,
    "qwen3": LayerShape(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, renormalize=True),
    "mixtral": LayerShape(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336, renormalize=True),
}
"""OLMoE-1B-7B, Qwen3-30B-A3B, Mixtral-8x7B: one layer of each."""

MAX_CHECKED_ROWS = 2048
"""Rows of a rank that are compared with float64; of more tokens, so many at random: even steps meet the same warps again."""
BASELINE_SUM_ROUNDINGS = 4
"""For `bf16_bound`: the Baseline also rounds gate, up and the experts' outputs, which the fused layer keeps in float32."""


@dataclass(frozen=True)
class Case:
    """One point of the measurement: `num_tokens` on every rank."""

    shape_name: str
    num_tokens: int
    routing: Routing

    @property
    def shape(self) -> LayerShape:
        return SHAPES[self.shape_name]


class Experts:
    """All experts of a shape on this GPU, bfloat16, the same on every rank; `own` are views of this rank's."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        h, i = shape.hidden_size, shape.intermediate_size
        self.gate_up = torch.empty(shape.num_experts, 2 * i, h, dtype=torch.bfloat16, device="cuda")
        self.down = torch.empty(shape.num_experts, h, i, dtype=torch.bfloat16, device="cuda")
        generator = torch.Generator(device="cuda").manual_seed(7)
        for expert in range(shape.num_experts):
            self.gate_up[expert] = torch.randn(2 * i, h, generator=generator, device="cuda") / h**0.5
            self.down[expert] = torch.randn(h, i, generator=generator, device="cuda") / i**0.5

    def own(self, ranks: Ranks) -> ExpertWeights:
        experts = self.shape.experts_of_rank(ranks.rank, ranks.size)
        part = slice(experts.start, experts.stop)
        return ExpertWeights(experts, self.gate_up[part], self.down[part])

    def float64_layer(self, hidden: torch.Tensor, ids: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        """The layer in float64 on the GPU: the formula of `moe_layer_reference`, which `hold_to_reference` compares it with."""
        rows, out = hidden.double(), torch.zeros(hidden.shape, dtype=torch.float64, device="cuda")
        for expert, tokens, columns in pairs_of_experts(ids):
            factor = torch.from_numpy(weights[tokens, columns]).cuda()[:, None]
            where = torch.from_numpy(tokens).cuda()
            gate, up = (rows[where] @ self.gate_up[expert].double().T).chunk(2, dim=1)
            out.index_add_(0, where, factor * ((torch.nn.functional.silu(gate) * up) @ self.down[expert].double().T))
        return out

    def hold_to_reference(self, hidden: torch.Tensor, ids: np.ndarray, weights: np.ndarray) -> None:
        """Compare `float64_layer` with the project's reference on the first token. Raises AssertionError."""

        def weights_of(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.gate_up[expert], self.down[expert]

        given = hidden[:1], ids[:1], weights[:1]
        expected = moe_layer_reference(*given, weights_of, num_experts=self.shape.num_experts)
        error = relative_error(self.float64_layer(*given), expected)
        assert error < 1e-12, f"the float64 layer on the GPU is {error} away from the reference"


def pairs_of_experts(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each chosen expert with the tokens and columns that chose it; -1 is nobody's."""
    for expert in np.unique(ids[ids >= 0]).tolist():
        tokens, columns = np.nonzero(ids == expert)
        yield expert, tokens, columns


class Inputs:
    """Tokens [N, H] bfloat16 and logits [N, E] float32 of this rank, and what the layer should give for some of them."""

    def __init__(self, case: Case, experts: Experts, ranks: Ranks) -> None:
        self.case, self.ranks, shape, rank = case, ranks, case.shape, ranks.rank
        generator = torch.Generator(device="cuda").manual_seed(1000 * case.num_tokens + rank)
        self.hidden = torch.randn(case.num_tokens, shape.hidden_size, generator=generator, device="cuda").bfloat16()
        self.logits = torch.randn(case.num_tokens, shape.num_experts, generator=generator, device="cuda")
        self.logits += routing_bias(case.routing, shape, ranks.size).cuda()
        self.out = torch.empty_like(self.hidden)
        drawn = torch.randperm(case.num_tokens, generator=torch.Generator().manual_seed(rank))[:MAX_CHECKED_ROWS]
        self.checked = drawn.cuda()
        ids, weights = route_reference(self.logits[self.checked], shape)
        experts.hold_to_reference(self.hidden[self.checked], ids, weights)
        self.expected = experts.float64_layer(self.hidden[self.checked], ids, weights)

    def check(self, name: str, run, bound: float | None = None) -> float:
        """Run once on a poisoned output and compare. Returns the relative error. Raises AssertionError on any rank's."""
        self.out.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        seen = self.out[self.checked].double()
        error = float((seen - self.expected).norm() / self.expected.norm())
        written = bool(torch.isfinite(self.out).all())
        most = bound or bf16_bound(len(self.checked), self.case.shape, sum_roundings=BASELINE_SUM_ROUNDINGS)
        [worst] = self.ranks.reduce([error if written else float("inf")])
        if not worst <= most:
            raise AssertionError(f"{name}, {self.case}: error {error:.2e} here, {worst:.2e} at most, bound {most:.2e}")
        return worst
