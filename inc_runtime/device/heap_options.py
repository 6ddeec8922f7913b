"""What the kernels on a heap are compiled with for its options, and which options they do not have yet."""

from __future__ import annotations

from inc_runtime.compile_cache import Verbs
from inc_runtime.config import CommunicationModel
from inc_runtime.device.arguments import MAX_DEPTH
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import Dims


def heap_defines(dims: Dims) -> list[str]:
    """Macros of ranks and switches, besides those of the communication model: NAME or NAME=VALUE."""
    planes = [f"INC_PLANES={dims.dispatch_planes}"] if dims.dispatch_planes > 1 else []
    return ["INC_LOCAL_BYPASS"] * dims.local_bypass + ["INC_CUT_THROUGH"] * (dims.row_groups > 0) + planes


def model_options(dims: Dims) -> list[str]:
    """Options of the compiler that make a kernel of the ranks one of this heap."""
    names = ["INC_RELAYED"] * (not dims.model.in_network) + ["INC_PHASED"] * dims.model.phased
    return [f"-D{name}" for name in [*names, *["INC_DIRECT"] * dims.direct, *heap_defines(dims)]]


def check_options(dims: Dims, verbs: Verbs) -> None:
    """Refuse what the kernels do not do yet. Raises ConfigurationError."""
    options = {
        "phases": dims.model.phased,
        "local_bypass": dims.local_bypass,
        "row_group_tokens": dims.row_groups > 0,
        "planes": dims.dispatch_planes > 1,
    }
    chosen = [name for name, on in options.items() if on]
    if chosen and verbs is Verbs.NVSHMEM:
        raise ConfigurationError(
            f"{', '.join(chosen)}: the kernels take the direct verbs alone for it so far. Leave it off, or use these verbs."
        )
    if options["planes"] and (dims.model is not CommunicationModel.INC_ALL_TO_ALL or len(chosen) > 1):
        raise ConfigurationError(
            f"{dims.dispatch_planes} planes, {dims.model.value}, {', '.join(chosen)}: the kernels have planes for "
            f"{CommunicationModel.INC_ALL_TO_ALL.value} without other options. Use one switch of each role, or the host backend."
        )
    most = MAX_DEPTH // dims.dispatch_planes
    if dims.depth > most:
        raise ConfigurationError(f"depth = {dims.depth}: the kernels take {most} at most here. Use a smaller depth.")
