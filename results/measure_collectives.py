"""Measures dispatch and combine on GPUs, by communication model: throughput in steady state, latency at one token per rank.

    python -m inc_runtime.mps -- torchrun --nproc-per-node 6 results/measure_collectives.py --placement scale_model

`egress`: bytes of token rows that leave the dispatch switch per second; `ingress`: bytes of partial sums that reach the combine
switch; each with the role alone and with both at once. A relay forwards what reaches it, so for the plain models both are what it
relays, rows of a rank's own experts included. `port_egress`, `port_ingress`: bytes per second through the port of one rank, rows
and records, on average over the ranks; `--rank-port-gbps` bounds both (0: no bound; by default the copy peak over W in
scale_model). `switch_rows_held`: rows that the layout keeps on a switch, in microbatches of a rank. `copy_peak`: a plain copy
over the same link in the same run. `latency_*`: from push to rows, and from publish to sums, the maximum over the ranks of each
microbatch, each rank by its own clock. `--row-group-tokens` lets the dispatch switch cut through (0: store and forward),
`--local-bypass` keeps rows of a rank's own experts on it; both have columns. Every configuration first runs with hashed tokens,
whose rows and sums are compared on the device. Rates count token rows alone.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inc_runtime.backends.nvshmem import DeviceHeap, NvshmemJob
from inc_runtime.collectives.microbatch import RoutedTokens
from inc_runtime.compile_cache import build
from inc_runtime.config import OLMOE_1B_7B, CommunicationModel, Pipeline, SumOrder, check
from inc_runtime.device.arguments import SWITCH_MOMENT, ExchangeMode
from inc_runtime.device.exchange import Exchange, Exchanged, stop_switches
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.placement import SWITCH_BLOCKS, PlacementKind
from inc_runtime.protocol import Role, World, signal_word
from megakernel.workload import Routing, routing_bias
from switch_emulator.launch_switch import RunningSwitch

FOLDER = Path(__file__).resolve().parent
COPY_SOURCE = FOLDER.parent / "inc_runtime" / "device" / "copy_peak.cu"
COPY_BYTES, COPY_REPEATS, ALL_SMS = 128 << 20, 10, 132
SHAPE, DEPTH = OLMOE_1B_7B, 3
FREE_RUNNING_DEPTH = 6
"""Without sums a dispatch that is relayed or cut through leaves half of the ring free: as many microbatches are then in flight as
elsewhere."""
IMPLEMENTATIONS = {
    CommunicationModel.INC_ALL_TO_ALL: "megakernel_inc",
    CommunicationModel.ALL_TO_ALL: "megakernel",
    CommunicationModel.INC_ALL_TO_ALL_PHASED: "megakernel_inc_phased",
    CommunicationModel.ALL_TO_ALL_PHASED: "megakernel_phased",
}
LIMIT_S = 60.0
WARM_MICROBATCHES = 100
COLUMNS = [
    *(
        "measurement",
        "source",
        "placement",
        "implementation",
        "num_ranks",
        "num_tokens",
        "microbatch_tokens",
        "metric",
        "value",
        "unit",
    ),
    *("role", "direction", "switch_blocks", "sum_order", "ranks_per_phase", "rank_port_gbps", "routing", "barrier"),
    *("row_group_tokens", "local_bypass"),
]
SERVED = {
    ExchangeMode.DISPATCH: (Role.DISPATCH_SWITCH,),
    ExchangeMode.COMBINE: (Role.COMBINE_SWITCH,),
    ExchangeMode.BOTH: tuple(Role),
}


@dataclass
class Bench:
    """One job and the rows of its table."""

    job: NvshmemJob
    switch_blocks: int
    rows: list[dict[str, object]]
    model: CommunicationModel = CommunicationModel.INC_ALL_TO_ALL
    ranks_per_phase: int = 1
    rank_port_gbps: float = 0.0
    routing: Routing = Routing.UNIFORM
    barrier: bool = True
    row_group_tokens: int = 0
    local_bypass: bool = False

    @property
    def depth_alone(self) -> int:
        """Depth of the ring where the dispatch runs without sums."""
        return DEPTH if self.model.in_network and not self.row_group_tokens else FREE_RUNNING_DEPTH

    def add(self, metric: str, value: float, unit: str, **more: object) -> None:
        row = {"metric": metric, "value": f"{value:.6g}", "unit": unit, "switch_blocks": self.switch_blocks}
        row["ranks_per_phase"] = self.ranks_per_phase if self.model.phased else ""
        row["routing"], row["barrier"] = self.routing.value, int(self.barrier) if self.model.phased else ""
        row["row_group_tokens"], row["local_bypass"] = self.row_group_tokens or "", int(self.local_bypass) or ""
        row["rank_port_gbps"] = f"{self.rank_port_gbps:.4g}" if self.rank_port_gbps else ""
        self.rows.append({"implementation": IMPLEMENTATIONS[self.model], **row, **more})

    def pipeline(self, num_microbatches: int, microbatch_tokens: int, depth: int, order=SumOrder.ARRIVAL) -> Pipeline:
        bound = num_microbatches * microbatch_tokens
        groups = min(self.row_group_tokens, microbatch_tokens) or None
        pipeline = Pipeline(bound, microbatch_tokens, depth, self.ranks_per_phase, self.barrier, order)
        return replace(pipeline, local_bypass=self.local_bypass, row_group_tokens=groups)

    def heap(self, pipeline: Pipeline) -> DeviceHeap:
        check(SHAPE, pipeline, self.job.world.num_ranks)
        heap = DeviceHeap(self.job, HeapLayout(Dims.of(self.model, self.job.world, SHAPE, pipeline)))
        heap.pace_ports(self.rank_port_gbps)
        return heap


def measure_copy_peak(bench: Bench) -> float:
    """A plain copy between the dispatch switch's GPU and rank 0's, pushed and pulled, by a switch's blocks and by all SMs.

    Returns GB/s of the push by all SMs.
    """
    job, measured = bench.job, {}
    if job.pe == job.world.dispatch_switch(0):
        function = job.gpu.function(build(COPY_SOURCE, arch=job.gpu.arch).path, "copy_kernel")
        for direction, target, source in (("push", job.bases[0], job.slab), ("pull", job.slab, job.bases[0])):
            for blocks in (bench.switch_blocks, ALL_SMS):
                held = [np.uint64(target), np.uint64(source), np.uint64(COPY_BYTES), np.int32(COPY_REPEATS)]

                def launch(held=held, blocks=blocks) -> None:
                    job.gpu.launch(function, held, num_blocks=blocks, num_threads=1024)

                launch()
                best = min(job.gpu.elapsed_us(launch) for _ in range(3))
                measured[direction, blocks] = COPY_BYTES * COPY_REPEATS / best / 1e3
    measured = job.gather(measured)[job.world.dispatch_switch(0)]
    for (direction, blocks), rate in measured.items():
        names = ("implementation", "rank_port_gbps", "routing", "barrier", "ranks_per_phase", "local_bypass")
        nothing = dict.fromkeys(names, "")
        bench.add("copy_peak", rate, "GB/s", direction=direction, **{**nothing, "switch_blocks": blocks})
    return measured["push", ALL_SMS]


@lru_cache(maxsize=2)
def routed(pe: int, num_tokens: int, routing: Routing, num_ranks: int) -> RoutedTokens:
    """Random tokens of one rank with distinct experts: the largest logits, which lean as the routing says."""
    rng = np.random.default_rng(pe)
    tokens = rng.integers(0, 1 << 16, (num_tokens, SHAPE.hidden_size), np.uint16)
    logits = rng.standard_normal((num_tokens, SHAPE.num_experts)) + routing_bias(routing, SHAPE, num_ranks).numpy()
    ids = np.argsort(-logits, axis=1)[:, : SHAPE.top_k]
    return RoutedTokens(tokens, ids.astype(np.int32), np.ones(ids.shape, np.float32))


def run(
    bench: Bench,
    heap: DeviceHeap,
    pipeline: Pipeline,
    mode: ExchangeMode,
    *,
    verify=False,
    timed=False,
    replay_plan=False,
    blocks: int | None = None,
) -> tuple[Exchanged | None, np.ndarray]:
    """One call on every rank, with the switches that the mode needs. Returns what the rank and the switch saw. Collective."""
    switch, done, moments = None, None, np.zeros(0, SWITCH_MOMENT)
    if heap.role is Role.COMPUTE_RANK:
        given = routed(bench.job.pe, pipeline.bound_tokens, bench.routing, bench.job.world.num_ranks)
        call = Exchange(heap, SHAPE, pipeline, given, mode=mode, verify=verify, timed=timed)
    elif heap.role in SERVED[mode]:
        length = pipeline.num_microbatches
        switch = RunningSwitch(
            heap, pipeline.sum_order, num_blocks=blocks or bench.switch_blocks, timeline_length=length, replay_plan=replay_plan
        )
    bench.job.barrier()
    if heap.role is Role.COMPUTE_RANK:
        done = call.start().finish(limit_s=LIMIT_S)
        if done.wrong_rows or done.wrong_sums:
            raise SystemExit(f"rank {bench.job.pe}: {done.wrong_rows} wrong words in rows, {done.wrong_sums} in sums")
        stop_switches(heap)
    elif switch is not None:
        moments = switch.wait(limit_s=LIMIT_S)
    bench.job.barrier()
    return done, moments


def replay_plans(heap: DeviceHeap, last_magic: int) -> None:
    """Let the plans that stand in a combine switch serve until `last_magic`, and forget the stop words of the run before.

    With a relay the ranks themselves hold what they return, and of whom; with phases they send the plan again.
    """
    if heap.role is Role.COMBINE_SWITCH and heap.layout.dims.model is CommunicationModel.INC_ALL_TO_ALL:
        heap.write_region("plan_arrived", np.full(DEPTH, signal_word(last_magic, True), np.uint64))
        heap.write_region("stop", np.zeros(heap.job.world.num_ranks, np.uint64))
    heap.job.barrier()


ROW_BYTES, RECORD_BYTES = 2 * SHAPE.hidden_size, 8 + 8 * SHAPE.top_k


def nanoseconds_of(moments: np.ndarray) -> float:
    """Of one microbatch, between the end of the third and the end of the last."""
    steady = moments[2:]
    return (float(steady["done"][-1]) - float(steady["done"][0])) / (len(steady) - 1)


def rate(moments: np.ndarray, rows_per_microbatch: float) -> float:
    """GB/s of token rows in steady state."""
    return rows_per_microbatch * ROW_BYTES / nanoseconds_of(moments)


def add_port_rates(
    bench: Bench, dispatch: np.ndarray, combine: np.ndarray, rows: tuple[float, float], tokens: int, **more: object
) -> None:
    """What crosses the port of one rank. `rows`: dispatched rows and partial sums of all ranks in a microbatch of `tokens` each.

    Moments of a role that did not run are empty.
    """
    egress = ingress = 0.0
    rows_out, rows_in = (count / bench.job.world.num_ranks for count in rows)
    inc = bench.model.in_network
    if len(dispatch):
        ingress += rows_out * (ROW_BYTES + RECORD_BYTES) / nanoseconds_of(dispatch)
        egress += (tokens if inc else rows_out) * (ROW_BYTES + RECORD_BYTES) / nanoseconds_of(dispatch)
    if len(combine):
        plan = tokens * RECORD_BYTES if inc and bench.model.phased else 0
        egress += (rows_in * ROW_BYTES + plan) / nanoseconds_of(combine)
        ingress += (tokens if inc else rows_in) * ROW_BYTES / nanoseconds_of(combine)
    bench.add("port_egress", egress, "GB/s", **more)
    bench.add("port_ingress", ingress, "GB/s", **more)


def measure_throughput(bench: Bench, microbatch_tokens: int, num_microbatches: int, order: SumOrder) -> None:
    job = bench.job
    checked = bench.pipeline(2 * DEPTH + 1, microbatch_tokens, DEPTH, order)
    timed = bench.pipeline(num_microbatches, microbatch_tokens, DEPTH, order)
    heap = bench.heap(timed)
    layout = heap.layout
    run(bench, heap, checked, ExchangeMode.BOTH, verify=True)
    inward = "rows_pulled" if bench.model.in_network else "rows_sent"
    counted = job.gather((int(heap.counters()["rows_sent"]), int(heap.counters()[inward])))
    replay_plans(heap, checked.num_microbatches + timed.num_microbatches)
    seen = {"combine alone": run(bench, heap, timed, ExchangeMode.COMBINE, replay_plan=True)[1]}
    heap.reset()
    seen["both"] = run(bench, heap, timed, ExchangeMode.BOTH)[1]
    heap.close()
    alone = replace(timed, depth=bench.depth_alone)
    heap = bench.heap(alone)
    seen["dispatch alone"] = run(bench, heap, alone, ExchangeMode.DISPATCH)[1]
    heap.close()
    everyone = job.gather(seen)
    dispatch, combine = job.world.dispatch_switch(0), job.world.combine_switch(0)
    more = {"num_tokens": timed.bound_tokens, "microbatch_tokens": microbatch_tokens, "sum_order": order.value}
    rows_out, rows_in = (counted[pe][i] / checked.num_microbatches for i, pe in enumerate((dispatch, combine)))
    bench.add("rows_per_token", rows_out / microbatch_tokens / job.world.num_ranks, "rows", **more)
    for switch in (Role.DISPATCH_SWITCH, Role.COMBINE_SWITCH):  # kernels sum in registers what the layout keeps in accumulators
        held = layout.row_bytes(switch) / ROW_BYTES / microbatch_tokens
        bench.add("switch_rows_held", held, "m_b rows", role=switch.value, **more)
    for role in ("dispatch alone", "both"):
        bench.add("egress", rate(everyone[dispatch][role], rows_out), "GB/s", role=role, **more)
    for role in ("combine alone", "both"):
        bench.add("ingress", rate(everyone[combine][role], rows_in), "GB/s", role=role, **more)
    for role in ("dispatch alone", "combine alone", "both"):
        served = everyone[dispatch][role], everyone[combine][role]
        add_port_rates(bench, *served, (rows_out, rows_in), microbatch_tokens, role=role, **more)


SWEEP = (4, 8, 12, 16, 24, 32)
"""Blocks of the dispatch switch."""


def measure_sweep(bench: Bench, microbatch_tokens: int, num_microbatches: int) -> None:
    """Egress of the dispatch switch alone for several numbers of blocks."""
    depth = bench.depth_alone
    pipeline = bench.pipeline(num_microbatches, microbatch_tokens, depth)
    heap = bench.heap(pipeline)
    for blocks in SWEEP:
        _, moments = run(bench, heap, pipeline, ExchangeMode.DISPATCH, blocks=blocks)
        dispatch = bench.job.world.dispatch_switch(0)
        moments, sent = bench.job.gather((moments, int(heap.counters()["rows_sent"])))[dispatch]
        more = {"microbatch_tokens": microbatch_tokens, "switch_blocks": blocks}
        bench.add("egress", rate(moments, sent / num_microbatches), "GB/s", role="dispatch alone", **more)
        heap.reset()
    heap.close()


def measure_latency(bench: Bench, num_tokens: int, num_microbatches: int = 2000) -> None:
    """One microbatch at a time: the next begins when the sums of the last are back."""
    pipeline = bench.pipeline(num_microbatches, num_tokens, 1)
    heap = bench.heap(pipeline)
    done, served = run(bench, heap, pipeline, ExchangeMode.BOTH, timed=True)
    heap.close()
    inside = bench.job.gather(served[WARM_MICROBATCHES:])
    for role, pe in (("dispatch", bench.job.world.dispatch_switch(0)), ("combine", bench.job.world.combine_switch(0))):
        spent = (inside[pe]["done"] - inside[pe]["arrived"]).astype(np.float64) / 1e3
        bench.add("switch_time_p50", float(np.median(spent)), "us", role=role, microbatch_tokens=num_tokens)
    everyone = [moments for moments in bench.job.gather(None if done is None else done.moments) if moments is not None]
    push, rows, publish, sums = np.moveaxis(np.stack(everyone)[:, WARM_MICROBATCHES:], 2, 0)
    for role, spent in (("dispatch", rows - push), ("combine", sums - publish)):
        for metric, percent in (("latency_p50", 50), ("latency_p99", 99)):
            value = float(np.percentile(spent.max(axis=0), percent))
            bench.add(metric, value, "us", role=role, num_tokens=pipeline.bound_tokens, microbatch_tokens=num_tokens)


def write_table(bench: Bench, commit: str, output: Path | None) -> Path:
    job, placement = bench.job, bench.job.placement.kind.value
    path = output or FOLDER / "data" / f"collectives_{placement}_{commit}.csv"
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("nvidia-nvshmem-cu13", "cuda-bindings"))
        gpus = f"{len(job.placement.gpus)} x {job.gpu.name}"
        file.write(f"# {datetime.date.today()}, {gpus}, placement {placement}, commit {commit}\n")
        file.write(f"# Python {platform.python_version()}, {versions}; {Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}\n")
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        fixed = {"measurement": "collectives", "source": "measured_gpu", "placement": placement}
        writer.writerows({**fixed, "num_ranks": job.world.num_ranks, **row} for row in bench.rows)
    return path


def commit_name() -> str:
    command = ["git", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placement", type=PlacementKind, default=None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatch-tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--microbatches", type=int, default=24)
    parser.add_argument("--switch-blocks", type=int, default=SWITCH_BLOCKS)
    parser.add_argument("--sweep", action="store_true", help="also vary the blocks of the dispatch switch")
    parser.add_argument("--model", type=CommunicationModel, nargs="+", default=list(IMPLEMENTATIONS), metavar="MODEL")
    parser.add_argument("--rank-port-gbps", type=float, nargs="+", default=None, metavar="GB/s", help="0: as fast as they are")
    parser.add_argument("--latency-tokens", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--ranks-per-phase", type=int, nargs="+", default=[1], metavar="G")
    parser.add_argument("--routing", type=Routing, nargs="+", default=[Routing.UNIFORM], metavar="KIND")
    parser.add_argument("--no-barrier", action="store_true", help="phased dispatches without the barrier behind them")
    parser.add_argument("--row-group-tokens", type=int, nargs="+", default=[0], metavar="N", help="of inc_all_to_all alone")
    parser.add_argument("--local-bypass", action="store_true", help="rows of a rank's own experts stay on it")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--output", type=Path, help="data file (default: results/data/collectives_PLACEMENT_COMMIT.csv)")
    options = parser.parse_args()
    world = World(options.ranks)
    largest = Pipeline(1, max(options.microbatch_tokens), FREE_RUNNING_DEPTH, max(options.ranks_per_phase))
    slab = max(COPY_BYTES, *(HeapLayout(Dims.of(model, world, SHAPE, largest)).heap_bytes for model in options.model))
    slab += 4 << 20  # the words of small row groups
    with NvshmemJob.join(world, slab, options.placement) as job:
        bench = Bench(job, min(options.switch_blocks, job.placement.seats[-1].num_blocks), [])
        peak = measure_copy_peak(bench)
        by_default = peak / options.ranks if job.placement.kind is PlacementKind.SCALE_MODEL else 0.0
        rates = options.rank_port_gbps if options.rank_port_gbps else [by_default]
        bench.barrier, bench.local_bypass = not options.no_barrier, options.local_bypass
        forms = product(options.routing, options.model, options.ranks_per_phase, rates, options.row_group_tokens)
        for bench.routing, bench.model, bench.ranks_per_phase, bench.rank_port_gbps, bench.row_group_tokens in forms:
            if bench.ranks_per_phase != options.ranks_per_phase[0] and not bench.model.phased:
                continue
            if bench.row_group_tokens and bench.model is not CommunicationModel.INC_ALL_TO_ALL:
                continue
            for tokens in options.latency_tokens:
                measure_latency(bench, tokens)
            for tokens in options.microbatch_tokens:
                measure_throughput(bench, tokens, options.microbatches, SumOrder.ARRIVAL)
            if options.sweep:
                measure_sweep(bench, 1024, options.microbatches)
            if job.pe == 0:
                path = write_table(bench, options.commit or commit_name(), options.output)
        if job.pe == 0:
            print(path.read_text(encoding="utf-8"), flush=True)


if __name__ == "__main__":
    main()
