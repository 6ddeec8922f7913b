"""What is refused before a launch: a device without our kernels, tensors that they cannot read, weights of other experts."""

from __future__ import annotations

import torch

from inc_runtime.config import LayerShape
from inc_runtime.errors import ConfigurationError
from megakernel.checkpoint import ExpertWeights

HOPPER = (9, 0)


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
