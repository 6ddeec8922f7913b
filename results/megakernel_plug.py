"""The megakernel as a plug of `measure_moe_layer.py`: on a heap beside the Baseline's NCCL group, in one job.

    torchrun --nproc-per-node 2 -m results.measure_moe_layer --plug megakernel=results.megakernel_plug:plain
    python -m inc_runtime.mps -- torchrun --nproc-per-node 4 -m results.measure_moe_layer --ranks 2 \\
        --plug megakernel_inc=results.megakernel_plug:inc

The first needs no switch: the ranks of the plain all-to-all put their messages straight to each other; with `plain_bypass` none
to themselves. In the second the two further processes are the switches; they keep their SMs while a case is measured.
"""

from __future__ import annotations

import os
from functools import partial

from inc_runtime.backends.nvshmem import DeviceHeap, NvshmemJob
from inc_runtime.config import CommunicationModel, Pipeline, SumOrder
from inc_runtime.device.exchange import stop_switches
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.protocol import World
from megakernel.launch_megakernel import MegaKernel
from results.layer_cases import Case, Experts, Inputs
from results.layer_rivals import Run
from switch_emulator.launch_switch import RunningSwitch

MIN_MICROBATCH_TOKENS, MAX_MICROBATCH_TOKENS, DEPTH = 1024, 2048, 4
LIMIT_S = 120.0


def pipeline_of(case: Case, local_bypass: bool) -> Pipeline:
    """How a case is cut: in two at least, unless it is small; an expert's rows must fill its tiles of 128."""
    microbatch_tokens = min(case.num_tokens, max(MIN_MICROBATCH_TOKENS, min(case.num_tokens // 2, MAX_MICROBATCH_TOKENS)))
    return Pipeline(case.num_tokens, microbatch_tokens, DEPTH, local_bypass=local_bypass)


def layout_of(case: Case, world: World, model: CommunicationModel, *, local_bypass: bool = False) -> HeapLayout:
    """The heap of a case."""
    return HeapLayout(Dims.of(model, world, case.shape, pipeline_of(case, local_bypass)))


class MegaKernelPlug:
    """See `layer_rivals.Plug`. One job for all cases, a heap for each."""

    def __init__(self, model: CommunicationModel, cases: list[Case], num_ranks: int, *, local_bypass: bool = False) -> None:
        switches = (int(os.environ["WORLD_SIZE"]) - num_ranks) // 2
        self.model, self.world, self.local_bypass = model, World(num_ranks, switches, switches), local_bypass
        slab_bytes = max(self._layout(case).heap_bytes for case in cases)
        self.job = NvshmemJob.join(self.world, slab_bytes)
        self.heap: DeviceHeap | None = None
        self.switch: RunningSwitch | None = None

    def _layout(self, case: Case) -> HeapLayout:
        return layout_of(case, self.world, self.model, local_bypass=self.local_bypass)

    def layer(self, inputs: Inputs, experts: Experts) -> Run:
        """The megakernel on this rank's experts, one launch a call."""
        case, own = inputs.case, experts.own(inputs.ranks)
        self.heap = DeviceHeap(self.job, self._layout(case))
        kernel = MegaKernel(self.heap, case.shape, pipeline_of(case, self.local_bypass), own.gate_up, own.down)
        return lambda: kernel(inputs.hidden, inputs.logits, out=inputs.out)

    def serve(self, case: Case) -> None:
        """A switch runs its kernel until the ranks stop it."""
        self.heap = DeviceHeap(self.job, self._layout(case))
        self.switch = RunningSwitch(self.heap, SumOrder.ARRIVAL)

    def close(self) -> None:
        """End the switches and free the heap; errors of its kernels are raised here."""
        assert self.heap is not None
        if self.switch is not None:
            self.switch.wait(limit_s=LIMIT_S)
        else:
            self.heap.check()
            stop_switches(self.heap)
        self.job.barrier()
        self.heap.close()
        self.heap = self.switch = None


plain = partial(MegaKernelPlug, CommunicationModel.ALL_TO_ALL)
plain_bypass = partial(MegaKernelPlug, CommunicationModel.ALL_TO_ALL, local_bypass=True)
inc = partial(MegaKernelPlug, CommunicationModel.INC_ALL_TO_ALL)
