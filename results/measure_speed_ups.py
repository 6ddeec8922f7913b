"""Measure the five implementations of the layer on GPUs, in one job and placement, and write the table of speed-ups.

    python -m inc_runtime.mps -- torchrun --nproc-per-node 6 -m results.measure_speed_ups --placement scale_model \\
        [--tokens 1024 8192] [--microbatches 512 1024] [--groups 1 2] [--rank-port-gbps 23] [--seconds 240] [--local-bypass]

Each implementation runs at every microbatch size, edge (and number of ranks per phase) of the options; the tables take its best.
Every point is checked against float64, replayed as a CUDA graph (two calls to warm up, then five) and checked again; a time is
the median over the calls of the longest of any rank. The data file is written after each point, and a second run of the same
command goes on where it was interrupted or ran out of --seconds. All bytes cross the switch PEs, those of a rank's own experts
included; the Baseline's go through the relays too. With --local-bypass rows of a rank's own experts stay on it, in all five: a
series of its own. `python -m results.measure_speed_ups --redraw FILE` draws the table and the figure again.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from inc_runtime.backends.nvshmem import DeviceHeap, NvshmemJob
from inc_runtime.config import OLMOE_1B_7B, CommunicationModel, Implementation, Pipeline, SumOrder
from inc_runtime.device.exchange import stop_switches
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.placement import PlacementKind
from inc_runtime.protocol import Role, World
from megakernel.gpu_baseline import GpuBaseline, block_sizes
from megakernel.launch_baseline import GpuKernels
from megakernel.launch_megakernel import MegaKernel
from megakernel.reference import bf16_bound, route_reference
from megakernel.relayed_exchange import RelayedExchange, whole_batch
from results.layer_cases import BASELINE_SUM_ROUNDINGS, Experts
from results.layer_rivals import captured, grouped_mm_pair
from results.layer_timing import Ranks
from results.provenance import commit_name
from results.speed_up_tables import COLUMNS, GROUPED_MM, redraw
from switch_emulator.launch_switch import RunningSwitch

FOLDER = Path(__file__).resolve().parent
SHAPE = OLMOE_1B_7B
SIZES = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
MODELS = {
    Implementation.BASELINE: CommunicationModel.ALL_TO_ALL,
    Implementation.MEGAKERNEL: CommunicationModel.ALL_TO_ALL,
    Implementation.MEGAKERNEL_PHASED: CommunicationModel.ALL_TO_ALL_PHASED,
    Implementation.MEGAKERNEL_INC: CommunicationModel.INC_ALL_TO_ALL,
    Implementation.MEGAKERNEL_INC_PHASED: CommunicationModel.INC_ALL_TO_ALL_PHASED,
}
WARM_UPS, CALLS = 2, 5
CHECKED_ROWS = 256
LIMIT_S = 120.0


@dataclass(frozen=True)
class Point:
    """One implementation at one size: how it is cut."""

    implementation: Implementation
    num_tokens: int
    pipeline: Pipeline

    @property
    def model(self) -> CommunicationModel:
        return MODELS[self.implementation]

    def layout(self, world: World) -> HeapLayout:
        return HeapLayout(Dims.of(self.model, world, SHAPE, self.pipeline))

    @property
    def key(self) -> tuple[str, ...]:
        """What names the point in a data file."""
        group = self.pipeline.ranks_per_phase if self.model.phased else ""
        edge, bypass = self.pipeline.edge_tokens or "", "1" if self.pipeline.local_bypass else ""
        cut = self.pipeline.microbatch_tokens, group, edge
        return (self.implementation.value, str(self.num_tokens), *map(str, cut), bypass)


def points(options: argparse.Namespace) -> list[Point]:
    """Every point, small sizes first, so that an interrupted run has whole rows of the table."""
    found = []
    for num_tokens, implementation in itertools.product(options.tokens, MODELS):
        if implementation is Implementation.BASELINE:
            found.append(Point(implementation, num_tokens, whole_batch(num_tokens, local_bypass=options.local_bypass)))
            continue
        groups = options.groups if MODELS[implementation].phased else [1]
        for size, group, edge in itertools.product(options.microbatches, groups, options.edges):
            if size <= num_tokens <= 64 * size and edge < size and 2 * edge < num_tokens:
                cut = Pipeline(num_tokens, size, options.depth, ranks_per_phase=group, edge_tokens=edge or None)
                pipeline = replace(cut, local_bypass=options.local_bypass)
                found.append(Point(implementation, num_tokens, pipeline))
    return found


class Bench:
    """One process of the job: its experts if it is a rank, and the rows so far on PE 0."""

    def __init__(self, job: NvshmemJob, options: argparse.Namespace, path: Path) -> None:
        self.job, self.options, self.path, self.started = job, options, path, time.monotonic()
        self.is_rank = job.world.role_of(job.pe) is Role.COMPUTE_RANK
        self.rows: list[dict[str, object]] = read_rows(path) if path.exists() else []
        self._refuse_other_rows()
        if self.is_rank:
            torch.cuda.set_device(job.seat.gpu)
            self.experts = Experts(SHAPE)
            self.own = self.experts.own(Ranks(None, job.pe, job.world.num_ranks))

    def _refuse_other_rows(self) -> None:
        """Raise ConfigurationError where the data file is of other options: its points are not those of this run."""
        options, placement = self.options, self.job.placement.kind.value
        wanted = {"placement": placement, "num_ranks": options.ranks, "rank_port_gbps": options.rank_port_gbps or ""}
        for row in self.rows:
            own = wanted | ({"depth": options.depth} if str(row["implementation"]).startswith("megakernel") else {})
            for name, value in own.items():
                if str(row[name]) != str(value):
                    seen = f"{self.path} has a row of {name} = {row[name]}, this run has {value}."
                    raise ConfigurationError(f"{seen} Give another --output, or remove the file.")

    def done(self) -> set[tuple[str, ...]]:
        """Points that the data file holds; the same on every PE."""
        names = ("implementation", "num_tokens", "microbatch_tokens", "ranks_per_phase", "edge_tokens", "local_bypass")
        own = {tuple(str(row.get(name) or "") for name in names) for row in self.rows if row["metric"] == "layer_time"}
        return self.job.gather(own)[0]

    def out_of_time(self) -> bool:
        return self.job.gather(time.monotonic() - self.started > self.options.seconds)[0]

    def add(self, point: Point, metric: str, value: float, unit: str, implementation: str | None = None) -> None:
        self.rows.append({
            "measurement": "moe_layer", "source": "measured_gpu", "placement": self.job.placement.kind.value,
            "implementation": implementation or point.implementation.value, "num_ranks": self.job.world.num_ranks,
            "num_tokens": point.num_tokens, "microbatch_tokens": point.pipeline.microbatch_tokens, "metric": metric,
            "value": f"{value:.6g}", "unit": unit, "shape": "olmoe", "routing": "uniform", "num_experts": SHAPE.num_experts,
            "top_k": SHAPE.top_k, "hidden": SHAPE.hidden_size, "intermediate": SHAPE.intermediate_size,
            "depth": point.pipeline.depth, "ranks_per_phase": point.key[3], "rank_port_gbps": self.options.rank_port_gbps or "",
            "edge_tokens": point.key[4], "local_bypass": "" if implementation == GROUPED_MM else point.key[5],
        })  # fmt: skip


def inputs(bench: Bench, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of scale 1, logits, and an output full of NaN."""
    draw = torch.Generator(device="cuda").manual_seed(1000 * num_tokens + bench.job.pe)
    hidden = torch.randn(num_tokens, SHAPE.hidden_size, generator=draw, device="cuda").bfloat16()
    logits = torch.randn(num_tokens, SHAPE.num_experts, generator=draw, device="cuda")
    return hidden, logits, torch.full_like(hidden, torch.nan)


class Check:
    """Rows of the output drawn at random, the last one among them, and what float64 says of them."""

    def __init__(self, bench: Bench, hidden: torch.Tensor, logits: torch.Tensor, out: torch.Tensor) -> None:
        drawn = torch.randperm(len(hidden), generator=torch.Generator().manual_seed(bench.job.pe))[:CHECKED_ROWS]
        self.out, self.some = out, torch.cat([drawn, torch.tensor([len(hidden) - 1])]).cuda()
        self.expected = bench.experts.float64_layer(hidden[self.some], *route_reference(logits[self.some], SHAPE))

    def error(self) -> float:
        """Relative error of the output as it is, which is forgotten then; inf where a row was not written."""
        torch.cuda.synchronize()
        error = float((self.out[self.some].double() - self.expected).norm() / self.expected.norm())
        written = bool(torch.isfinite(self.out).all())
        self.out.fill_(torch.nan)
        return error if written else float("inf")


def times_of(run: Callable[[], object]) -> list[float]:
    """Microseconds of calls in a row; every call is collective, so the ranks keep together."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UPS + CALLS + 1)]
    for event in events:
        event.record()
        run()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)][WARM_UPS:]


def make_layer(bench: Bench, point: Point, heap: DeviceHeap) -> GpuBaseline | MegaKernel:
    if point.implementation is not Implementation.BASELINE:
        return MegaKernel(heap, SHAPE, point.pipeline, bench.own.gate_up, bench.own.down)
    kernels = GpuKernels(num_sms=bench.job.seat.num_blocks)
    return GpuBaseline(SHAPE, RelayedExchange(heap, SHAPE), block_sizes(SHAPE, point.num_tokens), kernels, bench.own)


def fits(bench: Bench, layer: object) -> bool:
    """Whether every rank has made its layer. Collective, and behind it every switch has built and started its kernel."""
    return all(bench.job.gather(not bench.is_rank or layer is not None))


def measure(bench: Bench, point: Point) -> bool:
    """Check and time one point on all PEs; False where a rank's memory does not hold it. Raises AssertionError: wrong results."""
    job, heap = bench.job, DeviceHeap(bench.job, point.layout(bench.job.world), poison=True)
    heap.pace_ports(bench.options.rank_port_gbps)
    error, times, pair_times = 0.0, [], []
    layer = check = hidden = logits = out = switch = None
    if bench.is_rank:
        with contextlib.suppress(torch.OutOfMemoryError):
            hidden, logits, out = inputs(bench, point.num_tokens)
            check = Check(bench, hidden, logits, out)
            layer = make_layer(bench, point, heap)
    else:
        switch = RunningSwitch(heap, SumOrder.ARRIVAL)
    if runs := fits(bench, layer):
        if layer is not None:
            layer(hidden, logits, out=out)
            error = check.error()
            job.barrier()
            times = times_of(captured(lambda: layer(hidden, logits, out=out)))
            error = max(error, check.error())
            layer.raise_on_error()
            job.barrier()
            if isinstance(layer, GpuBaseline):
                pair_times = times_of(grouped_mm_pair(layer))
            heap.check()
        else:
            job.barrier()
            job.barrier()
    if switch is None:
        stop_switches(heap)
    else:
        switch.wait(limit_s=LIMIT_S)
    if runs:
        note(bench, point, max(job.gather(error)), times, pair_times)
    job.barrier()
    heap.close()
    heap.layer_memory.clear()
    layer = check = hidden = logits = out = None
    torch.cuda.empty_cache()
    return runs


def note(bench: Bench, point: Point, error: float, times: list[float], pair_times: list[float]) -> None:
    """Add the rows of one point: the median over the calls of the longest of any rank. Collective."""
    if not error <= bf16_bound(point.num_tokens, SHAPE, sum_roundings=BASELINE_SUM_ROUNDINGS):
        raise AssertionError(f"{point.key}: relative error {error:.2e}")
    for name, own in ((None, times), (GROUPED_MM, pair_times)):
        everyone = [seen for seen in bench.job.gather(own) if seen]
        if everyone:
            bench.add(point, "layer_time", statistics.median(map(max, zip(*everyone, strict=True))), "us", name)
    bench.add(point, "relative_error", error, "1")


def read_rows(path: Path) -> list[dict[str, object]]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [dict(row) for row in csv.DictReader(lines)]


def write_rows(bench: Bench, commit: str) -> None:
    placement = bench.job.placement
    bench.path.parent.mkdir(parents=True, exist_ok=True)
    with bench.path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# date: {datetime.datetime.now().isoformat(timespec='seconds')}\n")
        seats = "; ".join(line.strip() for line in placement.describe().splitlines())
        file.write(f"# device: {len(placement.gpus)} x {bench.job.gpu.name}; {seats}\n")
        file.write(f"# commit: {commit}\n# software: torch {torch.__version__}, CUDA {torch.version.cuda}\n")
        file.write(f"# command: torchrun -m results.measure_speed_ups {' '.join(sys.argv[1:])}\n")
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(bench.rows)


def run(options: argparse.Namespace) -> None:
    """Every point that the data file does not hold yet. Collective."""
    wanted, world = points(options), World(options.ranks)
    ports = f"_ports_{options.rank_port_gbps:g}" if options.rank_port_gbps else ""
    kind = options.placement.value if options.placement else "any"
    bypass = "_bypass" * options.local_bypass
    path = options.output or FOLDER / "data" / f"speed_ups_{kind}_{options.commit}{ports}{bypass}.csv"
    slab = max(point.layout(world).heap_bytes for point in wanted)
    with NvshmemJob.join(world, slab, options.placement) as job:
        bench = Bench(job, options, path)
        done = bench.done()
        for number, point in enumerate(wanted, 1):
            if point.key in done:
                continue
            if bench.out_of_time():
                break
            if not measure(bench, point):
                if job.pe == 0:
                    print(f"[{number}/{len(wanted)}] {' '.join(point.key)}: not run, too large for the GPU's memory", flush=True)
                continue
            if job.pe == 0:
                own = (r for r in reversed(bench.rows) if (r["metric"], r["implementation"]) == ("layer_time", point.key[0]))
                took = float(str(next(own)["value"]))
                since = time.monotonic() - bench.started
                print(f"[{number}/{len(wanted)}] {since:6.1f} s  {' '.join(point.key)}: {took:.0f} us", flush=True)
                write_rows(bench, options.commit)
        if job.pe == 0 and bench.rows:
            redraw(path, FOLDER if options.output is None else path.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placement", type=PlacementKind, default=None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=SIZES, help="tokens per rank")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[256, 512, 1024, 2048], help="sizes to try")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2], help="ranks per phase to try")
    parser.add_argument("--edges", type=int, nargs="+", default=[0], help="tokens of the first and last microbatch; 0: m_b")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rank-port-gbps", type=float, default=0.0, help="pace every rank's port; 0: not at all")
    parser.add_argument("--local-bypass", action="store_true", help="rows of a rank's own experts stay on it")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further point after so long")
    parser.add_argument("--commit", default=commit_name())
    parser.add_argument("--output", type=Path, help="data file; its tables and figures go beside it")
    parser.add_argument("--redraw", type=Path, help="only draw the table and the figure of this data file")
    options = parser.parse_args()
    if options.redraw:
        redraw(options.redraw, FOLDER)
    else:
        run(options)


if __name__ == "__main__":
    main()
