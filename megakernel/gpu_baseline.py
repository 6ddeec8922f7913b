"""The Baseline on a GPU: the ten stages of the layer, one after another, each storing its tensor.

Ours are the vector stages (`baseline_kernels.cu`); the matrix products are torch's grouped products, the two collectives the
library's. All memory is allocated at construction, for the bound of the layer; torch's allocator keeps that of the products.
With bounded exchanges nothing waits for the host, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from inc_runtime.config import LayerShape
from inc_runtime.device.arguments import MAX_RANKS
from inc_runtime.errors import ConfigurationError
from megakernel import stages
from megakernel.baseline_arguments import (
    BASELINE_ARGUMENTS,
    MAX_EXPERTS,
    MAX_TOP_K,
    RouterKind,
    error_of,
    packet_bytes,
)
from megakernel.checkpoint import ExpertWeights
from megakernel.launch_baseline import ROUTE_SIZES, Allocate, Kernels
from megakernel.library_exchange import BlockSizes, Exchange

Mark = Callable[[str], None]


def check_shape(shape: LayerShape, num_ranks: int) -> None:
    """Refuse shapes that the kernels cannot do. Raises ConfigurationError that names those they can."""
    limits = {
        "num_experts": (shape.num_experts, MAX_EXPERTS),
        "top_k": (shape.top_k, MAX_TOP_K),
        "num_ranks": (num_ranks, MAX_RANKS),
    }
    for name, (value, most) in limits.items():
        if value > most:
            raise ConfigurationError(f"{name} = {value}: the Baseline's GPU kernels take {most} at most.")
    for name, value in (("hidden_size", shape.hidden_size), ("intermediate_size", shape.intermediate_size)):
        if value % 8:
            raise ConfigurationError(f"{name} = {value}: on a GPU it must be a multiple of 8, so that rows are 16-byte words.")


def block_sizes(shape: LayerShape, bound_tokens: int) -> BlockSizes:
    """What an exchange needs to know of a layer."""
    return BlockSizes(bound_tokens, packet_bytes(shape.hidden_size, shape.top_k), 2 * shape.hidden_size)


class GpuBaseline:
    """One layer on one rank. `experts`: this rank's, bfloat16 on the GPU; `bias` [E] float32 there.

    Errors that only the GPU can see (logits that are not finite, experts that do not exist) are raised by the next call, or by
    `raise_on_error` after a synchronisation; the output of the call that had them is undefined.
    """

    def __init__(
        self,
        shape: LayerShape,
        exchange: Exchange,
        sizes: BlockSizes,
        kernels: Kernels,
        experts: ExpertWeights,
        bias: torch.Tensor | None = None,
    ) -> None:
        check_shape(shape, exchange.num_ranks)
        self.shape, self.exchange, self.kernels, self.experts, self.bias = shape, exchange, kernels, experts, bias
        self.bound_tokens = sizes.bound_tokens
        self.route_kernel = f"route_{next(most for most in ROUTE_SIZES if shape.num_experts <= most)}_experts"
        self._allocate(kernels.allocate)
        a = self.arguments = np.zeros((), BASELINE_ARGUMENTS)
        for name, tensor in self._memory.items():
            a[name] = tensor.data_ptr()
        self._fill_places(a, exchange)
        a["sent_counts"] = exchange.sent_counts.data_ptr()
        a["error_word"] = kernels.error_address
        a["bias"] = 0 if bias is None else bias.data_ptr()
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
            a[name] = getattr(shape, name)
        a["smaller_share"], a["larger_ranks"] = divmod(shape.num_experts, exchange.num_ranks)
        a["num_ranks"], a["first_expert"] = exchange.num_ranks, experts.experts.start
        a["num_local_experts"] = len(experts.experts)
        a["router"], a["renormalize"] = RouterKind.of(shape, bias is not None), shape.renormalize

    @staticmethod
    def _fill_places(a: np.ndarray, exchange: Exchange) -> None:
        places, num_ranks = exchange.places, exchange.num_ranks
        fields = {"send_blocks": places.send or [0] * num_ranks, "partial_blocks": places.partial}
        fields |= {"returned_blocks": places.returned, "received_rows": places.received_rows}
        fields |= {"received_records": places.received_records, "received_counts": places.received_counts}
        for name, addresses in fields.items():
            a[name][:num_ranks] = addresses
        a["row_stride"], a["record_stride"] = places.row_stride, places.record_stride
        if places.slots:
            a["slots"] = places.slots

    def _allocate(self, allocate: Allocate) -> None:
        shape, num_ranks, bound = self.shape, self.exchange.num_ranks, self.bound_tokens
        rows, num_local, blocks = num_ranks * bound, len(self.experts.experts), self.kernels.num_mover_blocks
        pairs = rows * shape.top_k
        num_bytes = {
            "expert_ids": 4 * bound * shape.top_k,
            "weights": 4 * bound * shape.top_k,
            "token_ranks": 4 * bound,
            "slots": 4 * bound * num_ranks,
            "grouped": 2 * pairs * shape.hidden_size,
            "pair_positions": 4 * pairs,
            "expert_ends": 4 * num_local,
            "activations": 2 * pairs * shape.intermediate_size,
            "group_counts": 4 * num_local * blocks,
            "group_barrier": 8,
        }
        self._memory = {name: allocate(max(size, 16)) for name, size in num_bytes.items()}
        self._memory["group_barrier"].zero_()
        self.grouped = self._memory["grouped"].view(torch.bfloat16).view(pairs, shape.hidden_size)
        self.activations = self._memory["activations"].view(torch.bfloat16).view(pairs, shape.intermediate_size)
        self.expert_ends = self._memory["expert_ends"][: 4 * num_local].view(torch.int32)
        chosen = bound, shape.top_k
        self.expert_ids = self._memory["expert_ids"][: 4 * bound * shape.top_k].view(torch.int32).view(chosen)
        self.weights = self._memory["weights"][: 4 * bound * shape.top_k].view(torch.float32).view(chosen)

    def raise_on_error(self) -> None:
        """Raise ConfigurationError if a finished call met an error that only the GPU could see."""
        word = int(self.kernels.error_word)
        if word:
            self.kernels.error_word[...] = 0
            raise ConfigurationError(error_of(word, self.exchange.rank) or f"unknown error word {word:#x}")

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        *,
        expert_ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        out: torch.Tensor,
        bound_tokens: int | None = None,
        token_count: torch.Tensor | None = None,
        mark: Mark = lambda stage: None,
    ) -> torch.Tensor:
        """Run the layer on the current stream and fill `out` [N, H]. Collective.

        `hidden_states` [N, H] bfloat16; `router_logits` [N, E] float32, or `expert_ids` [N, k] int32 and `weights` [N, k]
        float32: contiguous, on this GPU; unchanged until the stream has passed. `bound_tokens`: the most that any rank brings,
        equal on all. `mark` is called with the name of each stage before it is launched, and with "end".
        """
        if token_count is not None:
            raise ConfigurationError("token_count: the Baseline takes the tokens that count alone. Leave the others out.")
        self.raise_on_error()
        bound, a, launch = bound_tokens or self.bound_tokens, self.arguments, self.kernels.launch
        num_tokens = len(hidden_states)
        a["num_tokens"], a["tokens"], a["output"] = num_tokens, hidden_states.data_ptr(), out.data_ptr()
        mark(stages.ROUTE.name)
        if router_logits is not None:
            a["logits"] = router_logits.data_ptr()
            launch(self.route_kernel, a, num_tokens)
        else:
            assert expert_ids is not None and weights is not None
            a["given_ids"], a["given_weights"] = expert_ids.data_ptr(), weights.data_ptr()
            launch("route_given", a, num_tokens)
        mark(stages.PACK.name)
        if self.exchange.places.send:
            launch("pack", a)
        mark(stages.DISPATCH.name)
        self.exchange.dispatch(a, bound)
        mark(stages.GROUP.name)
        launch("group", a)
        mark(stages.MATMUL_GATE_UP.name)
        projections = self.kernels.grouped_mm(self.grouped, self.experts.gate_up, self.expert_ends)
        a["projections"] = projections.data_ptr()
        mark(stages.SWIGLU.name)
        launch("swiglu", a)
        mark(stages.MATMUL_DOWN.name)
        outputs = self.kernels.grouped_mm(self.activations, self.experts.down, self.expert_ends)
        a["expert_outputs"] = outputs.data_ptr()
        mark(stages.REDUCE.name)
        launch("reduce", a)
        mark(stages.COMBINE.name)
        self.exchange.combine(bound)
        mark(stages.GLOBAL_REDUCE.name)
        launch("global_reduce", a, num_tokens)
        mark("end")
        return out
