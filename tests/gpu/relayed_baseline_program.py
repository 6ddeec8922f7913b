"""What each process of the relayed Baseline's GPU test runs under torchrun: the layer through relay switches against float64.

    python -m inc_runtime.mps -- torchrun --nproc-per-node 4 -m tests.gpu.relayed_baseline_program --ranks 2 --placement one_gpu
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys

import numpy as np
import torch

from inc_runtime.backends.nvshmem import DeviceHeap, NvshmemJob
from inc_runtime.config import CommunicationModel, LayerShape, SumOrder
from inc_runtime.device.exchange import stop_switches
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.placement import PlacementKind
from inc_runtime.protocol import Role, World
from megakernel.gpu_baseline import GpuBaseline, block_sizes
from megakernel.launch_baseline import GpuKernels
from megakernel.reference import bf16_bound, route_reference
from megakernel.relayed_exchange import RelayedExchange, whole_batch
from results.layer_cases import BASELINE_SUM_ROUNDINGS, Experts
from results.layer_timing import Ranks
from switch_emulator.launch_switch import RunningSwitch

SHAPE = LayerShape(num_experts=18, top_k=3, hidden_size=512, intermediate_size=384, renormalize=True)
LIMIT_S = 60.0
TIMED_CALLS = 12


class Layer:
    """The Baseline of a rank, or the relay that serves it."""

    def __init__(self, job: NvshmemJob, bound: int) -> None:
        self.job = job
        dims = Dims.of(CommunicationModel.ALL_TO_ALL, job.world, SHAPE, whole_batch(bound))
        self.heap = DeviceHeap(job, HeapLayout(dims), poison=True)
        self.switch = None
        if self.heap.role is not Role.COMPUTE_RANK:
            self.switch = RunningSwitch(self.heap, SumOrder.RANK)
            return
        torch.cuda.set_device(job.seat.gpu)
        self.experts = Experts(SHAPE)
        own = self.experts.own(Ranks(None, job.pe, job.world.num_ranks))
        exchange = RelayedExchange(self.heap, SHAPE)
        sizes, kernels = block_sizes(SHAPE, bound), GpuKernels(num_sms=job.seat.num_blocks)
        self.baseline = GpuBaseline(SHAPE, exchange, sizes, kernels, own)

    def error(self, count: int, push: int) -> float:
        """Relative error of one call with `count` tokens here; `push`: how many of the first experts get all tokens."""
        hidden = torch.randn(count, SHAPE.hidden_size, device="cuda").bfloat16()
        logits = torch.randn(count, SHAPE.num_experts, device="cuda")
        logits[:, :push] += 100.0
        out = self.baseline(hidden, logits, out=torch.full_like(hidden, torch.nan))
        torch.cuda.synchronize()
        self.baseline.raise_on_error()
        self.heap.check()
        if not count:
            return 0.0
        expected = self.experts.float64_layer(hidden, *route_reference(logits, SHAPE))
        error = float((out.double() - expected).norm() / expected.norm())
        return error if np.isfinite(error) else float("inf")

    def times(self, count: int) -> list[float]:
        """Microseconds of calls in a row."""
        hidden = torch.randn(count, SHAPE.hidden_size, device="cuda").bfloat16()
        logits, out = torch.randn(count, SHAPE.num_experts, device="cuda"), torch.empty_like(hidden)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_CALLS + 1)]
        for event in events:
            self.baseline(hidden, logits, out=out)
            event.record()
        torch.cuda.synchronize()
        self.heap.check()
        return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]

    def close(self) -> None:
        if self.switch is None:
            stop_switches(self.heap)
        else:
            self.switch.wait(limit_s=LIMIT_S)
        self.job.barrier()
        self.heap.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placement", type=PlacementKind, default=None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--switches", type=int, default=1, help="of each role; 0: the ranks reach each other")
    options = parser.parse_args()
    cases = [((700, 700), 0), ((700, 0), 0), ((5, 333), 0), ((0, 0), 0), ((700, 450), 3), ((700, 1), 1)]
    good = True
    with NvshmemJob.join(World(options.ranks, options.switches, options.switches), 256 << 20, options.placement) as job:
        layer = Layer(job, 700)
        for counts, push in cases:
            job.barrier()
            error = layer.error(counts[job.pe % 2], push) if layer.switch is None else 0.0
            worst = max(job.gather(error))
            good &= worst <= bf16_bound(700, SHAPE, sum_roundings=BASELINE_SUM_ROUNDINGS)
            if job.pe == 0:
                print(f"tokens {counts}, pushed to {push} experts: error {worst:.2e}", flush=True)
        job.barrier()
        times = layer.times(700) if layer.switch is None else []
        everyone = [own for own in job.gather(times) if own]
        if job.pe == 0:
            print(f"700 tokens per rank: {statistics.median(map(max, zip(*everyone, strict=True))):.0f} us a call")
            print(f"relayed_baseline_program: {'all passed' if good else 'FAILED'}", flush=True)
        layer.close()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
