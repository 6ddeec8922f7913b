"""Starts the persistent kernel of a switch PE. The kernels: `device/switch_kernel.cu`; their twins: `run_switch.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.compile_cache import Built, build
from inc_runtime.config import CommunicationModel, SumOrder
from inc_runtime.device.arguments import MAX_SWITCH_BLOCKS, SWITCH_ARGUMENTS, SWITCH_MOMENT, WORKSPACE
from inc_runtime.device.heap_options import heap_defines
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import Dims
from inc_runtime.protocol import Role

SOURCE = Path(__file__).with_name("device") / "switch_kernel.cu"
SWITCH_THREADS = 512
CLERK_THREADS = 32
"""One warp more, where a clerk opens and closes phases beside the copies."""
ROLES = {Role.DISPATCH_SWITCH: "dispatch", Role.COMBINE_SWITCH: "combine"}


class RunningSwitch:
    """One launch of a switch kernel: it serves until every rank has stopped.

    `timeline_length`: how many moments to keep, of when the tokens of a microbatch were there and when its words went out; on a
    relay, of its first and its last chunk.
    """

    def __init__(
        self,
        heap: DeviceHeap,
        sum_order: SumOrder,
        *,
        num_blocks: int | None = None,
        timeline_length: int = 0,
        replay_plan: bool = False,
    ) -> None:
        self.heap, self.timeline_length = heap, timeline_length
        self.timeline = heap.gpu.allocate(timeline_length * SWITCH_MOMENT.itemsize) if timeline_length else 0
        moments = np.zeros(timeline_length, SWITCH_MOMENT)
        moments["arrived"] = np.iinfo(np.uint64).max  # the chunks of a relay take the least
        heap.gpu.write(self.timeline, moments)
        built = build_switch(heap)
        arguments = np.zeros((), SWITCH_ARGUMENTS)
        arguments["timeline"], arguments["timeline_length"] = self.timeline, timeline_length
        arguments["rank_order"], arguments["replay_plan"] = sum_order is SumOrder.RANK, replay_plan
        shared_bytes = shared_bytes_of(heap)
        opened, offset = WORKSPACE.fields["opened"][:2]  # type: ignore[index]
        heap.gpu.fill(heap.workspace + offset, 0, opened.itemsize)  # a stop that an earlier launch has seen
        blocks = min(num_blocks or heap.job.seat.num_blocks, MAX_SWITCH_BLOCKS)
        check_groups(heap.layout.dims, blocks)
        heap.launch(
            built,
            kernel_of(heap.role, heap.layout.dims.model),
            [arguments],
            num_blocks=blocks,
            num_threads=SWITCH_THREADS + CLERK_THREADS * has_clerk(heap.role, heap.layout.dims.model),
            shared_bytes=shared_bytes,
        )

    def wait(self, *, limit_s: float | None = None) -> np.ndarray:
        """Return the moments once the kernel has ended. Raises what `DeviceHeap.check` raises."""
        self.heap.wait(limit_s=limit_s)
        moments = np.zeros(0, SWITCH_MOMENT)
        if self.timeline:
            moments = self.heap.gpu.read(self.timeline, self.timeline_length * SWITCH_MOMENT.itemsize).view(SWITCH_MOMENT)
            self.heap.gpu.free(self.timeline)
        return np.sort(moments[moments["magic"] > 0], order="magic")


def check_groups(dims: Dims, num_blocks: int) -> None:
    """Refuse more row groups than the switch's blocks can watch, a warp of each. Raises ConfigurationError."""
    if dims.num_ranks * dims.row_groups > 32 * num_blocks:
        raise ConfigurationError(
            f"row_group_tokens = {dims.row_group_tokens}: {dims.num_ranks * dims.row_groups} groups of all ranks, of which "
            f"{num_blocks} blocks of the switch watch {32 * num_blocks} at most. Use larger groups."
        )


def kernel_of(role: Role, model: CommunicationModel) -> str:
    """The kernel in `device/switch_kernel.cu` that a switch of this role runs."""
    if not model.in_network:
        return f"{ROLES[role]}_relay_kernel"
    return f"{ROLES[role]}_{'phased' if model.phased else 'switch'}_kernel"


def has_clerk(role: Role, model: CommunicationModel) -> bool:
    """Whether that kernel has a warp that only opens and closes phases."""
    return model.phased and (role is Role.DISPATCH_SWITCH or not model.in_network)


def shared_bytes_of(heap: DeviceHeap) -> int:
    """Dynamic shared memory of a switch block. Twin: `tile_bytes` in regroup.cuh."""
    num_ranks = heap.layout.dims.num_ranks
    return SWITCH_THREADS * (4 + 4 * num_ranks + 2 * num_ranks)


def build_switch(heap: DeviceHeap) -> Built:
    """Compile the switch kernels for this GPU, or take them from the cache."""
    built = build(SOURCE, heap.verbs, heap.gpu.arch, defines=heap_defines(heap.layout.dims))
    if heap.verbs.value == "nvshmem":
        heap.job.init_module(built)
    return built
