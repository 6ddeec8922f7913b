"""The implementations that are measured side by side, each as a function that fills the inputs' `out`.

The Baseline is ours; grouped_mm alone is torch's pair of grouped products on the Baseline's grouped rows, with no communication
and no SwiGLU: the floor of any layer on these products; DeepGEMM's FP8 Mega MoE is measured where `deep_gemm` can be imported
(sgl-deep-gemm 0.1.5 with apache-tvm-ffi 0.1.11), its input quantisation included, its routing not. Others come in by
`--plug name=module:factory`, see `Plug`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from megakernel.gpu_baseline import GpuBaseline, block_sizes
from megakernel.launch_baseline import GpuKernels
from megakernel.library_exchange import Counting, LibraryExchange
from megakernel.reference import bf16_bound
from results.layer_cases import Case, Experts, Inputs
from results.layer_timing import Ranks

Run = Callable[[], object]
FP8_BOUND = 0.09
"""Relative error that FP8 operands may give: 4 bits of significand, three roundings; a swapped gate and up gives more than 1."""


def make_baseline(case: Case, ranks: Ranks, experts: Experts, kernels: GpuKernels, counting: Counting) -> GpuBaseline:
    """The Baseline with memory for `case.num_tokens` on each rank."""
    sizes = block_sizes(case.shape, case.num_tokens)
    exchange = LibraryExchange(ranks.group, sizes, counting)
    return GpuBaseline(case.shape, exchange, sizes, kernels, experts.own(ranks))


def captured(run: Run) -> Run:
    """`run` as a CUDA graph that is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def grouped_mm_pair(layer: GpuBaseline) -> Run:
    """Both grouped products on the rows that the last call of `layer` grouped."""
    pairs = int(layer.expert_ends[-1])
    rows, activations = layer.grouped[:pairs], layer.activations[:pairs]

    def run() -> None:
        layer.kernels.grouped_mm(rows, layer.experts.gate_up, layer.expert_ends)
        layer.kernels.grouped_mm(activations, layer.experts.down, layer.expert_ends)

    return run


def fp8_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, n, k] as FP8 with one float32 scale for each block of 128 x 128."""
    num, n, k = weights.shape
    blocks = weights.float().view(num, n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax(dim=(2, 4), keepdim=True).clamp(1e-4) / 448.0
    return (blocks / scale).to(torch.float8_e4m3fn).view(num, n, k), scale.view(num, n // 128, k // 128)


def deepgemm_fp8(case: Case, inputs: Inputs, experts: Experts, ids: torch.Tensor, weights: torch.Tensor) -> Run:
    """DeepGEMM's fused FP8 layer on ids [N, k] int32 and weights [N, k] float32, made outside of its time. Collective."""
    import deep_gemm

    shape, own = case.shape, experts.own(inputs.ranks)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        inputs.ranks.group or dist.group.WORLD, shape.num_experts, case.num_tokens, shape.top_k, shape.hidden_size,
        shape.intermediate_size, mma_type="fp8xfp8",
    )
    gate_up, down = deep_gemm.transform_weights_for_mega_moe_sm90(fp8_blocks(own.gate_up), fp8_blocks(own.down))

    def run() -> None:
        deep_gemm.mega_moe_pre_dispatch_sm90(
            inputs.hidden, ids, weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, case.num_tokens
        )
        deep_gemm.fp8_mega_moe(inputs.out, gate_up, down, buffer)

    return run


class Plug(Protocol):
    """An implementation from elsewhere. `factory(cases, num_ranks)` makes it, on every process of the job, before any group: it
    may join a job of its own and initialise torch.distributed with gloo for all processes.
    """

    def layer(self, inputs: Inputs, experts: Experts) -> Run:
        """What fills `inputs.out`. Collective over the ranks."""
        ...

    def serve(self, case: Case) -> None:
        """What a process that is no rank does while the ranks measure one case."""
        ...

    def close(self) -> None:
        """End of the case, on every process."""
        ...


def plugged(spec: str, cases: list[Case], num_ranks: int) -> tuple[str, Plug]:
    """Name and implementation of `name=module:factory`."""
    name, _, place = spec.partition("=")
    module, _, factory = place.partition(":")
    return name, getattr(importlib.import_module(module), factory)(cases, num_ranks)


def fused_bound(inputs: Inputs) -> float:
    """The error that a layer may have which keeps the experts' intermediates in float32."""
    return bf16_bound(len(inputs.checked), inputs.case.shape)
