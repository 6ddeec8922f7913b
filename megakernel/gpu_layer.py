"""The front end of the layer on a GPU: refuses what cannot run, converts what may be converted, and runs the Baseline."""

from __future__ import annotations

import torch
import torch.distributed as dist

from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, RowFormat, check
from inc_runtime.errors import ConfigurationError
from megakernel.checkpoint import ExpertWeights
from megakernel.gpu_baseline import GpuBaseline, block_sizes, check_shape
from megakernel.launch_baseline import GpuKernels
from megakernel.library_exchange import Counting, LibraryExchange

HOPPER = (9, 0)
INTEGERS = (torch.int32, torch.int64)


def check_gpu(device: torch.device) -> None:
    """Refuse a device that is not a Hopper GPU, or not torch's current one."""
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        raise ConfigurationError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}: the GPU kernels need "
            "a Hopper GPU (9.0). The host backend runs anywhere: keep experts and tokens on the CPU."
        )
    if device.index != torch.cuda.current_device():
        raise ConfigurationError(
            f"experts are on {device}, but torch's current device is cuda:{torch.cuda.current_device()}. "
            f"Call torch.cuda.set_device({device.index}) first."
        )


def check_tensor(name: str, tensor: torch.Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...], shape: tuple) -> None:
    """Refuse a tensor on another device, of another dtype or shape, or not contiguous."""
    if tensor.device != device:
        raise ConfigurationError(f"{name} is on {tensor.device}, expected {device}, where the experts are. Move it first.")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ConfigurationError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, expected {expected}. Convert it first.")
    if tuple(tensor.shape) != shape:
        raise ConfigurationError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}.")
    if not tensor.is_contiguous():
        raise ConfigurationError(f"{name} is not contiguous (strides {tensor.stride()}). Call .contiguous() first.")
    if tensor.data_ptr() % 16:
        raise ConfigurationError(f"{name} does not begin at a multiple of 16 bytes. Copy it, or slice at another row.")


def check_experts(experts: ExpertWeights, shape: LayerShape, own: range) -> None:
    """Refuse weights that are not those of this rank's experts, in bfloat16 on one GPU."""
    if experts.experts != own:
        raise ConfigurationError(
            f"experts are {experts.experts.start} to {experts.experts.stop - 1}, expected {own.start} to {own.stop - 1} on this "
            "rank. Load shape.experts_of_rank(rank, num_ranks)."
        )
    device = experts.gate_up.device
    gate_up = (len(own), 2 * shape.intermediate_size, shape.hidden_size)
    check_tensor("experts.gate_up", experts.gate_up, device, (torch.bfloat16,), gate_up)
    check_tensor("experts.down", experts.down, device, (torch.bfloat16,), (len(own), shape.hidden_size, shape.intermediate_size))


class GpuLayer:
    """The Baseline of one rank behind the checks of `MoELayer`. Collective to make; `group`: a NCCL group of the ranks."""

    def __init__(
        self,
        shape: LayerShape,
        pipeline: Pipeline,
        group: dist.ProcessGroup | None,
        experts: ExpertWeights,
        bias: torch.Tensor | None,
        model: CommunicationModel,
        counting: Counting = Counting.BOUNDED,
    ) -> None:
        self.shape, self.device = shape, experts.gate_up.device
        self.bound_tokens = pipeline.bound_tokens
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        if pipeline.row_format is not RowFormat.BFLOAT16:
            raise ConfigurationError(f"row_format = {pipeline.row_format.value}: on a GPU it must be bfloat16.")
        if model is not CommunicationModel.ALL_TO_ALL:
            raise ConfigurationError(f"model = {model.value}: the Baseline on a GPU runs all_to_all alone. Leave model out.")
        if "nccl" not in str(dist.get_backend(group)):
            raise ConfigurationError(
                f"the process group's backend is {dist.get_backend(group)}, expected nccl for experts on {self.device}. "
                "Make it with torch.distributed.init_process_group('nccl')."
            )
        check(shape, pipeline, num_ranks)
        check_shape(shape, num_ranks)
        check_experts(experts, shape, shape.experts_of_rank(rank, num_ranks))
        check_gpu(self.device)
        kernels, sizes = GpuKernels(), block_sizes(shape, pipeline.bound_tokens)
        exchange = LibraryExchange(group, sizes, counting)
        on_gpu = None if bias is None else bias.to(self.device)
        self.baseline = GpuBaseline(shape, exchange, sizes, kernels, experts, on_gpu)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None,
        expert_ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        out: torch.Tensor | None,
        bound_tokens: int | None,
    ) -> torch.Tensor:
        """See `MoELayer.__call__`; all tensors are on the experts' GPU. Runs on the current stream, waits for nothing.

        Values that cannot be routed are reported by the next call (`GpuBaseline`).
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
            router_logits = router_logits.detach().float()
        if expert_ids is not None and weights is not None:
            for name, tensor, dtypes in (("expert_ids", expert_ids, INTEGERS), ("weights", weights, (torch.float32,))):
                check_tensor(name, tensor, self.device, dtypes, (num_tokens, shape.top_k))
            expert_ids, weights = expert_ids.to(torch.int32), weights.detach()
        return self.baseline(
            hidden_states.detach(), router_logits, expert_ids=expert_ids, weights=weights, out=out, bound_tokens=bound
        )
