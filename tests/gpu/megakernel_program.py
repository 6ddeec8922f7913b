"""What each process of the megakernel's GPU tests runs under torchrun: the layer against float64, bits that repeat, times.

python -m inc_runtime.mps -- torchrun --nproc-per-node 6 -m tests.gpu.megakernel_program right --placement one_gpu
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

from inc_runtime.backends.nvshmem import NvshmemJob
from inc_runtime.config import CommunicationModel, Pipeline, SumOrder
from inc_runtime.errors import IncError
from inc_runtime.placement import PlacementKind
from inc_runtime.protocol import World
from megakernel.device_trace import DeviceTrace
from megakernel.implementations import ALL_CASES
from megakernel.tuning import tuned_pipeline
from results.layer_rivals import captured
from results.provenance import commit_name, header
from tests.gpu.expected import Options
from tests.gpu.layer_on_gpu import OLMOE, RELATIVE_BOUND, SMALL, Case, Layer, cases


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
            layer.kernel.raise_on_error()
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


def check_fault(job: NvshmemJob, options: Options) -> list[str]:
    """A logit of rank 1 is not a number: it says so, and every other rank hears of it from its own kernel alone."""
    case = Case("fault", SMALL, options.on(Pipeline(64, 16, 4)), ((64,) * job.world.num_ranks,))
    layer = Layer(job, case)
    seen = ""
    try:
        if layer.kernel is not None:
            given = layer.inputs(0)
            if job.pe == 1:
                given["router_logits"][5, 3] = float("nan")
            layer.kernel(**given)
            torch.cuda.synchronize()
            layer.kernel.raise_on_error()
        elif layer.switch is not None:
            layer.switch.wait(limit_s=60.0)
    except IncError as error:
        seen = f"{type(error).__name__}: {error}"
    everyone = job.gather(seen)
    job.barrier()
    layer.heap.close()
    if "router_logits[5, 3] of rank 1" not in everyone[1]:
        return [f"rank 1 says {everyone[1]!r}"]
    return [f"PE {pe} says {text!r}" for pe, text in enumerate(everyone) if "rank 1" not in text]


def check_bits(job: NvshmemJob, repeats: int, options: Options) -> list[str]:
    """The same tokens give the same bits in rank order, whatever comes first; the grid varies."""
    pipeline = options.on(Pipeline(700, 128, 4, sum_order=SumOrder.RANK))
    case = Case("bits", OLMOE, pipeline, ((700,) * job.world.num_ranks,))
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
            layer.kernel.raise_on_error()
            first = out if first is None else first
            if not torch.equal(out, first):
                problems.append(f"call {repeat} gave other bits")
        job.barrier()
    layer.close()
    return problems


def check_graph(job: NvshmemJob, num_layers: int, replays: int, options: Options) -> list[str]:
    """Several calls captured as the first thing this layer does, replayed with fewer and more tokens, other inputs and masks."""
    n = 300
    pipeline = options.on(Pipeline(n, 64, 4))
    case = Case("graph", SMALL, pipeline, ((n,) * job.world.num_ranks,) * (replays + 1), masked=True)
    layer = Layer(job, case)
    problems: list[str] = []
    if layer.kernel is not None:
        given = layer.inputs(0)
        count, outputs = torch.tensor([n], dtype=torch.int32, device=layer.device), []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(num_layers):
                out = torch.empty_like(given["hidden_states"])
                outputs.append(layer.kernel(out=out, token_count=count, **given))
    for replay in range(replays):
        job.barrier()
        if layer.kernel is not None:
            tokens = (n * (replay + 1 + job.pe)) % (n + 1)
            fresh = layer.inputs(replay + 1)
            for name, tensor in given.items():
                tensor.copy_(fresh[name])
            count.fill_(tokens)
            for out in outputs:
                out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            layer.kernel.raise_on_error()
            wanted = layer.reference(fresh)[:tokens]
            for number, out in enumerate(outputs):
                error = float((out[:tokens].double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
                if (tokens and not error < RELATIVE_BOUND) or not bool(out[tokens:].isnan().all()):
                    problems.append(f"replay {replay}, layer {number}, {tokens} tokens: relative error {error:.2e}")
        job.barrier()
    layer.close()
    return problems


def timed_case(spec: str, num_ranks: int, model: CommunicationModel, group: int) -> Case:
    """The OLMoE layer for a specification N, N:m_b:D or N:m_b:D:edge."""
    if spec.isdecimal():
        implementation = next(case.implementation for case in ALL_CASES if case.model is model and case.needs_heap)
        pipeline = tuned_pipeline(OLMOE, int(spec), num_ranks, implementation, PlacementKind.SCALE_MODEL)
        return Case(f"{model.value}, tuned, N = {spec}", OLMOE, pipeline, ((int(spec),) * num_ranks,), model)
    num_tokens, microbatch_tokens, depth, *edge = map(int, spec.split(":"))
    pipeline = Pipeline(num_tokens, microbatch_tokens, depth, ranks_per_phase=group, edge_tokens=edge[0] if edge else None)
    return Case(f"{model.value} N:m_b:D:edge = {spec}", OLMOE, pipeline, ((num_tokens,) * num_ranks,), model)


def show_trace(job: NvshmemJob, case: Case, output: Path | None) -> None:
    """Print which stage of rank 0 ran when, and how busy its units were."""
    layer = Layer(job, case, trace_length=4096)
    for _ in range(3):
        job.barrier()
        if layer.kernel is not None:
            layer.kernel.trace.zero_()
            layer.kernel(**layer.inputs(0))
            torch.cuda.synchronize()
            layer.kernel.raise_on_error()
    job.barrier()
    if layer.kernel is not None and job.pe == 0:
        trace = DeviceTrace.of(layer.kernel)
        begin, end = trace.span_ns
        print(f"trace {case.name}: {(end - begin) / 1e3:.1f} us, busy {trace.busy_share()}, tiles {trace.tiles()}")
        for name, number, first, last, spent in trace.stages():
            print(f"  {name:16s} {number:3d}  {first:8.1f} to {last:8.1f}, {spent:7.1f} us per block")
        if output is not None:
            source = f"source: measured_gpu; {case.name}, rank 0, one launch, busy {trace.busy_share()}"
            trace.write(output, [*notes_of(job), source])
    layer.close()


def measure(job: NvshmemJob, case: Case, repeats: int = 12) -> None:
    """Median over replays of the longest launch of any rank."""
    layer = Layer(job, case)
    times: list[float] = []
    if layer.kernel is not None:
        given = layer.inputs(0)
        out = torch.empty_like(given["hidden_states"])
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize()
    job.barrier()
    if layer.kernel is not None:
        replay = captured(lambda: layer.kernel(out=out, **given))
        for event in events:
            replay()
            event.record()
        torch.cuda.synchronize()
        layer.kernel.raise_on_error()
        times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
    everyone = [t for t in job.gather(times) if t]
    layer.close()
    if job.pe == 0:
        longest = [max(call) for call in zip(*everyone, strict=True)]
        print(f"time {case.name}: {statistics.median(longest):.1f} us", flush=True)


def notes_of(job: NvshmemJob) -> list[str]:
    """Where the numbers of this job come from."""
    kind = job.placement.kind.value
    software = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"
    command = f"torchrun --nproc-per-node {job.world.num_pes} -m tests.gpu.megakernel_program {' '.join(sys.argv[1:])}"
    device = f"{len(job.placement.gpus)} x {job.gpu.name}"
    return header(device=device, placement=kind, commit=commit_name(), command=command, software=software)


def report(job: NvshmemJob, name: str, problems: list[str]) -> bool:
    everyone = job.gather(problems)
    if job.pe == 0:
        first = [f"{job.world.name_of(pe)}: {text}" for pe, texts in enumerate(everyone) for text in texts[:2]]
        print(f"{'FAILED' if first else 'passed'}  {name}" + "".join(f"\n        {text}" for text in first), flush=True)
    return not any(everyone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("properties", nargs="+", choices=["right", "bits", "graph", "fault", "time", "trace"])
    parser.add_argument("--placement", type=PlacementKind, default=None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--switches", type=int, default=1, help="of each role; 0: the ranks of a plain model reach each other")
    parser.add_argument("--model", type=CommunicationModel, default=CommunicationModel.INC_ALL_TO_ALL)
    parser.add_argument("--group", type=int, default=1, help="ranks per phase of a measurement")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--tokens", default="8192:1024:4", help="N (as tuned), N:m_b:D or N:m_b:D:edge, several by commas")
    parser.add_argument("--copies-rows", action="store_true", help="copy rows before MatMul 1 rather than gather them on load")
    parser.add_argument("--rank-port-gbps", type=float, default=0.0, help="pace every rank's port; 0: not at all")
    Options.add_to(parser)
    parser.add_argument("--output", type=Path, help="where the trace goes, for results/plot_stage_timeline.py")
    parser.add_argument("--slab-mib", type=int, default=1024)
    options = parser.parse_args()
    chosen = Options.of(options)
    world = World(options.ranks, options.switches, options.switches)
    with NvshmemJob.join(world, options.slab_mib << 20, options.placement) as job:
        good = True
        if "right" in options.properties:
            for case in cases(options.ranks, options.model):
                case = replace(case, pipeline=chosen.on(case.pipeline), copies_rows=options.copies_rows)
                good &= report(job, case.name, check_case(job, case))
        if "bits" in options.properties:
            good &= report(job, f"{options.repeats} calls give the same bits", check_bits(job, options.repeats, chosen))
        if "graph" in options.properties:
            good &= report(job, "16 captured calls, replayed with other tokens and masks", check_graph(job, 16, 6, chosen))
        if "fault" in options.properties:
            good &= report(job, "a logit that is not a number is reported by every PE", check_fault(job, chosen))
        for spec in options.tokens.split(","):
            case = timed_case(spec, options.ranks, options.model, options.group)
            case = replace(case, copies_rows=options.copies_rows, rank_port_gbps=options.rank_port_gbps)
            case = replace(case, pipeline=chosen.on(case.pipeline))
            if "trace" in options.properties:
                show_trace(job, case, options.output)
            if "time" in options.properties:
                measure(job, case)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
