"""Fit a calibration to data files: stage costs and links by linear least squares, then all of them to whole layers.

1. Parts: `stage_time` of the MatMuls gives the rate and the launch (t = launch + FLOPs / rate); `copy_peak`, `signal_latency`,
   `memory_bandwidth` and `stage_overhead` give their mean.
2. Collectives alone: latency and throughput move the parameters of links and emulated switches.
3. Layers: `layer_time` points move every parameter.

Steps 2 and 3 move parameters in their logarithm, by Levenberg and Marquardt's method on the logarithm of predicted over measured,
with a weak pull to the values of the step before, so that what the points cannot tell stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.calibration import Calibration
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
from inc_runtime.simulator.parts import ProductPoint, exchange_points, product_points

FITTED = (
    "matrix_tflops",
    "memory_tbps",
    "vector_efficiency",
    "matrix_overhead_us",
    "vector_overhead_us",
    "launch_us",
    "latency_us",
    "port_gbps",
    "switch_overhead_us",
)
EXCHANGE_PARAMETERS = ("port_gbps", "latency_us", "switch_overhead_us")
PULL = 0.05
"""Weight of the pull to the start: a parameter moved by a factor e costs as much as an error of 5 % at one point."""
MAX_STEPS = 25

MEANS = {
    "copy_peak": "port_gbps",
    "signal_latency": "latency_us",
    "memory_bandwidth": "memory_tbps",
}


def fit_parts(rows: Sequence[Row], start: Calibration) -> tuple[Calibration, dict[str, float]]:
    """Step 1. Returns the calibration and the relative rms error of the MatMul times."""
    changes: dict[str, float] = {}
    for metric, name in MEANS.items():
        values = [float(row["value"]) for row in rows if row["metric"] == metric and row["placement"] in MODELLED_PLACEMENTS]
        if values:
            changes[name] = float(np.mean(values))
    overheads = [float(row["value"]) for row in rows if row["metric"] == "stage_overhead"]
    if overheads:
        changes |= {"vector_overhead_us": float(np.mean(overheads)), "matrix_overhead_us": float(np.mean(overheads))}
    errors: dict[str, float] = {}
    of_products = [row for row in rows if row["metric"] == "stage_time" and row.get("rows")]
    times = [row for row in of_products if (row.get("stage") or "").startswith("matmul")]
    if len(times) >= 2:
        flops = np.array([_matmul_flops(row) for row in times])
        measured = np.array([float(row["value"]) for row in times])
        # Relative residuals: every point counts alike, however long it takes.
        design = np.stack([np.ones_like(flops), flops / 1e6], axis=1) / measured[:, None]
        (launch, per_tflop), *_ = np.linalg.lstsq(design, np.ones_like(measured), rcond=None)
        if per_tflop <= 0:
            raise ConfigurationError("stage_time of the MatMuls does not grow with the rows: no rate fits it. Check the data.")
        changes |= {"matrix_tflops": 1.0 / float(per_tflop), "launch_us": max(0.1, float(launch))}
        errors["matmul_rms_error"] = float(np.sqrt(np.mean((design @ [launch, per_tflop] - 1) ** 2)))
    _fit_expert_products(rows, start, changes, errors)
    return replace(start, **changes), errors  # type: ignore[arg-type]


def _compute_bound(point: ProductPoint, machine: Calibration) -> bool:
    """Whether a product takes twice as long to multiply as to read its weights: there its rate can be read off."""
    weights = 3 * point.hidden_size * point.intermediate_size
    flops_us = 2 * weights * point.num_rows / (machine.matrix_tflops * 1e6)
    return flops_us > 2 * 2 * weights * point.num_experts / (machine.memory_tbps * 1e6)


def _fit_expert_products(rows: Sequence[Row], start: Calibration, changes: dict[str, float], errors: dict[str, float]) -> None:
    """Our own kernel for both products, alone on all SMs: t = o + FLOPs / rate, where the weights are not the limit.

    Its o holds the launch and the last, partly filled wave of tiles, so that it bounds that of a persistent kernel from above.
    """
    machine = replace(start, **{k: v for k, v in changes.items() if k == "memory_tbps"})  # type: ignore[arg-type]
    points = [p for p in product_points(rows) if p.implementation == "expert_matmul" and p.num_sms == start.total_sms]
    points = [p for p in points if _compute_bound(p, machine)]
    if len(points) < 2:
        return
    times = np.array([p.measured for p in points])
    flops = np.array([6.0 * p.hidden_size * p.intermediate_size * p.num_rows for p in points])
    design = np.stack([np.ones_like(times), flops / 1e6], axis=1) / times[:, None]
    (overhead, per_tflop), *_ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
    changes |= {"matrix_tflops": 1.0 / float(per_tflop), "matrix_overhead_us": max(0.1, float(overhead))}
    errors["expert_products_rms_error"] = float(np.sqrt(np.mean((design @ [overhead, per_tflop] - 1) ** 2)))


def _matmul_flops(row: Row) -> float:
    """FLOPs of one grouped MatMul of `rows` rows; gate and up are one product."""
    size = float(row["hidden_size"]) * float(row["intermediate_size"])
    return 2 * float(row["rows"]) * size * (2 if row["stage"] == "matmul_gate_up" else 1)


def fit_points(
    points: Sequence[Point], start: Calibration, names: Sequence[str], progress: Callable[[], None] = lambda: None
) -> Calibration:
    """Steps 2 and 3: move the parameters `names` until the predictions are nearest to the points."""
    names = [name for name in names if getattr(start, name) > 0]
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
    progress: Callable[[], None] = lambda: None,
) -> Fit:
    """Fit to data files. Points of the unseen implementation or placement are kept out, to judge the fit by."""
    rows = read_rows(paths)
    parts, errors = fit_parts(rows, start)
    exchanges, layers = exchange_points(rows), layer_points(rows)
    alone = [p for p in exchanges if p.role != "both"]
    if alone:
        parts = replace(parts, switch_overhead_us=parts.switch_overhead_us or 1.0)
        parts = fit_points(alone, parts, EXCHANGE_PARAMETERS, progress)
    fitted = [
        p for p in layers if p.scenario.implementation.value != unseen_implementation and p.scenario.placement != unseen_placement
    ]
    calibration = fit_points(fitted, parts, FITTED, progress) if fitted else parts
    products = product_points(rows)
    seen_products = [p for p in products if p.implementation == "expert_matmul" and _compute_bound(p, parts)]
    lines = predictions([*products, *exchanges, *layers], calibration, [*seen_products, *alone, *fitted])
    _state_error("products", lines[: len(products)], errors)
    _state_error("exchanges", lines[len(products) : len(products) + len(exchanges)], errors)
    of_layers = lines[len(products) + len(exchanges) :]
    _state_error("fitted", [line for line in of_layers if line.fitted], errors)
    _state_error("unseen", [line for line in of_layers if not line.fitted], errors)
    names, sources = tuple(path.name for path in paths), sorted({row["source"] for row in rows})
    calibration = replace(calibration, name=name, source="+".join(sources), fit=dict(errors), data_files=names)
    return Fit(calibration, lines, hold_out(layers, parts, calibration, progress))


def _state_error(kind: str, lines: Sequence[Prediction], errors: dict[str, float]) -> None:
    if lines:
        relative = np.array([line.error for line in lines])
        errors[f"{kind}_points"] = len(lines)
        errors[f"{kind}_rms_error"] = float(np.sqrt(np.mean(relative**2)))
        errors[f"{kind}_max_error"] = float(np.abs(relative).max())


def hold_out(
    layers: Sequence[LayerPoint], start: Calibration, fitted: Calibration, progress: Callable[[], None] = lambda: None
) -> list[HeldOut]:
    """Leave out every implementation, and every placement, in turn; fit to the rest, and predict it.

    These fits are linear around the fit to all points: one set of derivatives serves them all.
    """
    names = [name for name in FITTED if getattr(start, name) > 0]
    origin, center = (np.log([getattr(c, name) for name in names]) for c in (start, fitted))

    def errors_at(logs: np.ndarray, points: Sequence[LayerPoint]) -> np.ndarray:
        calibration = replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))
        progress()
        return np.array([np.log(p.predict(calibration) / p.measured) for p in points])

    groups = []
    for kind, labels in (
        ("implementation", [p.scenario.implementation.value for p in layers]),
        ("placement", [p.scenario.placement for p in layers]),
    ):
        values = sorted(set(labels))
        groups += [(f"{kind} {v}", np.array(labels) == v) for v in values] if len(values) > 1 else []
    if not groups:
        return []
    base = errors_at(center, layers)
    slopes = np.stack([(errors_at(center + 0.02 * unit, layers) - base) / 0.02 for unit in np.eye(len(names))], axis=1)
    found = []
    for what, out in groups:
        design = np.concatenate([slopes[~out], PULL * np.eye(len(names))])
        target = -np.concatenate([base[~out], PULL * (center - origin)])
        move, *_ = np.linalg.lstsq(design, target, rcond=None)
        unseen = [p for p, is_out in zip(layers, out, strict=True) if is_out]
        relative = np.expm1(errors_at(center + np.clip(move, -0.5, 0.5), unseen))
        largest = float(np.abs(relative).max())
        found.append(HeldOut(what, len(unseen), float(np.sqrt(np.mean(relative**2))), largest))
    return found
