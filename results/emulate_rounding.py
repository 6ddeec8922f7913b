"""How far bfloat16 moves the log-probabilities of a random OLMoE, emulated on a CPU: python -m results.emulate_rounding

The model of `measure_vllm.py` at a quarter of the width, in torch: float32; bfloat16 with the roundings of vLLM's MoE (of
projections and weighted outputs of experts), or with ours (of activations and outputs); and two mistakes, for scale. Rounding
flips choices of experts, so that it grows from layer to layer. Half a minute on one core. Source of the roundings:
`megakernel/experts.py`, and where vLLM's fused kernel stores bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

LAYERS, HIDDEN, INNER, EXPERTS, TOP_K, HEAD = 16, 512, 256, 64, 8, 128
SEQUENCES, LENGTH, VOCABULARY = 2, 128, 4000
SPREAD = 0.02 * (2048 / HIDDEN) ** 0.5


@dataclass(frozen=True)
class Arithmetic:
    """`rounds`: what is stored, as the dtype holds it. `stock`: where vLLM's MoE rounds, else where ours does."""

    rounds: Callable[[Tensor], Tensor]
    stock: bool = False
    num_experts: int = TOP_K
    swapped: bool = False


def bfloat16(tensor: Tensor) -> Tensor:
    """Values of bfloat16, in float32."""
    return tensor.bfloat16().float()


class Model:
    """A random model; all values are bfloat16's."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw(*size: int, spread: float = SPREAD) -> Tensor:
            return bfloat16(torch.randn(*size, generator=generator) * spread)

        self.layers = [
            (
                draw(3 * HIDDEN, HIDDEN),
                draw(HIDDEN, HIDDEN),
                draw(EXPERTS, HIDDEN),
                draw(EXPERTS, 2 * INNER, HIDDEN, spread=2 * SPREAD),
                draw(EXPERTS, HIDDEN, INNER, spread=2 * SPREAD),
            )
            for _ in range(LAYERS)
        ]
        self.tokens, self.head = draw(SEQUENCES * LENGTH, HIDDEN), draw(VOCABULARY, HIDDEN)
        self.chosen = torch.randint(VOCABULARY, (SEQUENCES * LENGTH,), generator=generator)

    def logprobs(self, arithmetic: Arithmetic) -> Tensor:
        """Of one token at each position: [tokens]."""
        rounds, rows = arithmetic.rounds, self.tokens
        for qkv, out, gate, gate_up, down in self.layers:
            rows = rounds(rows + attention(norm(rows, rounds), qkv, out, rounds))
            rows = rounds(rows + experts(norm(rows, rounds), gate, gate_up, down, arithmetic))
        all_of_them = (norm(rows, rounds) @ self.head.T).log_softmax(-1)
        return all_of_them[torch.arange(len(rows)), self.chosen]


def norm(rows: Tensor, rounds: Callable[[Tensor], Tensor]) -> Tensor:
    """RMS norm with weights of 1."""
    return rounds(rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5))


def attention(rows: Tensor, qkv: Tensor, out: Tensor, rounds: Callable[[Tensor], Tensor]) -> Tensor:
    """Causal, with OLMoE's norm of queries and keys; no positions."""

    def heads(tensor: Tensor) -> Tensor:
        return tensor.view(SEQUENCES, LENGTH, HIDDEN // HEAD, HEAD).transpose(1, 2)

    query, key, value = rounds(rows @ qkv.T).chunk(3, -1)
    scores = heads(norm(query, rounds)) @ heads(norm(key, rounds)).transpose(-1, -2) * HEAD**-0.5
    scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -1e30)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    mixed = (rounds(weights) @ heads(value)) / weights.sum(-1, keepdim=True)
    return rounds(rounds(mixed.transpose(1, 2).reshape(rows.shape)) @ out.T)


def experts(rows: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The MoE layer on two ranks, each with half of the experts and a partial sum."""
    rounds = arithmetic.rounds
    weights, ids = rounds(rows @ gate.T).softmax(-1).topk(TOP_K, -1)
    weights, ids = weights[:, : arithmetic.num_experts], ids[:, : arithmetic.num_experts]
    partial = torch.zeros(2, *rows.shape)
    for expert in range(EXPERTS):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        projections = rows[token] @ gate_up[expert].T
        projections = rounds(projections) if arithmetic.stock else projections
        first, second = projections.chunk(2, -1)[:: -1 if arithmetic.swapped else 1]
        output = rounds(silu(first) * second) @ down[expert].T
        weight = weights[token, choice, None]
        output = rounds(output * weight) if arithmetic.stock else rounds(output) * weight
        partial[expert * 2 // EXPERTS].index_add_(0, token, output)
    return rounds(rounds(partial[0]) + rounds(partial[1]))


def main() -> None:
    """Print the mean absolute differences."""
    torch.set_num_threads(1)
    model = Model()
    exact, stock = model.logprobs(Arithmetic(lambda tensor: tensor)), model.logprobs(Arithmetic(bfloat16, stock=True))
    ours = model.logprobs(Arithmetic(bfloat16))
    for name, one, other in (("vLLM's, float32", stock, exact), ("ours, float32", ours, exact), ("ours, vLLM's", ours, stock)):
        print(f"{name}: {float((one - other).abs().mean()):.4f} of a spread of {float(exact.std()):.3f}")
    for name, wrong in (("7 of 8 experts", {"num_experts": 7}), ("gate and up swapped", {"swapped": True})):
        print(f"{name}, vLLM's: {float((model.logprobs(Arithmetic(bfloat16, **wrong)) - stock).abs().mean()):.4f}")


if __name__ == "__main__":
    main()
