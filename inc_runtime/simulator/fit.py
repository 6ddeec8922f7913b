"""Fit a calibration to data files: stage costs and links by linear least squares, then all of them to whole layers.

1. Parts: `stage_time` of the MatMuls gives the rate and the launch (t = launch + FLOPs / rate); `copy_peak`, `signal_latency`,
   `memory_bandwidth` and `stage_overhead` give their mean.
2. Layers: `layer_time` points move every parameter in its logarithm, by Levenberg and Marquardt's method on the logarithm of
   predicted over measured, with a weak pull to the values of step 1, so that what the layers cannot tell stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.calibration import Calibration
from inc_runtime.simulator.event_mode import RolePrograms
from inc_runtime.simulator.measured import MODELLED_PLACEMENTS, LayerPoint, Row, layer_points, predict, predictions, read_rows

FITTED = (
    "matrix_tflops",
    "memory_tbps",
    "vector_efficiency",
    "matrix_overhead_us",
    "vector_overhead_us",
    "launch_us",
    "latency_us",
    "port_gbps",
)
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
    times = [row for row in rows if row["metric"] == "stage_time" and row.get("stage", "").startswith("matmul")]
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


def _fit_expert_products(rows: Sequence[Row], start: Calibration, changes: dict[str, float], errors: dict[str, float]) -> None:
    """Our own kernel for both products, alone on all SMs: t = o + FLOPs / rate, where the weights are not the limit.

    Its o holds the launch and the last, partly filled wave of tiles, so that it bounds that of a persistent kernel from above.
    """
    memory = changes.get("memory_tbps", start.memory_tbps)
    flops, measured = [], []
    for row in rows:
        ours = row["metric"] == "stage_time" and row["implementation"] == "expert_matmul" and row.get("distribution") == "uniform"
        if not ours or int(row.get("num_sms") or 0) != start.total_sms:
            continue
        weights = 3 * float(row["hidden"]) * float(row["intermediate"])
        work = 2 * weights * float(row["num_rows"])
        if work / (start.matrix_tflops * 1e6) > 2 * weights * float(row["num_experts"]) / (memory * 1e6):
            flops.append(work)
            measured.append(float(row["value"]))
    if len(flops) < 2:
        return
    times = np.array(measured)
    design = np.stack([np.ones_like(times), np.array(flops) / 1e6], axis=1) / times[:, None]
    (overhead, per_tflop), *_ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
    changes |= {"matrix_tflops": 1.0 / float(per_tflop), "matrix_overhead_us": max(0.1, float(overhead))}
    errors["expert_products_rms_error"] = float(np.sqrt(np.mean((design @ [overhead, per_tflop] - 1) ** 2)))


def _matmul_flops(row: Row) -> float:
    """FLOPs of one grouped MatMul of `rows` rows; gate and up are one product."""
    size = float(row["hidden_size"]) * float(row["intermediate_size"])
    return 2 * float(row["rows"]) * size * (2 if row["stage"] == "matmul_gate_up" else 1)


def fit_layers(
    points: Sequence[LayerPoint],
    start: Calibration,
    programs: RolePrograms | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Calibration:
    """Step 2: the calibration whose predictions are nearest to the points."""
    names = [name for name in FITTED if getattr(start, name) > 0]
    origin = np.log([getattr(start, name) for name in names])

    def at(logs: np.ndarray) -> Calibration:
        return replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def residuals(logs: np.ndarray) -> np.ndarray:
        calibration = at(logs)
        errors = [np.log(predict(p.scenario, calibration, programs) / p.measured_us) for p in points]
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
        if not improved or gain < 1e-3:
            break
    return at(logs)


def calibrate(
    paths: Sequence[Path],
    name: str,
    start: Calibration,
    *,
    unseen_implementation: str | None = None,
    unseen_placement: str | None = None,
    programs: RolePrograms | None = None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Calibration, list[LayerPoint], list[LayerPoint]]:
    """Fit to data files. Points of the unseen implementation or placement are kept out, to judge the fit by.

    Returns the calibration, all points and the fitted ones.
    """
    rows = read_rows(paths)
    calibration, errors = fit_parts(rows, start)
    points = layer_points(rows)
    fitted = [
        p for p in points if p.scenario.implementation.value != unseen_implementation and p.scenario.placement != unseen_placement
    ]
    sources = sorted({row["source"] for row in rows})
    if fitted:
        calibration = fit_layers(fitted, calibration, programs, progress)
        lines = predictions(points, calibration, fitted, programs)
        for kind, group in (("fitted", [x for x in lines if x.fitted]), ("unseen", [x for x in lines if not x.fitted])):
            if group:
                relative = np.array([line.error for line in group])
                errors[f"{kind}_points"] = len(group)
                errors[f"{kind}_rms_error"] = float(np.sqrt(np.mean(relative**2)))
                errors[f"{kind}_max_error"] = float(np.abs(relative).max())
    names = tuple(path.name for path in paths)
    return replace(calibration, name=name, source="+".join(sources), fit=dict(errors), data_files=names), points, fitted
