"""The front end of the layer on a GPU: refuses what cannot run, converts what may be converted, runs Baseline or megakernel."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, RowFormat, check
from inc_runtime.errors import ConfigurationError
from inc_runtime.protocol import Role
from megakernel.checkpoint import ExpertWeights
from megakernel.gpu_baseline import GpuBaseline, block_sizes, check_shape
from megakernel.gpu_checks import check_experts, check_gpu, check_tensor
from megakernel.launch_baseline import GpuKernels
from megakernel.launch_megakernel import MegaKernel
from megakernel.library_exchange import Counting, LibraryExchange

INTEGERS = (torch.int32, torch.int64)


class GpuRunner(Protocol):
    """What `GpuLayer` drives: the Baseline, or the megakernel."""

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
    ) -> torch.Tensor: ...

    def raise_on_error(self) -> None: ...


def make_baseline(
    shape: LayerShape,
    pipeline: Pipeline,
    group: dist.ProcessGroup | None,
    experts: ExpertWeights,
    bias: torch.Tensor | None,
    model: CommunicationModel,
    counting: Counting = Counting.BOUNDED,
) -> GpuBaseline:
    """The Baseline of one rank. Collective; `group`: a NCCL group of the ranks. Raises ConfigurationError before it sends."""
    device = experts.gate_up.device
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if pipeline.row_format is not RowFormat.BFLOAT16:
        raise ConfigurationError(f"row_format = {pipeline.row_format.value}: on a GPU it must be bfloat16.")
    if model is not CommunicationModel.ALL_TO_ALL:
        raise ConfigurationError(f"model = {model.value}: the Baseline on a GPU runs all_to_all alone. Leave model out.")
    if "nccl" not in str(dist.get_backend(group)):
        raise ConfigurationError(
            f"the process group's backend is {dist.get_backend(group)}, expected nccl for experts on {device}. "
            "Make it with torch.distributed.init_process_group('nccl')."
        )
    check(shape, pipeline, num_ranks)
    check_shape(shape, num_ranks)
    check_experts(experts, shape, shape.experts_of_rank(rank, num_ranks))
    check_gpu(device)
    kernels, sizes = GpuKernels(), block_sizes(shape, pipeline.bound_tokens)
    exchange = LibraryExchange(group, sizes, counting)
    return GpuBaseline(shape, exchange, sizes, kernels, experts, None if bias is None else bias.to(device))


def make_megakernel(
    heap: DeviceHeap, shape: LayerShape, pipeline: Pipeline, experts: ExpertWeights, bias: torch.Tensor | None, layer: int
) -> MegaKernel:
    """The megakernel of one rank on a heap that switches serve. Raises ConfigurationError before anything is sent."""
    if heap.role is not Role.COMPUTE_RANK:
        raise ConfigurationError(f"{heap.job.name} has no experts: a layer lives on a rank. Start a RunningSwitch here.")
    device = torch.device(f"cuda:{heap.job.seat.gpu}")
    if experts.gate_up.device != device:
        raise ConfigurationError(f"experts are on {experts.gate_up.device}, the heap of this rank is on {device}. Move them.")
    check_experts(experts, shape, shape.experts_of_rank(heap.job.pe, heap.job.world.num_ranks))
    check_gpu(device)
    on_gpu = None if bias is None else bias.to(device)
    return MegaKernel(heap, shape, pipeline, experts.gate_up, experts.down, bias=on_gpu, layer=layer)


class GpuLayer:
    """One rank's layer on a GPU behind the checks of `MoELayer`. `logits`: the dtypes that `run` reads; others are converted."""

    def __init__(
        self, run: GpuRunner, shape: LayerShape, bound_tokens: int, device: torch.device, logits: tuple[torch.dtype, ...]
    ) -> None:
        self.run, self.shape, self.bound_tokens, self.device, self.logits = run, shape, bound_tokens, device, logits

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None,
        expert_ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        out: torch.Tensor | None,
        bound_tokens: int | None,
        token_count: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `MoELayer.__call__`; all tensors are on the experts' GPU. Runs on the current stream, waits for nothing.

        Values that cannot be routed are reported by the next call, or by `run.raise_on_error`.
        """
        shape, bound = self.shape, self.bound_tokens if bound_tokens is None else bound_tokens
        if not 1 <= bound <= self.bound_tokens:
            raise ConfigurationError(
                f"bound_tokens = {bound} of this call: it must be between 1 and the layer's bound_tokens = {self.bound_tokens}."
            )
        num_tokens = len(hidden_states)
        check_tensor("hidden_states", hidden_states, self.device, (torch.bfloat16,), (num_tokens, shape.hidden_size))
        if num_tokens > bound:
            raise ConfigurationError(
                f"hidden_states has {num_tokens} tokens, at most bound_tokens = {bound}. Give every rank a larger bound, or "
                "split the batch."
            )
        if out is None:
            out = torch.empty_like(hidden_states)
        check_tensor("out", out, self.device, (torch.bfloat16,), tuple(hidden_states.shape))
        if router_logits is not None:
            floats = (torch.float32, torch.bfloat16, torch.float16)
            check_tensor("router_logits", router_logits, self.device, floats, (num_tokens, shape.num_experts))
            router_logits = router_logits.detach()
            router_logits = router_logits if router_logits.dtype in self.logits else router_logits.float()
        if expert_ids is not None and weights is not None:
            for name, tensor, dtypes in (("expert_ids", expert_ids, INTEGERS), ("weights", weights, (torch.float32,))):
                check_tensor(name, tensor, self.device, dtypes, (num_tokens, shape.top_k))
            expert_ids, weights = expert_ids.to(torch.int32), weights.detach()
        return self.run(
            hidden_states.detach(),
            router_logits,
            expert_ids=expert_ids,
            weights=weights,
            out=out,
            bound_tokens=bound,
            token_count=token_count,
        )
