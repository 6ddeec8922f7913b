"""Two runs of the same commit on the same machine: how much ratios of medians, and of 99th percentiles, differ."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from inc_runtime.simulator.measured import COLUMNS
from results.data_files import ON_GPU, DataFile

ALLOWED = {"layer_time": 0.05, "latency_p50": 0.05, "latency_p99": 0.15}
"""Largest relative difference between the runs that the evaluation allows, by metric."""

LIKE = (set(COLUMNS) - {"implementation", "value", "microbatch_tokens"}) | {
    *("role", "collective", "shape", "routing", "direction", "sum_order", "rank_port_gbps", "switch_blocks"),
}
"""Columns in which two implementations must agree to be compared, where a file has them."""

CUT = ("implementation", "microbatch_tokens", "ranks_per_phase", "edge_tokens")
"""Columns that tell one of them from another."""

Place = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Repeated:
    """Ratios of one metric in files of one origin: how many, the largest difference, and where it lies."""

    origin: str
    metric: str
    count: int
    largest: float
    where: str

    @property
    def within(self) -> bool:
        """True if the runs agree as the evaluation asks."""
        return self.largest <= ALLOWED[self.metric]


def _values(files: Iterable[DataFile]) -> dict[tuple[str, str], dict[Place, dict[str, float]]]:
    """(origin, metric) -> what is compared -> implementation with its own settings -> value."""
    out: dict[tuple[str, str], dict[Place, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for file in files:
        if file.source != ON_GPU:
            continue  # times of processes mean nothing, and simulated ones repeat themselves
        origin = f"{file.measurement}, {file.source}, placement {file.placement}, commit {file.commit}, {file.device}"
        for row in file.rows:
            if row.get("metric") in ALLOWED:
                place = tuple(sorted((key, value) for key, value in row.items() if key in LIKE and value))
                own = "/".join(filter(None, (row.get(key) for key in CUT)))
                out[origin, row["metric"]][place][own] = float(row["value"])
    return out


def compare(before: Iterable[DataFile], now: Iterable[DataFile]) -> list[Repeated]:
    """Every ratio of two implementations that both runs hold, by origin and metric. Empty where nothing was run twice."""
    old, new = _values(before), _values(now)
    result = []
    for key, places in new.items():
        found: list[tuple[float, str]] = []
        for place, values in places.items():
            earlier = old.get(key, {}).get(place, {})
            both = sorted(set(values) & set(earlier))
            for a, b in itertools.combinations(both, 2):
                if values[a] and values[b] and earlier[a] and earlier[b]:
                    ratio, ratio_before = values[a] / values[b], earlier[a] / earlier[b]
                    tokens = dict(place).get("num_tokens", "")
                    found.append((abs(ratio / ratio_before - 1), f"{a} over {b}, {tokens} tokens"))
        if found:
            largest, where = max(found)
            result.append(Repeated(*key, len(found), largest, where))
    return result
