"""Fit a calibration to data files, part by part and then to whole layers.

1. Means: `copy_peak`, `link_peak`, `signal_latency`, `memory_bandwidth`, `launch`, `stage_overhead`; measured before published.
2. Collectives alone: latency and throughput move the parameters of links, emulated switches and relays.
3. Expert products alone, stages and layers of the Baseline: the units of a layer of one kernel per stage.
4. Layers of one kernel: `layer_time` points move what no part shows, the units of the fused kernel.

Steps 2 to 4 move parameters in their logarithm, by Levenberg and Marquardt's method on the logarithm of predicted over measured,
with a weak pull to the values of the step before, so that what the points cannot tell stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from inc_runtime.simulator.calibration import Calibration
from inc_runtime.simulator.exchange_parts import ExchangePoint, exchange_points
from inc_runtime.simulator.measured import (
    MODELLED_PLACEMENTS,
    HeldOut,
    LayerPoint,
    Point,
    Prediction,
    Row,
    layer_points,
    prediction_table,
    predictions,
    read_rows,
)
from inc_runtime.simulator.parts import LIBRARY, OWN_KERNEL, ProductPoint, StagePoint, product_points, stage_points

UNFUSED = ("matrix_tflops", "expert_us", "sustained_rate", "launch_us", "vector_efficiency", "route_ns", "exchange_us")
LINKS = ("port_gbps", "latency_us", "switch_overhead_us", "relay_efficiency", "relay_us")
FUSED = (
    "fused_rate",
    "matrix_overhead_us",
    "vector_overhead_us",
    "fused_vector_efficiency",
    "fused_route_ns",
    "interference",
)
STARTS = {
    **{"expert_us": 0.5, "route_ns": 0.5, "switch_overhead_us": 1.0, "relay_us": 5.0},
    **{"fused_route_ns": 1.0, "interference": 0.1},
}
"""Where a fit begins with parameters that are 0 without one: their logarithm needs a value."""
PULL = 0.05
"""Weight of the pull to the start: a parameter moved by a factor e costs as much as an error of 5 % at one point."""
MAX_STEPS = 25
MOST_OF_A_KIND, MOST_MICROBATCHES = 8, 32
"""A fit sees at most so many layers of a file and implementation, of at most so many microbatches: it predicts each some
hundred times."""
MEANS = {
    "link": ("port_gbps", 1.0),
    "signal_latency": ("latency_us", 1.0),
    "memory": ("memory_tbps", 1.0),
    "launch": ("launch_us", 1.0),
    "stage_overhead": ("vector_overhead_us", 1.0),
}


def _mean_of(row: Row) -> tuple[str, float] | None:
    """Which mean a row counts for, and its value. A copy peak is of the link between devices, or of a device's memory."""
    metric, value = row["metric"], float(row["value"])
    if row["placement"] not in MODELLED_PLACEMENTS:
        return None
    if metric == "link_peak" or (metric == "copy_peak" and row["measurement"] != "moe_layer"):
        return "link", value
    if metric in ("memory_bandwidth", "copy_peak"):
        return "memory", value / (1e3 if row["unit"] == "GB/s" else 1.0)
    return (metric, value) if metric in MEANS else None


def fit_means(rows: Sequence[Row], start: Calibration) -> Calibration:
    """Step 1: what is read off as it stands, the measured before the published."""
    found: dict[str, dict[bool, list[float]]] = {}
    for row in rows:
        if mean := _mean_of(row):
            found.setdefault(mean[0], {}).setdefault(row["source"] == "published", []).append(mean[1])
    changes = {MEANS[kind][0]: float(np.mean(values.get(False) or values[True])) for kind, values in found.items()}
    if "vector_overhead_us" in changes:
        changes["matrix_overhead_us"] = changes["vector_overhead_us"]
    return replace(start, **changes)  # type: ignore[arg-type]


def fit_points(
    points: Sequence[Point], start: Calibration, names: Sequence[str], progress: Callable[[], None] = lambda: None
) -> Calibration:
    """Steps 2 to 4: move the parameters `names` until the predictions are nearest to the points."""
    if not points:
        return start
    start = replace(start, **{name: STARTS[name] for name in names if not getattr(start, name)})  # type: ignore[arg-type]
    origin = np.log([getattr(start, name) for name in names])

    def at(logs: np.ndarray) -> Calibration:
        return replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def residuals(logs: np.ndarray) -> np.ndarray:
        calibration = at(logs)
        errors = [np.log(p.predict(calibration) / p.measured) for p in points]
        progress()
        return np.concatenate([errors, PULL * (logs - origin)])

    logs, damping = origin.copy(), 1e-2
    best = residuals(logs)
    for _ in range(MAX_STEPS):
        step = 0.02
        columns = [(residuals(logs + step * unit) - best) / step for unit in np.eye(len(logs))]
        jacobian = np.stack(columns, axis=1)
        improved = False
        for _ in range(6):
            normal = jacobian.T @ jacobian
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ best)
            trial = residuals(logs + np.clip(move, -0.5, 0.5))
            if trial @ trial < best @ best:
                gain = 1 - (trial @ trial) / (best @ best)
                logs, best, damping, improved = logs + np.clip(move, -0.5, 0.5), trial, damping / 3, True
                break
            damping *= 4
        if not improved or gain < 0.01:
            break
    return at(logs)


@dataclass(frozen=True)
class Points:
    """What was measured, by the step that it serves. `library`: products of a library, at work on a whole device."""

    library: list[ProductPoint]
    products: list[ProductPoint]
    stages: list[StagePoint]
    exchanges: list[ExchangePoint]
    layers: list[LayerPoint]

    @staticmethod
    def of(rows: Sequence[Row]) -> Points:
        products = product_points(rows)
        library = [p for p in products if p.implementation == LIBRARY and p.placement == "native"]
        return Points(library, products, stage_points(rows), exchange_points(rows), layer_points(rows))

    @property
    def all(self) -> list[Point]:
        return [*self.products, *self.stages, *self.exchanges, *self.layers]

    @property
    def alone(self) -> list[ExchangePoint]:
        """Collectives that a fit sees: without phases and paced ports, one at a time."""
        free = [p for p in self.exchanges if not p.scenario.model.phased and p.scenario.network.port_gbps is None]
        return [p for p in free if p.role != "both"]

    @property
    def unfused(self) -> list[Point]:
        """What shows the cost of one kernel per stage."""
        return [*self.library, *self.stages, *(p for p in self.layers if not p.scenario.fused)]

    @property
    def fused(self) -> list[LayerPoint]:
        """Layers of one kernel that a fit sees, evenly over those of each file and implementation; the others are predicted."""
        kinds: dict[tuple[str, str], list[LayerPoint]] = {}
        for p in self.layers:
            if p.scenario.fused and p.scenario.pipeline.num_microbatches <= MOST_MICROBATCHES:
                kinds.setdefault((p.file, p.scenario.implementation.value), []).append(p)
        found = []
        for own in kinds.values():
            places = np.linspace(0, len(own) - 1, min(len(own), MOST_OF_A_KIND)).round().astype(int)
            found += [own[place] for place in places]
        return found

    def seen(self) -> list[Point]:
        """What a fit has seen."""
        return [*self.unfused, *self.alone, *self.fused]


def fit_all(rows: Sequence[Row], points: Points, start: Calibration, progress: Callable[[], None]) -> Calibration:
    """All steps."""
    calibration = fit_means(rows, start)
    calibration = fit_points(points.alone, calibration, LINKS, progress)
    calibration = fit_points(points.unfused, calibration, UNFUSED, progress)
    if not points.fused:
        return calibration
    calibration = replace(calibration, matrix_overhead_us=_overhead_of_products(points.products, calibration))
    # Our own kernels set no SM apart for communication. Where no collective was measured alone, layers have to show the links.
    names = FUSED if points.alone else (*FUSED, "port_gbps", "latency_us")
    return fit_points(points.fused, replace(calibration, communication_sms=0), names, progress)


def _overhead_of_products(products: Sequence[ProductPoint], calibration: Calibration) -> float:
    """o of our own kernel for the products, alone on a device and without its launch: where a fit to whole layers begins."""
    own = [p for p in products if p.implementation == OWN_KERNEL and p.num_sms == calibration.total_sms]
    free = replace(calibration, launch_us=0.0, expert_us=0.0)
    found = [p.measured - p.predict(free) - calibration.launch_us for p in own]
    return max(float(np.mean(found)), calibration.matrix_overhead_us) if found else calibration.matrix_overhead_us


@dataclass(frozen=True)
class Fit:
    """A calibration, its predictions of all points, and what fits without an implementation or a placement make of it."""

    calibration: Calibration
    lines: list[Prediction]
    held_out: list[HeldOut]

    @property
    def table(self) -> str:
        return prediction_table(self.lines, self.calibration, self.held_out)


def calibrate(
    paths: Sequence[Path],
    name: str,
    start: Calibration,
    *,
    unseen_implementation: str | None = None,
    unseen_placement: str | None = None,
    held_out: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> Fit:
    """Fit to data files. No row of the unseen implementation or placement is used, to judge the fit by.

    `held_out`: also leave out every implementation, and every placement, in turn, and predict its layers from a fit to the rest.
    """
    everything = [row for row in read_rows(paths) if row["placement"] in MODELLED_PLACEMENTS]
    rows = rows_without(everything, implementation=unseen_implementation, placement=unseen_placement)
    points, every = Points.of(rows), Points.of(everything)
    calibration = fit_all(rows, points, start, progress)
    lines = predictions(every.all, calibration, points.seen())
    errors: dict[str, object] = {}
    for kind in (ProductPoint, StagePoint, ExchangePoint, LayerPoint):
        for seen in (True, False):
            own = [line.error for line in lines if isinstance(line.point, kind) and line.fitted is seen]
            if own:
                what = f"{'fitted' if seen else 'unseen'}_{kind.plural}"
                errors |= {f"{what}_points": len(own), f"{what}_rms_error": float(np.sqrt(np.mean(np.square(own))))}
                errors[f"{what}_max_error"] = float(np.abs(own).max())
    names, sources = tuple(sorted({row["file"] for row in rows})), sorted({row["source"] for row in rows})
    calibration = replace(calibration, name=name, source="+".join(sources), fit=errors, data_files=names)
    return Fit(calibration, lines, hold_out(everything, start, progress) if held_out else [])


def rows_without(rows: Sequence[Row], *, implementation: str | None = None, placement: str | None = None) -> list[Row]:
    """The rows of other implementations and placements. What a copy, an empty launch or a product can reach belongs to none."""
    return [
        row
        for row in rows
        if row["placement"] != placement and (row["implementation"] != implementation or _mean_of(row) is not None)
    ]


def hold_out(rows: Sequence[Row], start: Calibration, progress: Callable[[], None] = lambda: None) -> list[HeldOut]:
    """Leave out every implementation, and every placement, in turn, with all its rows; fit to the rest; predict its layers."""
    layers = layer_points(rows)
    found = []
    for kind, values in (
        ("implementation", [p.scenario.implementation.value for p in layers]),
        ("placement", [p.scenario.placement for p in layers]),
    ):
        for value in sorted(set(values)) if len(set(values)) > 1 else ():
            rest = rows_without(rows, **{kind: value})
            left = Points.of(rest)
            calibration = fit_all(rest, left, start, progress)
            unseen = [p for p, own in zip(layers, values, strict=True) if own == value]
            errors = np.array([p.predict(calibration) / p.measured - 1 for p in unseen])
            rms, largest = float(np.sqrt(np.mean(errors**2))), float(np.abs(errors).max())
            guessed = any(p.scenario.fused for p in unseen) and not left.fused
            note = "no other layer of one kernel was measured: its units are those of the parts alone" if guessed else ""
            found.append(HeldOut(f"{kind} {value}", len(unseen), rms, largest, note))
    return found
