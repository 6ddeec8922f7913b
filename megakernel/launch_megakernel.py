"""Host side of `megakernel.cu`: the MoE layer of one rank on a GPU, one launch per call.

Needs a Hopper GPU, a `DeviceHeap` on which the switches serve, and torch for memory and streams. The launch goes to torch's
current stream; a failed wait shows at the next call, or at `raise_on_error`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.compile_cache import Verbs
from inc_runtime.config import LayerShape, Pipeline, Router, check
from inc_runtime.errors import ConfigurationError, PlacementError
from inc_runtime.protocol import signal_word
from megakernel.device_arguments import (
    HEADERS,
    LAYER_ARGUMENTS,
    MAX_EXPERTS,
    MAX_LOCAL_EXPERTS,
    MAX_TOP_K,
    TRACE_EVENT,
    TRACED_UNITS,
)
from megakernel.gpu_checks import check_tensor
from megakernel.layer_memory import memory_of
from megakernel.pipeline import device_lags

SOURCE = Path(__file__).with_name("megakernel.cu")
KERNEL = "megakernel"
THREADS = 512
SHARED_BYTES = 232448 - 1024
"""The 227 KB that a block can have, less what the block's static variables take; compared with sizeof(LayerStorage) there."""
CLOCKS_PER_SECOND = 2_000_000_000


def check_supported(shape: LayerShape, num_ranks: int, arch: str) -> None:
    """Refuse what the kernel cannot do. Raises PlacementError, ConfigurationError."""
    if arch != "sm_90a":
        raise PlacementError(f"the megakernel needs a Hopper GPU (sm_90a), found {arch}. Use the host backend.")
    local = -(-shape.num_experts // num_ranks)
    limits = (
        ("hidden_size", shape.hidden_size, shape.hidden_size % 256 == 0, "a multiple of 256"),
        ("intermediate_size", shape.intermediate_size, shape.intermediate_size % 128 == 0, "a multiple of 128"),
        ("num_experts", shape.num_experts, shape.num_experts <= MAX_EXPERTS, f"at most {MAX_EXPERTS}"),
        ("experts per rank", local, local <= MAX_LOCAL_EXPERTS, f"at most {MAX_LOCAL_EXPERTS}; more ranks hold fewer each"),
        ("top_k", shape.top_k, shape.top_k <= MAX_TOP_K, f"at most {MAX_TOP_K}"),
    )
    for name, value, good, limit in limits:
        if not good:
            raise ConfigurationError(f"{name} = {value}: the megakernel takes {limit}. Use the host backend, or pad.")


def check_heap(heap: DeviceHeap, shape: LayerShape, pipeline: Pipeline) -> None:
    """Refuse a heap that was laid out for something else. Raises ConfigurationError, PlacementError."""
    dims = heap.layout.dims
    if heap.verbs is not Verbs.DIRECT:
        raise PlacementError("the megakernel takes the direct verbs: beside NVSHMEM's calls ptxas serialises its products.")
    wanted = {
        "depth": pipeline.depth,
        "microbatch_tokens": pipeline.microbatch_tokens,
        "hidden_size": shape.hidden_size,
        "local_bypass": pipeline.local_bypass,
        "row_group_tokens": pipeline.row_group_tokens or 0,
        "ranks_per_phase": pipeline.ranks_per_phase if dims.model.phased else dims.ranks_per_phase,
    }
    for name, value in wanted.items():
        if getattr(dims, name) != value:
            raise ConfigurationError(f"{name} = {value}: the heap was laid out for {getattr(dims, name)}. Use one for both.")
    if shape.top_k > dims.top_k:
        raise ConfigurationError(f"top_k = {shape.top_k}: the heap's records hold {dims.top_k}. Lay it out for the largest k.")


def tensor_map(matrix: torch.Tensor, box_rows: int) -> np.ndarray:
    """Tensor map of a row-major bf16 matrix [rows, columns], boxes of `box_rows` x 64, 128-byte swizzle: 16 words."""
    rows, columns = matrix.shape
    storage = ctypes.create_string_buffer(128 + 64)
    address = (ctypes.addressof(storage) + 63) // 64 * 64
    bfloat16, swizzle_128, promote_256 = 9, 3, 3
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), bfloat16, 2, ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns * 2),
        (ctypes.c_uint32 * 2)(64, box_rows), (ctypes.c_uint32 * 2)(1, 1), 0, swizzle_128, promote_256, 0,
    )  # fmt: skip
    if status:
        raise PlacementError(f"cuTensorMapEncodeTiled failed with {status} for a matrix of {rows} x {columns}.")
    return np.frombuffer(ctypes.string_at(address, 128), "<u8")


class MegaKernel:
    """The layer on one rank. `gate_up` [E, 2I, H] (gate rows first), `down` [E, H, I]: bf16, on the GPU, this rank's experts.

    `bias` [num_experts] float32 counts for the choice of a sigmoid router. `layer`: compared by the switches, so that ranks that
    call layers in another order are refused. `num_blocks`: SMs to use, by default those of this PE's seat.
    `trace_length`: events to keep per block and class of unit. `copies_rows`: rows are copied into the order of the experts
    before MatMul 1, where it gathers them on load otherwise.
    """

    def __init__(
        self,
        heap: DeviceHeap,
        shape: LayerShape,
        pipeline: Pipeline,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        layer: int = 0,
        num_blocks: int | None = None,
        trace_length: int = 0,
        copies_rows: bool = False,
    ) -> None:
        world, self.heap, self.shape, self.pipeline = heap.job.world, heap, shape, pipeline
        check(shape, pipeline, world.num_ranks)
        check_supported(shape, world.num_ranks, heap.gpu.arch)
        check_heap(heap, shape, pipeline)
        self.device = torch.device(f"cuda:{heap.job.seat.gpu}")
        self.num_blocks = num_blocks or heap.job.seat.num_blocks
        if self.num_blocks > heap.job.seat.num_blocks:
            raise ConfigurationError(
                f"num_blocks = {num_blocks}: the placement gives this rank {heap.job.seat.num_blocks} SMs. Blocks beyond them "
                "would wait for SMs of other PEs, and the others for these."
            )
        self.experts = shape.experts_of_rank(heap.job.pe, world.num_ranks)
        self.copies_rows = copies_rows
        defines = ["INC_TRACE"] * (trace_length > 0) + ["INC_COPIES_ROWS"] * copies_rows
        self.built = heap.build(SOURCE, headers=HEADERS, defines=defines)
        heap.gpu.function(self.built.path, KERNEL)  # loaded now: a module cannot be loaded while a graph is captured
        num = len(self.experts)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        check_tensor("gate_up", gate_up, self.device, (torch.bfloat16,), (num, 2 * inner, hidden))
        check_tensor("down", down, self.device, (torch.bfloat16,), (num, hidden, inner))
        if bias is not None:
            if shape.router is not Router.SIGMOID:
                raise ConfigurationError("bias: a softmax router has none. Use Router.SIGMOID, or leave it out.")
            check_tensor("bias", bias, self.device, (torch.float32,), (shape.num_experts,))
        self.memory = memory_of(heap, shape, pipeline, num, self.device)
        self._kept = [gate_up, down, bias]
        self._record, self._record_address = heap.gpu.pinned(np.dtype([("word", "<u8")]))
        self.arguments = np.zeros((), LAYER_ARGUMENTS)
        self._fill_matmul(gate_up, down)
        self._fill_layer(bias, layer, trace_length)

    def _fill_matmul(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        heap, memory, matmul = self.heap, self.memory, self.arguments["matmul"]
        if len(self.experts):
            matmul["gate_up_weights"]["words"] = tensor_map(gate_up.flatten(0, 1), 128)
            matmul["down_weights"]["words"] = tensor_map(down.flatten(0, 1), 128)
        matmul["activation_rows"]["words"] = tensor_map(memory.activation, 64)
        matmul["output_rows"]["words"] = tensor_map(memory.output, 64)
        matmul["token_rows"] = heap.job.slab + heap.layout.offset(heap.role, "expert_rows")
        for name in ("row_to_token", "activation", "output", "activation_flags", "tiles_done", "ticket_word"):
            matmul[name] = getattr(memory, name).data_ptr()
        if self.copies_rows:
            grouped = torch.empty_like(memory.output)
            self._kept.append(grouped)
            matmul["grouped_rows"], matmul["input_rows"]["words"] = grouped.data_ptr(), tensor_map(grouped, 64)
            matmul["row_tile_arrival"] = memory.row_tile_arrival.data_ptr()
        matmul["error_record"] = self._record_address
        matmul["abort_word"] = heap.job.slab + heap.layout.offset(heap.role, "abort")
        matmul["abort_value"] = signal_word(heap.job.pe + 1, True)
        # Twice the limit of the protocol's waits: those know who is missing, and report first.
        matmul["wait_limit_clocks"] = int(2 * heap.job.environment.wait_limit_s * CLOCKS_PER_SECOND)
        matmul["num_experts"] = len(self.experts)
        matmul["hidden"], matmul["intermediate"] = self.shape.hidden_size, self.shape.intermediate_size
        matmul["lag_tiles"] = 2 * self.num_blocks

    def _fill_layer(self, bias: torch.Tensor | None, layer: int, trace_length: int) -> None:
        arguments, memory, shape = self.arguments, self.memory, self.shape
        arguments["bias"] = 0 if bias is None else bias.data_ptr()
        arguments["groupings"], arguments["position"] = memory.groupings.data_ptr(), memory.position.data_ptr()
        if trace_length:
            size = self.num_blocks * len(TRACED_UNITS) * trace_length * TRACE_EVENT.itemsize
            self.trace = torch.zeros(size, dtype=torch.uint8, device=self.device)
            arguments["trace"], arguments["trace_length"] = self.trace.data_ptr(), trace_length
        arguments["num_experts"], arguments["top_k"], arguments["layer"] = shape.num_experts, shape.top_k, layer
        arguments["sigmoid"], arguments["renormalize"] = shape.router is Router.SIGMOID, shape.renormalize
        arguments["first_expert"] = self.experts.start
        arguments["row_capacity"] = self.heap.layout.dims.expert_row_capacity
        arguments["grouped_capacity"] = memory.grouped_capacity
        lags = device_lags(self.pipeline.depth)
        arguments["group_lag"], arguments["reduce_lag"], arguments["combine_lag"] = lags.group, lags.reduce, lags.combine

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        *,
        expert_ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        bound_tokens: int | None = None,
        token_count: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launch the layer on this rank's tokens. Collective: every rank calls, also one with no tokens.

        `hidden_states` [N, H] bf16; `router_logits` [N, num_experts] float32 or bf16, or `expert_ids` [N, k] int32 with `weights`
        [N, k] float32; all contiguous on this rank's GPU. Returns `out` [N, H], the caller's memory. Asynchronous: the result is
        there when torch's current stream has come so far, and a failure shows at `raise_on_error` or at the next call.

        A call may be captured in a CUDA graph, the first one too. A replay reads the same addresses: what they hold may change,
        and with `token_count` [1] int32 on the GPU also how many of the N tokens count; rows of `out` behind them stay.
        """
        self.raise_on_error()
        self.memory.follow(self.heap)
        num_tokens, bound = len(hidden_states), bound_tokens or self.pipeline.bound_tokens
        if num_tokens > bound or bound > self.pipeline.bound_tokens:
            raise ConfigurationError(
                f"{num_tokens} tokens with bound_tokens = {bound}: the layer was built for {self.pipeline.bound_tokens}. "
                "Build it with a larger bound."
            )
        hidden, num_experts, top_k = self.shape.hidden_size, self.shape.num_experts, self.shape.top_k
        out = torch.empty_like(hidden_states) if out is None else out
        for name, tensor in (("hidden_states", hidden_states), ("out", out)):
            check_tensor(name, tensor, self.device, (torch.bfloat16,), (num_tokens, hidden))
        arguments = self.arguments
        if router_logits is not None:
            check_tensor("router_logits", router_logits, self.device, (torch.float32, torch.bfloat16), (num_tokens, num_experts))
            arguments["logits"], expert_ids, weights = router_logits.data_ptr(), self.memory.expert_ids, self.memory.weights
            arguments["logits_are_bfloat16"] = router_logits.dtype == torch.bfloat16
        elif expert_ids is not None and weights is not None:
            check_tensor("expert_ids", expert_ids, self.device, (torch.int32,), (num_tokens, top_k))
            check_tensor("weights", weights, self.device, (torch.float32,), (num_tokens, top_k))
            arguments["logits"] = 0
        else:
            raise ConfigurationError("give router_logits, or both expert_ids and weights.")
        arguments["tokens"], arguments["output"] = hidden_states.data_ptr(), out.data_ptr()
        arguments["expert_ids"], arguments["weights"] = expert_ids.data_ptr(), weights.data_ptr()
        if token_count is not None:
            check_tensor("token_count", token_count, self.device, (torch.int32,), (1,))
        arguments["token_count"] = 0 if token_count is None else token_count.data_ptr()
        arguments["num_tokens"], arguments["bound_tokens"] = num_tokens, bound
        pipeline = replace(self.pipeline, bound_tokens=bound)
        arguments["num_microbatches"], arguments["ramp_steps"] = pipeline.num_microbatches, pipeline.ramp_steps
        arguments["edge_tokens"] = pipeline.edge_tokens or 0
        self.heap.argument["barrier_after_dispatch"] = self.pipeline.barrier_after_dispatch
        self.heap.launch(
            self.built, KERNEL, [arguments], num_blocks=self.num_blocks, num_threads=THREADS, shared_bytes=SHARED_BYTES,
            stream=torch.cuda.current_stream(self.device).cuda_stream,
        )  # fmt: skip
        return out

    def raise_on_error(self) -> None:
        """Raise what the kernels of this rank have reported. Raises what `DeviceHeap.check` raises, and TimeoutError."""
        word = int(self._record["word"][0])
        if self.heap.record["state"][0] or word:
            self.heap.check()
            raise TimeoutError(
                f"{self.heap.job.name}: block {word >> 40} of the megakernel gave up at wait {word >> 32 & 255} of "
                f"bounded_wait.cuh, detail {word & 0xFFFFFFFF}. Look whether another process holds its SMs."
            )
