"""Rows of a simulated data file, as figures and tables read them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """One simulated layer time. `x` is the axis of its question, `row` everything that the file says of it."""

    series: str
    x: float
    implementation: str
    mode: str
    layer_time_us: float
    microbatch_tokens: int
    busiest: str
    row: dict[str, str]


def read_points(path: Path) -> list[Point]:
    """Points of a file, in its order. Raises ValueError where a row is not simulated."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    points = []
    for row in csv.DictReader(lines):
        if row["source"] != "simulated":
            raise ValueError(f"{path}: a row of source {row['source']} among simulated ones; they never share a series.")
        values = float(row["x"]), row["implementation"], row["mode"], float(row["value"]), int(row["microbatch_tokens"])
        points.append(Point(row["series"], *values, row["busiest"], row))
    return points


def calibration_of(points: list[Point]) -> str:
    """What a caption says of the source."""
    names = sorted({f"{p.row['calibration']} ({p.row['calibration_source']})" for p in points})
    return f"source: simulated, calibration: {', '.join(names)}"


def speed_ups(points: list[Point], *, mode: str = "fast") -> dict[str, list[tuple[float, float, Point, Point]]]:
    """By series: x, plain over INC, and the two points."""
    result: dict[str, list[tuple[float, float, Point, Point]]] = {}
    plain = {(p.series, p.x): p for p in points if p.implementation == "megakernel" and p.mode.startswith(mode)}
    for p in points:
        if p.implementation == "megakernel_inc" and p.mode.startswith(mode) and (p.series, p.x) in plain:
            other = plain[p.series, p.x]
            result.setdefault(p.series, []).append((p.x, other.layer_time_us / p.layer_time_us, other, p))
    return result


def post_formula(points: list[Point]) -> tuple[float, float, float]:
    """o in us, c in us per token, and S of T = (M + S - 1)(o + c m_b), least squares over all points of a series.

    Source: post, Pipelining. Searched over S; for each S the best o and c are a linear fit of T / (M + S - 1) against m_b.
    """
    import numpy as np

    size = np.array([p.microbatch_tokens for p in points], float)
    count = np.ceil(np.array([p.x for p in points]) / size)
    time = np.array([p.layer_time_us for p in points])
    best = (np.inf, 0.0, 0.0, 1.0)
    for stages in np.arange(1.1, 8.0, 0.05):
        factor = count + stages - 1
        design = np.stack([factor, factor * size], axis=1) / time[:, None]
        (o, c), *_ = np.linalg.lstsq(design, np.ones_like(time), rcond=None)
        error = float(np.sum((design @ [o, c] - 1) ** 2))
        if o > 0 and c > 0 and error < best[0]:
            best = (error, float(o), float(c), float(stages))
    return best[1], best[2], best[3]
