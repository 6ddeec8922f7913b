"""Times of collective GPU work: interleaved runs, started together on all ranks, by device events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

AHEAD_CYCLES = 1_500_000
"""The GPU sleeps while the host launches everything: about 0.9 ms. Launch gaps of no side are counted."""


class Starter:
    """Lets the host run ahead, then lets all ranks' streams pass together."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, device="cuda")

    def __call__(self) -> None:
        torch.cuda._sleep(AHEAD_CYCLES)
        dist.all_reduce(self._word)


def over_ranks(values: list[float], reduce: Callable[[list[float]], float] = max) -> list[float]:
    """Element by element: the largest (or `reduce`) over the ranks. Collective."""
    own = torch.tensor(values, dtype=torch.float64, device="cuda")
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [reduce(column) for column in torch.stack(everyone).T.tolist()]


def time_interleaved(functions: dict[str, Callable[[], object]], repeats: int, warm_ups: int = 2) -> dict[str, float]:
    """Microseconds of each function: median over the repeats of the maximum over the ranks. Collective."""
    starter = Starter()
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
        name: statistics.median(over_ranks([start.elapsed_time(end) * 1e3 for start, end in pairs]))
        for name, pairs in events.items()
    }


class StageClock:
    """Times of the stages of a layer that calls `mark(stage)` before each of them and `mark("end")`."""

    def __init__(self) -> None:
        self._starter = Starter()
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
            result[name] = statistics.median(over_ranks(spans, min if name in collectives else max))
        return result
