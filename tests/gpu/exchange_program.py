"""What each process of the GPU tests runs under torchrun: one property after another, one line per case.

Exits with 1 on a failure.

python -m inc_runtime.mps -- torchrun --nproc-per-node 6 -m tests.gpu.exchange_program parity --placement one_gpu
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from inc_runtime.backends.nvshmem import DeviceHeap, NvshmemJob
from inc_runtime.collectives.microbatch import RoutedTokens
from inc_runtime.compile_cache import Verbs
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, SumOrder
from inc_runtime.device.exchange import Exchange, stop_switches
from inc_runtime.errors import IncError
from inc_runtime.placement import PlacementKind
from inc_runtime.protocol import Role, World
from switch_emulator.launch_switch import RunningSwitch
from tests.gpu.expected import Case, Options, expected

ONLY_ON_THE_HOST, ONLY_ON_GPUS = {"stop"}, {"ports"}
STAGING = {"tokens", "packed_tokens", "sums_out"}
"""Sources of puts, which a direct link does not need: it stores from where the rows are."""
BY_ARRIVAL = {
    True: {"dispatch_grants", "inbox_tokens", "inbox_header", "inbox_routing"},
    False: {"dispatch_grants", "chunk_header", "relay_chunk", "relay_rows", "relay_arrived"},
}
"""Phased, by whether in the network: regions whose last bytes depend on the order of requests, hence which place, which cell."""
LIMIT_S = 60.0
MODELS = (
    CommunicationModel.INC_ALL_TO_ALL,
    CommunicationModel.ALL_TO_ALL,
    CommunicationModel.INC_ALL_TO_ALL_PHASED,
    CommunicationModel.ALL_TO_ALL_PHASED,
)

ALL_TO_EVERY_RANK = {
    CommunicationModel.INC_ALL_TO_ALL: CommunicationModel.INC_ALL_GATHER_REDUCE_SCATTER,
    CommunicationModel.ALL_TO_ALL: CommunicationModel.ALL_GATHER_REDUCE_SCATTER,
    CommunicationModel.INC_ALL_TO_ALL_PHASED: CommunicationModel.INC_ALL_GATHER_REDUCE_SCATTER_PHASED,
}
"""The model whose programs are the same, with every token to every rank."""


def parity_cases(num_ranks: int, model: CommunicationModel, group: int, options: Options) -> list[Case]:
    small = LayerShape(num_experts=4 * num_ranks + 1, top_k=4, hidden_size=64, intermediate_size=64)
    olmoe = LayerShape(num_experts=64, top_k=8, hidden_size=2048, intermediate_size=1024)
    one = Pipeline(bound_tokens=8, microbatch_tokens=8, depth=3)
    several = Pipeline(bound_tokens=50, microbatch_tokens=7, depth=2, sum_order=SumOrder.RANK)
    wide = Pipeline(bound_tokens=100, microbatch_tokens=100, depth=3)
    tiles = Pipeline(bound_tokens=2500, microbatch_tokens=2500, depth=2)
    uneven = tuple(tuple((5 * call + 3 * rank) % 9 for rank in range(num_ranks)) for call in range(7))
    many = tuple(tuple(50 if rank else 13 * call for rank in range(num_ranks)) for call in range(3))
    full = tuple((100,) * num_ranks for _ in range(2))
    filled = tuple((2500,) * num_ranks for _ in range(2))
    nobody = ((0,) * num_ranks, (1,) * num_ranks, (0,) * num_ranks)
    cases = [
        Case("one microbatch a call, uneven tokens", small, one, uneven, model),
        Case("eight microbatches a call, rank order", small, several, many, model),
        Case("olmoe rows", olmoe, one, uneven[:4], model),
        Case("olmoe rows, every warp busy", olmoe, wide, full, model),
        Case("several tiles a block", small, tiles, filled, model),
        Case("nobody has tokens", small, one, nobody, model),
    ]
    everywhere = ALL_TO_EVERY_RANK.get(model)
    if everywhere and options == Options():
        cases.append(Case("every rank gets every token", small, one, uneven[:4], everywhere))
    cases = [replace(case, pipeline=options.on(case.pipeline)) for case in cases]
    if not model.phased:
        return cases
    return [
        replace(case, name=f"G = {group}, {case.name}", pipeline=replace(case.pipeline, ranks_per_phase=group)) for case in cases
    ]


def differing_regions(
    seen_regions: dict[str, np.ndarray], wanted: dict[str, np.ndarray], verbs: Verbs, model: CommunicationModel
) -> list[str]:
    """Regions whose bytes differ, with the first place."""
    skipped = ONLY_ON_THE_HOST | ONLY_ON_GPUS | (STAGING if verbs is Verbs.DIRECT else set())
    skipped |= BY_ARRIVAL[model.in_network] if model.phased else set()
    found = []
    for name, seen in seen_regions.items():
        if name in skipped:
            continue
        unequal = np.flatnonzero(seen.reshape(-1).view("u1") != wanted[name].reshape(-1).view("u1"))
        if len(unequal):
            found.append(f"{name}: {len(unequal)} of {seen.nbytes} bytes, first at {unequal[0]} of shape {seen.shape}")
    return found


def check_parity(job: NvshmemJob, case: Case, verbs: Verbs, rank_port_gbps: float) -> list[str]:
    """Compare every region of this PE with the role programs after each call. Returns what differs."""
    heap = DeviceHeap(job, case.layout(job.world), verbs=verbs, poison=True)
    heap.pace_ports(rank_port_gbps)
    switch = None if heap.role is Role.COMPUTE_RANK else RunningSwitch(heap, case.pipeline.sum_order)
    problems = []
    for call in range(len(case.num_tokens)):
        memory, outputs = expected(case, job.world, call + 1)
        job.barrier()
        if switch is None:
            given = case.given(call, job.pe)
            started = Exchange(heap, case.shape, case.pipeline, given, layer=call).start()
            if (started.finish(limit_s=LIMIT_S).output != outputs[job.pe]).any():
                problems.append(f"call {call}: output differs")
        job.barrier()
        heap.check()
        problems += [f"call {call}: {text}" for text in differing_regions(heap.snapshot(), memory[job.pe], verbs, case.model)]
        job.barrier()
    stop(job, heap, switch)
    return problems


def stop(job: NvshmemJob, heap: DeviceHeap, switch: RunningSwitch | None) -> None:
    if switch is None:
        stop_switches(heap)
    else:
        switch.wait(limit_s=LIMIT_S)
    job.barrier()
    heap.close()


def report(job: NvshmemJob, name: str, problems: list[str]) -> bool:
    """Print one line for all PEs. Returns True where none has a problem."""
    everyone = job.gather(problems)
    if job.pe == 0:
        first = [f"{job.world.name_of(pe)}: {text}" for pe, texts in enumerate(everyone) for text in texts[:2]]
        print(f"{'FAILED' if first else 'passed'}  {name}" + "".join(f"\n        {text}" for text in first), flush=True)
    return not any(everyone)


def run_parity(job: NvshmemJob, model: CommunicationModel, verbs: Verbs, rank_port_gbps: float, options: Options) -> bool:
    good = True
    for group in (1, 2, job.world.num_ranks) if model.phased else (1,):
        for case in parity_cases(job.world.num_ranks, model, group, options):
            name = f"parity, {case.model.value}{options}, {verbs.value} verbs: {case.name}"
            good &= report(job, name, check_parity(job, case, verbs, rank_port_gbps))
    return good


@dataclass(frozen=True)
class Stress:
    """One long run of hashed tokens. `share` of the microbatches that the user asks for."""

    delay_us: float
    microbatch_tokens: int
    depth: int
    order: SumOrder = SumOrder.ARRIVAL
    share: float = 1.0
    ranks_per_phase: int = 1
    barrier: bool = True


STRESSES = (
    Stress(20.0, 3, 3, ranks_per_phase=2),
    Stress(0.0, 1, 1, SumOrder.RANK),
    Stress(0.0, 5, 4, barrier=False),
    Stress(5.0, 150, 3, share=0.02),  # messages of several chunks, more than a sender has cells
)


def run_stress(
    job: NvshmemJob, model: CommunicationModel, stress: Stress, num_microbatches: int, options: Options
) -> bool:
    """Back-to-back microbatches of hashed tokens; every received row and every sum is compared on the device."""
    shape = LayerShape(num_experts=64, top_k=8, hidden_size=512, intermediate_size=64)
    size = stress.microbatch_tokens
    pipeline = Pipeline(num_microbatches * size, size, depth=stress.depth, sum_order=stress.order)
    pipeline = replace(pipeline, ranks_per_phase=stress.ranks_per_phase, barrier_after_dispatch=stress.barrier)
    pipeline = options.on(pipeline)
    case = Case("stress", shape, pipeline, ((pipeline.bound_tokens,) * job.world.num_ranks,), model)
    heap = DeviceHeap(job, case.layout(job.world), poison=True)
    switch = None if heap.role is Role.COMPUTE_RANK else RunningSwitch(heap, stress.order)
    problems, begin = [], time.monotonic()
    job.barrier()
    if switch is None:
        rng = np.random.default_rng(job.pe)
        n = pipeline.bound_tokens
        given = RoutedTokens(np.zeros((n, shape.hidden_size), "u2"), rng.integers(-1, 64, (n, 8)), np.zeros((n, 8)))
        call = Exchange(heap, shape, pipeline, given, verify=True, seed=7, delay_us=stress.delay_us).start()
        done = call.finish(limit_s=240)
        if done.wrong_rows or done.wrong_sums:
            problems.append(f"{done.wrong_rows} wrong words in rows, {done.wrong_sums} in sums")
    job.barrier()
    seconds = time.monotonic() - begin
    heap.check()
    stop(job, heap, switch)
    text = f"stress, {model.value}{options}: "
    text += f"{num_microbatches} microbatches of {size}, depth {stress.depth}, {stress.order.value} order, "
    return report(job, f"{text}delays {stress.delay_us} us: {seconds:.1f} s", problems)


FAULTS = (
    ("absent rank", "ArrivalTimeout", "rank 1 (its flag holds"),
    ("other bound", "Mismatch", "brought bound_tokens = "),
    ("bad expert", "ConfigurationError", "to expert 99"),
)


def run_fault(job: NvshmemJob, model: CommunicationModel, options: Options, fault: str, kind: str, words: str) -> bool:
    """Rank 1 misbehaves: some PE reports the cause in the right words, and no PE that still waits is left without an error."""
    shape, pipeline = LayerShape(num_experts=16, top_k=2, hidden_size=64, intermediate_size=64), Pipeline(8, 8)
    pipeline = options.on(pipeline)
    case = Case(fault, shape, pipeline, ((8,) * job.world.num_ranks,), model)
    heap = DeviceHeap(job, case.layout(job.world))
    heap.argument["wait_limit_ns"] = int(heap.argument["wait_limit_ns"] / job.environment.wait_limit_s)  # one second for ranks
    job.barrier()
    seen = ""
    try:
        if heap.role is not Role.COMPUTE_RANK:
            RunningSwitch(heap, SumOrder.ARRIVAL).wait(limit_s=LIMIT_S)
        elif not (fault == "absent rank" and job.pe == 1):
            given = case.given(0, job.pe)
            if fault == "bad expert" and job.pe == 1:
                given.expert_ids[3, 1] = 99
            call = Exchange(heap, shape, pipeline, given)
            if fault == "other bound" and job.pe == 1:
                call.arguments["bound_tokens"] = 16
            call.start().finish(limit_s=LIMIT_S)
    except IncError as error:
        seen = f"{type(error).__name__}: {error}"
    everyone = job.gather(seen)
    job.barrier()
    named = [text for text in everyone if text.startswith(kind) and words in text]
    # A bad expert reaches nobody, so the microbatch may end before the abort is seen by the ranks.
    silent = [job.world.name_of(pe) for pe, text in enumerate(everyone) if not text and pe != 1 and fault != "bad expert"]
    if job.pe == 0 and named:
        print(f"        {named[0]}", flush=True)
    heap.close()
    name = f"fault, {model.value}{options}: {fault}"
    return report(job, name, [] if named and not silent else [f"{everyone}, silent: {silent}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("properties", nargs="+", choices=["parity", "nvshmem", "stress", "faults"])
    parser.add_argument("--placement", type=PlacementKind, default=None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--switches", type=int, default=1, help="of each role; 0: the ranks of a plain model reach each other")
    parser.add_argument("--models", nargs="+", type=CommunicationModel, default=list(MODELS))
    parser.add_argument("--microbatches", type=int, default=2000)
    parser.add_argument("--rank-port-gbps", type=float, default=0.0, help="pace the ports of the ranks in parity runs; 0: do not")
    parser.add_argument("--repeats", type=int, default=1, help="of the long runs")
    Options.add_to(parser)
    options = parser.parse_args()
    chosen = Options.of(options)
    with NvshmemJob.join(World(options.ranks, options.switches, options.switches), 256 << 20, options.placement) as job:
        good = True
        for model in options.models:
            if "parity" in options.properties:
                good &= run_parity(job, model, Verbs.DIRECT, options.rank_port_gbps, chosen)
            if "stress" in options.properties:
                for _ in range(options.repeats):
                    for stress in STRESSES:
                        number = max(1, int(options.microbatches * stress.share))
                        good &= run_stress(job, model, stress, number, chosen)
            if "nvshmem" in options.properties and not model.phased:
                good &= run_parity(job, model, Verbs.NVSHMEM, options.rank_port_gbps, chosen)
            if "faults" in options.properties:
                for fault in FAULTS:
                    good &= run_fault(job, model, chosen, *fault)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
