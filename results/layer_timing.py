"""Times of collective GPU work: interleaved runs, started together on all ranks, by device events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

AHEAD_CYCLES = 1_500_000
"""The GPU sleeps while the host launches everything: about 0.9 ms. Launch gaps of no side are counted."""


@dataclass(frozen=True)
class Ranks:
    """The compute ranks of a job, one GPU each: a NCCL group of them. Its functions are collective over them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def together(self) -> Callable[[], None]:
        """What starts a measured run: the host runs ahead, then the streams of all ranks pass at once."""
        word = torch.zeros(1, device="cuda")

        def start() -> None:
            torch.cuda._sleep(AHEAD_CYCLES)
            dist.all_reduce(word, group=self.group)

        return start

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank."""
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own, group=self.group)
        return everyone

    def reduce(self, values: list[float], join: Callable[[list[float]], float] = max) -> list[float]:
        """Element by element: the largest (or `join`) over the ranks."""
        everyone = self.gather(torch.tensor(values, dtype=torch.float64, device="cuda"))
        return [join(column) for column in torch.stack(everyone).T.tolist()]


def time_interleaved(
    ranks: Ranks, functions: dict[str, Callable[[], object]], repeats: int, warm_ups: int = 2
) -> dict[str, float]:
    """Microseconds of each function: median over the repeats of the maximum over the ranks. Collective."""
    starter = ranks.together()
    for _ in range(warm_ups):
        for function in functions.values():
            function()
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            starter()
            pair[0].record()
            function()
            pair[1].record()
            events[name].append(pair)
        torch.cuda.synchronize()
    return {
        name: statistics.median(ranks.reduce([start.elapsed_time(end) * 1e3 for start, end in pairs]))
        for name, pairs in events.items()
    }


class StageClock:
    """Times of the stages of a layer that calls `mark(stage)` before each of them and `mark("end")`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._starter = ranks, ranks.together()
        self._runs: list[list[tuple[str, torch.cuda.Event]]] = []

    def mark(self, stage: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._runs[-1].append((stage, event))

    def run(self, function: Callable[[], object], repeats: int) -> None:
        self._runs = [[]]
        function()  # warms up
        self._runs = []
        for _ in range(repeats):
            self._runs.append([])
            self._starter()
            function()
            torch.cuda.synchronize()

    def medians(self, collectives: tuple[str, ...]) -> dict[str, float]:
        """Microseconds by stage. Of a collective the shortest of the ranks counts: the others waited for the last to come."""
        names = [stage for stage, _ in self._runs[0][:-1]]
        result = {}
        for position, name in enumerate(names):
            spans = [run[position][1].elapsed_time(run[position + 1][1]) * 1e3 for run in self._runs]
            result[name] = statistics.median(self._ranks.reduce(spans, min if name in collectives else max))
        return result
