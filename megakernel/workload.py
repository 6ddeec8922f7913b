"""What a comparison runs on: tokens, logits, experts, and the two references, prepared once and shared by file.

Either a checkpoint and text (`TextWorkload`), or random weights and a chosen routing (`RandomWorkload`). Every rank reads
its own part; all hold the same `WorkloadFile`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from inc_runtime.config import LayerShape
from megakernel.checkpoint import ExpertWeights, load_experts, read_layer_shape
from megakernel.reference import moe_layer_reference, route_reference


class Routing(enum.Enum):
    """Which experts random tokens choose."""

    UNIFORM = "uniform"
    ZIPF = "zipf"
    HOT_EXPERT = "hot-expert"
    HOT_RANK = "hot-rank"


@dataclass(frozen=True)
class RankTokens:
    """One rank's part: `hidden_states` [N, H] bfloat16, `router_logits` [N, E] float32."""

    hidden_states: torch.Tensor
    router_logits: torch.Tensor


class WorkloadFile:
    """The prepared tensors, in rank order: hidden_states, router_logits, reference [float64], and transformers if known."""

    def __init__(self, path: Path, tokens_of_rank: Sequence[int]) -> None:
        self.path = path
        self.first = np.concatenate([[0], np.cumsum(tokens_of_rank)])

    @staticmethod
    def write(path: Path, **tensors: torch.Tensor) -> None:
        """Write all tensors; the file appears whole or not at all."""
        partial = path.with_suffix(".partial")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        partial.rename(path)

    def has(self, name: str) -> bool:
        with safe_open(self.path, "pt") as file:
            return name in list(file.keys())

    def array(self, name: str) -> np.ndarray:
        """One tensor of all ranks in float64."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name).double().numpy()

    def of_rank(self, rank: int) -> RankTokens:
        part = slice(int(self.first[rank]), int(self.first[rank + 1]))
        with safe_open(self.path, "pt") as file:
            return RankTokens(file.get_slice("hidden_states")[part], file.get_slice("router_logits")[part])


@dataclass(frozen=True)
class TextWorkload:
    """The MoE block of `layer` of a checkpoint, on the hidden states that the demo text has when it reaches that block."""

    checkpoint: Path
    layer: int

    def shape(self) -> LayerShape:
        return read_layer_shape(self.checkpoint)

    def experts(self, own: range) -> ExpertWeights:
        return load_experts(self.checkpoint, self.layer, own)

    def prepare(self, path: Path, num_tokens: int, num_ranks: int) -> None:
        """Run the text through the model up to the block, then both references, and write the workload file."""
        from megakernel.olmoe import demo_text, hidden_states_of_text, transformers_moe_block

        hidden = hidden_states_of_text(self.checkpoint, self.layer, demo_text(), num_tokens)
        block = transformers_moe_block(self.checkpoint, self.layer, hidden)
        reference = float64_reference(self, hidden, block.router_logits)
        WorkloadFile.write(
            path,
            hidden_states=hidden,
            router_logits=block.router_logits,
            reference=torch.from_numpy(reference),
            transformers=block.output,
        )


@dataclass(frozen=True)
class RandomWorkload:
    """Seeded random experts and tokens of scale 1, with a chosen routing."""

    layer_shape: LayerShape
    routing: Routing = Routing.UNIFORM
    seed: int = 0

    def shape(self) -> LayerShape:
        return self.layer_shape

    def experts(self, own: range) -> ExpertWeights:
        h, i = self.layer_shape.hidden_size, self.layer_shape.intermediate_size
        gate_up = torch.empty(len(own), 2 * i, h, dtype=torch.bfloat16)
        down = torch.empty(len(own), h, i, dtype=torch.bfloat16)
        for position, expert in enumerate(own):
            generator = torch.Generator().manual_seed(self.seed * 100_003 + expert)
            gate_up[position] = torch.randn(2 * i, h, generator=generator) / h**0.5
            down[position] = torch.randn(h, i, generator=generator) / i**0.5
        return ExpertWeights(own, gate_up, down)

    def prepare(self, path: Path, num_tokens: int, num_ranks: int) -> None:
        """Draw tokens and logits, compute the float64 reference, and write the workload file."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        hidden = torch.randn(num_tokens, self.layer_shape.hidden_size, generator=generator).bfloat16()
        logits = torch.randn(num_tokens, self.layer_shape.num_experts, generator=generator)
        logits += routing_bias(self.routing, self.layer_shape, num_ranks)
        reference = float64_reference(self, hidden, logits)
        WorkloadFile.write(path, hidden_states=hidden, router_logits=logits, reference=torch.from_numpy(reference))


Workload = TextWorkload | RandomWorkload


def routing_bias(routing: Routing, shape: LayerShape, num_ranks: int) -> torch.Tensor:
    """What is added to standard normal logits so that choices follow `routing`: [num_experts] float32."""
    bias = torch.zeros(shape.num_experts)
    if routing is Routing.ZIPF:
        bias -= 1.2 * torch.log(torch.arange(1, shape.num_experts + 1).float())
    elif routing is Routing.HOT_EXPERT:
        bias[shape.num_experts // 2] = 100.0
    elif routing is Routing.HOT_RANK:
        own = shape.experts_of_rank(0, num_ranks)
        bias[own.start : own.stop] = 100.0
    return bias


def float64_reference(workload: Workload, hidden: torch.Tensor, logits: torch.Tensor) -> np.ndarray:
    """The dense float64 result: [num_tokens, H]."""
    shape = workload.shape()
    expert_ids, weights = route_reference(logits.double().numpy(), shape)

    def weights_of(expert: int) -> tuple[np.ndarray, np.ndarray]:
        loaded = workload.experts(range(expert, expert + 1))
        return loaded.gate_up[0].double().numpy(), loaded.down[0].double().numpy()

    return moe_layer_reference(hidden, expert_ids, weights, weights_of, num_experts=shape.num_experts)
