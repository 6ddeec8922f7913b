"""What each process of the megakernel's GPU tests runs under torchrun: the layer against float64, bits that repeat, times.

python -m inc_runtime.mps -- torchrun --nproc-per-node 6 -m tests.gpu.megakernel_program right --placement one_gpu
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from dataclasses import dataclass, replace

import torch

from inc_runtime.backends.nvshmem import DeviceHeap, NvshmemJob
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, Router, SumOrder
from inc_runtime.device.exchange import stop_switches
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.placement import PlacementKind
from inc_runtime.protocol import Role, World
from megakernel.device_trace import DeviceTrace
from megakernel.launch_megakernel import MegaKernel
from switch_emulator.launch_switch import RunningSwitch

OLMOE = LayerShape(64, 8, 2048, 1024)
SMALL = LayerShape(16, 4, 256, 128)
UNEVEN = LayerShape(18, 3, 512, 384, renormalize=True)
SIGMOID = LayerShape(16, 4, 256, 128, router=Router.SIGMOID, renormalize=True)
LIMIT_S = 60.0
RELATIVE_BOUND = 6e-3
"""Of the norm: bf16 rounds the activation, the expert's output, the partial sum and the sum; 2^-9 / sqrt(3) each, at most."""


@dataclass(frozen=True)
class Case:
    """Calls of one layer. `num_tokens[call][rank]`; `skew`: added to the logits of the first experts."""

    name: str
    shape: LayerShape
    pipeline: Pipeline
    num_tokens: tuple[tuple[int, ...], ...]
    model: CommunicationModel = CommunicationModel.INC_ALL_TO_ALL
    skew: float = 0.0
    masked: bool = False
    logits_dtype: torch.dtype = torch.float32


def cases(num_ranks: int, model: CommunicationModel) -> list[Case]:
    uneven = tuple(tuple((5 * call + 3 * rank) % 9 for rank in range(num_ranks)) for call in range(6))
    nobody = ((0,) * num_ranks, (1,) * num_ranks, (0,) * num_ranks, (8,) + (0,) * (num_ranks - 1))
    full = ((1000,) * num_ranks, tuple(1000 - 300 * (rank % 3) for rank in range(num_ranks)))
    chosen = [
        Case("one microbatch, uneven tokens", SMALL, Pipeline(8, 8, 4), uneven),
        Case("nobody has tokens", SMALL, Pipeline(8, 8, 4), nobody),
        Case("many microbatches, experts uneven", UNEVEN, Pipeline(1000, 64, 4), full),
        Case("depth 1", SMALL, Pipeline(100, 16, 1), ((100,) * num_ranks,)),
        Case("depth 2", SMALL, Pipeline(100, 16, 2), ((100,) * num_ranks,)),
        Case("depth 3, rank order", SMALL, Pipeline(1000, 100, 3, sum_order=SumOrder.RANK), full),
        Case("depth 6", SMALL, Pipeline(1000, 50, 6), full),
        Case("sigmoid with bias", SIGMOID, Pipeline(1000, 128, 4), full),
        Case("all tokens to the first experts", SMALL, Pipeline(1000, 250, 4), full, skew=30.0),
        Case("choices of -1", SMALL, Pipeline(1000, 250, 4), full, masked=True),
        Case("olmoe, logits in bf16", OLMOE, Pipeline(1000, 512, 4), full, logits_dtype=torch.bfloat16),
        Case("olmoe, one token", OLMOE, Pipeline(1, 1, 4), ((1,) * num_ranks,) * 2),
    ]
    if model.phased:
        groups = [1, 2, num_ranks]
        chosen = [replace(c, pipeline=replace(c.pipeline, ranks_per_phase=groups[i % 3])) for i, c in enumerate(chosen)]
    return [replace(case, model=model) for case in chosen]


class Layer:
    """Weights of all experts from one seed, the same on every rank, and the kernel on this rank's share."""

    def __init__(self, job: NvshmemJob, case: Case, **kernel: object) -> None:
        self.job, self.case, shape = job, case, case.shape
        layout = HeapLayout(Dims.of(case.model, job.world, shape, case.pipeline))
        self.heap = DeviceHeap(job, layout, poison=True)
        self.switch = self.kernel = None
        if self.heap.role is not Role.COMPUTE_RANK:
            self.switch = RunningSwitch(self.heap, case.pipeline.sum_order)
            return
        self.device = torch.device("cuda", job.seat.gpu)
        torch.cuda.set_device(self.device)
        draw = torch.Generator(device=self.device).manual_seed(1)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=draw, device=self.device)

        E, H, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
        self.gate_up = (normal(E, 2 * inner, H) * H**-0.5).bfloat16()
        self.down = (normal(E, H, inner) * inner**-0.5).bfloat16()
        self.bias = normal(E) if shape.router is Router.SIGMOID else None
        own = shape.experts_of_rank(job.pe, job.world.num_ranks)
        share = slice(own.start, own.stop)
        self.kernel = MegaKernel(self.heap, shape, case.pipeline, self.gate_up[share].contiguous(), self.down[share].contiguous(),
                                 bias=self.bias, **kernel)  # fmt: skip

    def inputs(self, call: int) -> dict[str, torch.Tensor]:
        """Tokens of scale 1 and logits; or, masked, chosen experts with -1 among them."""
        case, shape = self.case, self.case.shape
        draw = torch.Generator(device=self.device).manual_seed(100 * call + self.job.pe)
        n = case.num_tokens[call][self.job.pe]
        tokens = torch.randn(n, shape.hidden_size, generator=draw, device=self.device).bfloat16()
        logits = torch.randn(n, shape.num_experts, generator=draw, device=self.device)
        logits[:, : shape.top_k] += case.skew
        if not case.masked:
            return {"hidden_states": tokens, "router_logits": logits.to(case.logits_dtype)}
        ids, weights = self.routed(logits)
        ids[torch.rand(ids.shape, generator=draw, device=self.device) < 0.3] = -1
        ids[: n // 10] = -1
        return {"hidden_states": tokens, "expert_ids": ids.int(), "weights": weights.float()}

    def routed(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, logits = self.case.shape, logits.double()
        sigmoid = shape.router is Router.SIGMOID
        scores = logits.sigmoid() if sigmoid else logits.softmax(1)
        choice = scores + self.bias.double() if sigmoid else logits
        ids = choice.argsort(dim=1, descending=True, stable=True)[:, : shape.top_k]
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(1, keepdim=True) if shape.renormalize else weights

    def reference(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """The layer in float64."""
        if "router_logits" in given:
            ids, weights = self.routed(given["router_logits"])
        else:
            ids, weights = given["expert_ids"], given["weights"].double()
        tokens = given["hidden_states"].double()
        out = torch.zeros_like(tokens)
        for expert in range(self.case.shape.num_experts):
            token, column = (ids == expert).nonzero(as_tuple=True)
            if len(token):
                gate, up = (tokens[token] @ self.gate_up[expert].double().T).chunk(2, dim=1)
                product = (torch.nn.functional.silu(gate) * up) @ self.down[expert].double().T
                out.index_add_(0, token, product * weights[token, column, None])
        return out

    def close(self) -> None:
        if self.switch is None:
            stop_switches(self.heap)
        else:
            self.switch.wait(limit_s=LIMIT_S)
        self.job.barrier()
        self.heap.close()


def check_case(job: NvshmemJob, case: Case) -> list[str]:
    """Compare every call with float64; returns what is wrong."""
    layer = Layer(job, case)
    problems, worst = [], 0.0
    for call in range(len(case.num_tokens)):
        job.barrier()
        if layer.kernel is not None:
            given = layer.inputs(call)
            n = len(given["hidden_states"])
            out = torch.full((n + 1, case.shape.hidden_size), float("nan"), device=layer.device, dtype=torch.bfloat16)
            layer.kernel(out=out[:n], **given)
            torch.cuda.synchronize()
            layer.kernel.check()
            wanted = layer.reference(given)
            difference = out[:n].double() - wanted
            error = float(difference.norm() / wanted.norm().clamp(min=1e-30)) if n else 0.0
            rows = difference.norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-2) if n else torch.zeros(1)
            worst = max(worst, error)
            if not (error < RELATIVE_BOUND and float(rows.max()) < 4 * RELATIVE_BOUND):
                problems.append(f"call {call}: relative error {error:.2e}, of the worst row {float(rows.max()):.2e}")
            if not bool(out[n:].isnan().all()):
                problems.append(f"call {call}: wrote beyond the output")
        job.barrier()
        layer.heap.check()
    layer.close()
    return problems or [] if worst < RELATIVE_BOUND else [f"relative error {worst}"]


def check_bits(job: NvshmemJob, repeats: int) -> list[str]:
    """The same tokens give the same bits in rank order, whatever comes first; the grid varies."""
    case = Case("bits", OLMOE, Pipeline(700, 128, 4, sum_order=SumOrder.RANK), ((700,) * job.world.num_ranks,))
    layer = Layer(job, case)
    problems: list[str] = []
    first = None
    for repeat in range(repeats):
        job.barrier()
        if layer.kernel is not None:
            layer.kernel.num_blocks = max(1, job.seat.num_blocks - repeat % 7)
            torch.cuda._sleep((repeat * 7919 + job.pe * 104729) % 400_000)
            out = layer.kernel(**layer.inputs(0))
            torch.cuda.synchronize()
            layer.kernel.check()
            first = out if first is None else first
            if not torch.equal(out, first):
                problems.append(f"call {repeat} gave other bits")
        job.barrier()
    layer.close()
    return problems


def timed_case(spec: str, num_ranks: int, model: CommunicationModel, group: int) -> Case:
    """The OLMoE layer for a specification N:m_b:D."""
    num_tokens, microbatch_tokens, depth = map(int, spec.split(":"))
    pipeline = Pipeline(num_tokens, microbatch_tokens, depth, ranks_per_phase=group)
    return Case(f"{model.value} N:m_b:D = {spec}", OLMOE, pipeline, ((num_tokens,) * num_ranks,), model)


def show_trace(job: NvshmemJob, case: Case) -> None:
    """Print which stage of rank 0 ran when, and how busy its units were."""
    layer = Layer(job, case, trace_length=4096)
    for _ in range(3):
        job.barrier()
        if layer.kernel is not None:
            layer.kernel.trace.zero_()
            layer.kernel(**layer.inputs(0))
            torch.cuda.synchronize()
            layer.kernel.check()
    job.barrier()
    if layer.kernel is not None and job.pe == 0:
        trace = DeviceTrace.of(layer.kernel)
        begin, end = trace.span_ns
        print(f"trace {case.name}: {(end - begin) / 1e3:.1f} us, busy {trace.busy_share()}")
        for name, number, first, last, spent in trace.stages():
            print(f"  {name:16s} {number:3d}  {first:8.1f} to {last:8.1f}, {spent:7.1f} us per block")
    layer.close()


def measure(job: NvshmemJob, case: Case, repeats: int = 12) -> None:
    """Median over calls of the longest launch of any rank."""
    layer = Layer(job, case)
    times: list[float] = []
    if layer.kernel is not None:
        given = layer.inputs(0)
        out = torch.empty_like(given["hidden_states"])
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize()
    job.barrier()
    if layer.kernel is not None:
        for event in events:
            layer.kernel(out=out, **given)
            event.record()
        torch.cuda.synchronize()
        layer.kernel.check()
        times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
    everyone = [t for t in job.gather(times) if t]
    layer.close()
    if job.pe == 0:
        longest = [max(call) for call in zip(*everyone, strict=True)]
        print(f"time {case.name}: {statistics.median(longest):.1f} us", flush=True)


def report(job: NvshmemJob, name: str, problems: list[str]) -> bool:
    everyone = job.gather(problems)
    if job.pe == 0:
        first = [f"{job.world.name_of(pe)}: {text}" for pe, texts in enumerate(everyone) for text in texts[:2]]
        print(f"{'FAILED' if first else 'passed'}  {name}" + "".join(f"\n        {text}" for text in first), flush=True)
    return not any(everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("properties", nargs="+", choices=["right", "bits", "time", "trace"])
    parser.add_argument("--placement", type=PlacementKind, default=None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", type=CommunicationModel, default=CommunicationModel.INC_ALL_TO_ALL)
    parser.add_argument("--group", type=int, default=1, help="ranks per phase of a measurement")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--tokens", default="8192:1024:4", help="N:m_b:D, several by commas")
    parser.add_argument("--slab-mib", type=int, default=1024)
    options = parser.parse_args()
    with NvshmemJob.join(World(options.ranks), options.slab_mib << 20, options.placement) as job:
        good = True
        if "right" in options.properties:
            for case in cases(options.ranks, options.model):
                good &= report(job, case.name, check_case(job, case))
        if "bits" in options.properties:
            good &= report(job, f"{options.repeats} calls give the same bits", check_bits(job, options.repeats))
        for spec in options.tokens.split(","):
            case = timed_case(spec, options.ranks, options.model, options.group)
            if "trace" in options.properties:
                show_trace(job, case)
            if "time" in options.properties:
                measure(job, case)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
