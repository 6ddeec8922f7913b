"""The heap of a server on GPUs, for processes that no launcher has started: ranks inside vLLM, switches of their own.

Each rank has a GPU of its own. Without switches (the plain all-to-all puts its messages straight to the ranks) nobody shares a
GPU; switches take a few SMs of the ranks' GPUs, through MPS.
"""

from __future__ import annotations

from inc_runtime.backends.nvshmem import DeviceHeap, NvshmemJob
from inc_runtime.environment import Environment
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.host_group import StoreGroup
from inc_runtime.placement import PlacementKind
from inc_runtime.rendezvous import JobNote


def join_server_heap(job: JobNote, pe: int) -> DeviceHeap:
    """Be `pe` of the job that `job` describes, and lay out its heap. Collective over ranks and switches.

    Raises: ConfigurationError, PlacementError, HeapTooLarge, and PeerMissing for one that does not come.
    """
    assert job.port is not None
    world, environment = job.world, Environment.read()
    names = [world.name_of(each) for each in range(world.num_pes)]
    group = StoreGroup(job.port, pe, names, environment.start_limit_s)
    kind = PlacementKind.NATIVE if world.num_pes == world.num_ranks else PlacementKind.SHARED
    layout = HeapLayout(Dims.of(job.model, world, job.shape, job.pipeline))
    return DeviceHeap(NvshmemJob.join(world, layout.heap_bytes, kind, pe=pe, group=group), layout)
