"""How to cut a batch into microbatches, from a table of measured layers: nothing is tried at first use.

`tuning.csv` holds the cut with the shortest layer time for each placement, implementation and number of tokens that was measured;
`results/tune.py` writes it. What decides is how many rows an expert gets: tiles have 128 rows, and a microbatch reads all weights
once. So a shape or a world that was not measured takes the cut that gives its experts as many rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from inc_runtime.config import Implementation, LayerShape, Pipeline
from inc_runtime.errors import ConfigurationError
from inc_runtime.placement import PlacementKind

TABLE = Path(__file__).with_name("tuning.csv")
GRAIN = 64
"""Sizes that are not measured are rounded to so many tokens."""


@dataclass(frozen=True)
class Cut:
    """The best cut that was measured. `rows_per_token`: rows that an expert gets per token of each rank, W k / E."""

    placement: str
    implementation: str
    rows_per_token: float
    num_tokens: int
    microbatch_tokens: int
    edge_tokens: int
    ranks_per_phase: int
    depth: int
    layer_time_us: float


COLUMNS = tuple(Cut.__dataclass_fields__)


@cache
def measured_cuts(path: Path = TABLE) -> tuple[Cut, ...]:
    """The rows of the table."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    kinds = {"placement": str, "implementation": str, "rows_per_token": float, "layer_time_us": float}
    return tuple(Cut(**{name: kinds.get(name, int)(row[name]) for name in COLUMNS}) for row in rows)


def tuned_pipeline(
    shape: LayerShape,
    bound_tokens: int,
    num_ranks: int,
    implementation: Implementation,
    placement: PlacementKind | None = None,
    cuts: Sequence[Cut] | None = None,
) -> Pipeline:
    """The pipeline for a batch of `bound_tokens` tokens a rank: the measured cut of the nearest number of rows per expert.

    Rows of the same placement count first, of the same implementation always. Raises ConfigurationError where the table has none.
    """
    known = [cut for cut in (measured_cuts() if cuts is None else cuts) if cut.implementation == implementation.value]
    known = [cut for cut in known if placement and cut.placement == placement.value] or known
    if not known:
        raise ConfigurationError(
            f"implementation = {implementation.value}: {TABLE.name} has no measured cut of it. Measure it with "
            "results/measure_speed_ups.py and run results/tune.py, or give a Pipeline yourself."
        )
    per_token = num_ranks * shape.top_k / shape.num_experts
    nearest = min(known, key=lambda cut: abs(math.log(bound_tokens * per_token / (cut.num_tokens * cut.rows_per_token))))
    scale = nearest.rows_per_token / per_token

    def tokens(measured: int, most: int) -> int:
        size = measured * scale
        return min(most, max(1, int(size) if scale == 1 else max(GRAIN, round(size / GRAIN) * GRAIN)))

    whole = nearest.microbatch_tokens >= nearest.num_tokens
    microbatch = bound_tokens if whole else tokens(nearest.microbatch_tokens, bound_tokens)
    return Pipeline(
        bound_tokens,
        microbatch,
        nearest.depth,
        ranks_per_phase=min(nearest.ranks_per_phase, num_ranks),
        edge_tokens=tokens(nearest.edge_tokens, microbatch) if nearest.edge_tokens else None,
    )
