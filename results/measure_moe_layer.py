"""Measure the MoE layer on GPUs, one rank per GPU: the Baseline, its stages, and the rivals, each checked before it is timed.

    torchrun --nproc-per-node 2 -m results.measure_moe_layer [--tokens 1024 8192] [--shape olmoe qwen3 mixtral]
        [--routing uniform zipf hot-rank] [--stages 4096 8192] [--deepgemm 8192] [--plug megakernel=module:factory]
    python -m results.measure_moe_layer --redraw results/data/moe_layer_native_COMMIT.csv

Times are medians over interleaved runs of the maximum over the ranks; the ranks start together, behind a sleep that hides the
host. `baseline` is captured in a CUDA graph; `baseline_counted` trades counts first, so that its host waits for the GPU. Writes
results/data, results/tables and results/figures. `layer_rivals.py` says what each implementation is.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import itertools
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megakernel.gpu_checks import check_gpu
from megakernel.launch_baseline import GpuKernels
from megakernel.library_exchange import Counting
from megakernel.workload import Routing
from results import layer_rivals as rivals
from results.layer_cases import SHAPES, Case, Experts, Inputs
from results.layer_floors import COLLECTIVES, Ceilings, measure_ceilings, stage_floors
from results.layer_tables import COLUMNS, redraw
from results.layer_timing import Ranks, StageClock, time_interleaved
from results.provenance import commit_name

FOLDER = Path(__file__).resolve().parent
SIZES = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
DEEPGEMM = "deepgemm_fp8_mega_moe"


@dataclass
class Bench:
    """One job: its options, its kernels, and the rows of its data file."""

    options: argparse.Namespace
    ranks: Ranks
    kernels: GpuKernels
    plugs: dict[str, rivals.Plug]
    rows: list[dict[str, object]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    ceilings: Ceilings | None = None

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)

    def add(self, case: Case, implementation: str, metric: str, value: float, unit: str, **more: object) -> None:
        shape = case.shape
        self.rows.append(
            {
                "measurement": "moe_layer", "source": "measured_gpu", "placement": "native", "implementation": implementation,
                "num_ranks": self.ranks.size, "num_tokens": case.num_tokens, "microbatch_tokens": case.num_tokens,
                "metric": metric, "value": f"{value:.6g}", "unit": unit, "shape": case.shape_name,
                "routing": case.routing.value, "num_experts": shape.num_experts, "top_k": shape.top_k,
                "hidden": shape.hidden_size, "intermediate": shape.intermediate_size, **more,
            }
        )


def measure_case(bench: Bench, case: Case, experts: Experts) -> None:
    """Check and time every implementation on one case, then the stages of the Baseline."""
    ranks, inputs = bench.ranks, Inputs(case, experts, bench.ranks)
    layer = rivals.make_baseline(case, ranks, experts, bench.kernels, Counting.BOUNDED)
    counted = rivals.make_baseline(case, ranks, experts, bench.kernels, Counting.COUNTED)
    eager = lambda: layer(inputs.hidden, inputs.logits, out=inputs.out)  # noqa: E731
    functions: dict[str, rivals.Run] = {"baseline_eager": eager}
    functions["baseline_counted"] = lambda: counted(inputs.hidden, inputs.logits, out=inputs.out)
    bounds: dict[str, float | None] = {}
    for name, run in list(functions.items()):
        bench.add(case, name, "relative_error", inputs.check(name, run), "1")
    if not bench.options.no_graph:
        functions["baseline"] = rivals.captured(eager)
    for name, plug in bench.plugs.items():
        functions[name] = plug.layer(inputs, experts)
        bounds[name] = rivals.fused_bound(inputs)
    if case.num_tokens in bench.options.deepgemm and case.shape_name == "olmoe" and case.routing is Routing.UNIFORM:
        functions[DEEPGEMM] = rivals.deepgemm_fp8(case, inputs, experts, layer.expert_ids.clone(), layer.weights.clone())
        bounds[DEEPGEMM] = rivals.FP8_BOUND
    for name in [name for name in functions if name not in ("baseline_eager", "baseline_counted")]:
        bench.add(case, name, "relative_error", inputs.check(name, functions[name], bounds.get(name)), "1")
    layer.raise_on_error()
    functions["grouped_mm"] = rivals.grouped_mm_pair(layer)
    times = time_interleaved(ranks, functions, bench.options.repeats)
    for name, value in times.items():
        bench.add(case, name, "layer_time", value, "us")
    bench.say(f"{case.shape_name} {case.routing.value} {case.num_tokens}: " + ", ".join(
        f"{name} {value:.0f} us ({value / times['grouped_mm']:.2f})" for name, value in times.items()))
    if case.num_tokens in bench.options.stages and case.routing is Routing.UNIFORM:
        measure_stages(bench, case, layer, inputs)
    for plug in bench.plugs.values():
        plug.close()


def measure_stages(bench: Bench, case: Case, layer: rivals.GpuBaseline, inputs: Inputs) -> None:
    """Time and floor of each stage of the Baseline."""
    if bench.ceilings is None:
        c = bench.ceilings = measure_ceilings(bench.ranks, layer)
        measured = [
            ("copy_peak", c.bytes_per_us / 1e3, "GB/s"), ("product_peak", c.operations_per_us / 1e6, "TFLOP/s"),
            ("link_peak", c.link_bytes_per_us / 1e3, "GB/s"), ("launch", c.launch_us, "us"),
            *((f"{name}_latency", us, "us") for name, us in c.collective_us.items()),
        ]
        bench.say("ceilings: " + ", ".join(f"{metric} {value:.4g} {unit}" for metric, value, unit in measured))
        for metric, value, unit in measured:
            bench.add(case, "baseline", metric, value, unit)
    clock = StageClock(bench.ranks)
    clock.run(lambda: layer(inputs.hidden, inputs.logits, out=inputs.out, mark=clock.mark), bench.options.repeats)
    seen, floors = clock.medians(COLLECTIVES), stage_floors(bench.ranks, layer, case.num_tokens, bench.ceilings)
    for stage, value in seen.items():
        bench.add(case, "baseline", "stage_time", value, "us", stage=stage)
        bench.add(case, "baseline", "stage_floor", floors[stage], "us", stage=stage)
    lines = (f"{stage} {us:.1f}/{floors[stage]:.1f} = {us / floors[stage]:.2f}" for stage, us in seen.items())
    bench.say("stages: " + ", ".join(lines))


def write_csv(bench: Bench, path: Path) -> None:
    """All rows so far, with where they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    software = {"torch": torch.__version__, "CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    software["Python"] = sys.version.split()[0]
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# date: {datetime.datetime.now().isoformat(timespec='seconds')}\n")
        file.write(f"# device: {bench.ranks.size} x {torch.cuda.get_device_name(0)}; placement: native, one rank per GPU\n")
        file.write(f"# commit: {bench.options.commit}\n")
        file.write(f"# software: {', '.join(f'{name} {version}' for name, version in software.items())}\n")
        file.write(f"# command: torchrun -m results.measure_moe_layer {' '.join(sys.argv[1:])}\n")
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(bench.rows)


def join(num_ranks: int) -> Ranks | None:
    """The ranks of this job; None on a process that is none of them. Collective over all processes."""
    own, total = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_rank = own < num_ranks
    if is_rank:
        torch.cuda.set_device(own % torch.cuda.device_count())
        check_gpu(torch.device("cuda", torch.cuda.current_device()))
    if num_ranks == total and not dist.is_initialized():
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        return Ranks(None, own, num_ranks)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.new_group(list(range(num_ranks)), backend="nccl")
    return Ranks(group, own, num_ranks) if is_rank else None


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The product of shapes, routings and sizes, then the further ones."""
    cases = [
        Case(shape, tokens, Routing(routing))
        for shape in options.shape for routing in options.routing for tokens in options.tokens
    ]
    for name in options.also:
        shape, routing, tokens = name.split(":")
        cases.append(Case(shape, int(tokens), Routing(routing)))
    return cases


def run(options: argparse.Namespace) -> None:
    """Every case of the options. Collective."""
    cases, num_ranks = cases_of(options), options.ranks or int(os.environ["WORLD_SIZE"])
    plugs = dict(rivals.plugged(spec, cases, num_ranks) for spec in options.plug)
    ranks = join(num_ranks)
    if ranks is not None:
        measure(Bench(options, ranks, GpuKernels(), plugs), cases)
    else:
        for case, plug in itertools.product(cases, plugs.values()):
            plug.serve(case)
            plug.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(bench: Bench, cases: list[Case]) -> None:
    """Measure all cases, and write what is known after each."""
    options, experts = bench.options, None
    path = options.output or FOLDER / "data" / f"moe_layer_native_{options.commit}.csv"
    for number, case in enumerate(cases, 1):
        if experts is None or experts.shape != case.shape:
            experts = None
            torch.cuda.empty_cache()
            experts = Experts(case.shape)
        bench.say(f"[{number}/{len(cases)}] {case.shape_name}, {case.routing.value}, {case.num_tokens} tokens per rank")
        measure_case(bench, case, experts)
        gc.collect()
        torch.cuda.empty_cache()
        if bench.ranks.rank == 0:
            write_csv(bench, path)
    if bench.ranks.rank == 0:
        redraw(path, FOLDER if options.output is None else path.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=SIZES)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["olmoe"])
    parser.add_argument("--routing", nargs="+", choices=[routing.value for routing in Routing], default=["uniform"])
    parser.add_argument("--stages", type=int, nargs="*", default=[4096, 8192, 16384, 65536], help="also stage by stage")
    parser.add_argument("--plug", nargs="*", default=[], help="name=module:factory, see layer_rivals.Plug")
    parser.add_argument("--ranks", type=int, help="compute ranks; further processes of the job serve the plugs")
    parser.add_argument("--also", nargs="*", default=[], help="further cases, shape:routing:tokens")
    parser.add_argument("--deepgemm", type=int, nargs="*", default=[], help="sizes at which DeepGEMM's FP8 layer runs, too")
    parser.add_argument("--no-graph", action="store_true", help="do not capture the Baseline")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", default=commit_name())
    parser.add_argument("--output", type=Path, help="data file; its tables and figures go beside it")
    parser.add_argument("--redraw", type=Path, help="only draw the tables and the figure of this data file")
    options = parser.parse_args()
    if options.redraw:
        redraw(options.redraw, FOLDER)
    else:
        run(options)


if __name__ == "__main__":
    main()
