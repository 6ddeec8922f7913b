"""Measured data files: which rows the calibration uses, the scenario of each, and predicted against measured."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

from inc_runtime.config import OLMOE_1B_7B, Implementation, LayerShape
from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.calibration import Calibration
from inc_runtime.simulator.fast_mode import simulate_fast
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import MODEL_OF, Forwarding, NetworkSpec, Scenario, SwitchKind

COLUMNS = (
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
)
MODELLED_PLACEMENTS = ("native", "scale_model", "shared", "simulated")
Row = dict[str, str]
Label = tuple[str, str, str, int, int | str, str, str]
"""What, placement, implementation, W, N or rows, m_b, metric."""


class Point(Protocol):
    """Something measured that a calibration predicts, in `unit`."""

    @property
    def measured(self) -> float: ...

    @property
    def unit(self) -> str: ...

    @property
    def label(self) -> Label: ...

    def predict(self, calibration: Calibration) -> float: ...


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Rows of long-format files; lines that begin with # are the header. Raises ConfigurationError that names file and line."""
    rows: list[Row] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}. Name the data files of measurements.") from None
        numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
        reader = csv.DictReader([line for _, line in numbered])
        missing = set(COLUMNS) - set(reader.fieldnames or ())
        if missing:
            raise ConfigurationError(f"{path}: columns {sorted(missing)} are missing. The columns are {', '.join(COLUMNS)}.")
        for (number, _), row in zip(numbered[1:], reader, strict=True):
            try:
                float(row["value"])
            except (TypeError, ValueError):
                raise ConfigurationError(f"{path}:{number}: value = {row['value']!r}: it must be a number.") from None
            rows.append(row | {"file": path.name})
    return rows


@dataclass(frozen=True)
class LayerPoint:
    """One measured layer: where, what, and how long, in us."""

    scenario: Scenario
    measured: float
    source: str
    file: str
    unit: str = "us"

    plural: ClassVar[str] = "layers"

    @property
    def label(self) -> Label:
        s = self.scenario
        where = "layer", s.placement, s.implementation.value, s.num_ranks, s.tokens_per_rank
        return *where, str(s.microbatch_tokens), "layer_time"

    def predict(self, calibration: Calibration) -> float:
        """Layer time in fast mode."""
        return simulate_fast(LayerPlan(self.scenario, calibration)).layer_time_us


def layer_points(rows: Iterable[Row]) -> list[LayerPoint]:
    """The `layer_time` rows that the simulator models: the five implementations, routed evenly, not on one_gpu or host."""
    known = {implementation.value for implementation in Implementation}
    points = []
    for row in rows:
        usable = row["metric"] == "layer_time" and row["implementation"] in known and row["placement"] in MODELLED_PLACEMENTS
        if not usable or row["source"] == "published" or (row.get("routing") or "uniform") != "uniform":
            continue
        scale = {"us": 1.0, "ms": 1e3, "s": 1e6}.get(row["unit"])
        if scale is None:
            raise ConfigurationError(f"{row['file']}: unit = {row['unit']} of a layer_time: it must be us, ms or s.")
        points.append(LayerPoint(scenario_of(row), float(row["value"]) * scale, row["source"], row["file"]))
    return points


def number_of(row: Row, name: str, default: int) -> int:
    """A whole number of a row, or the default where the file lacks it."""
    text = row.get(name)
    return int(float(text)) if text else default


def shape_of_row(row: Row) -> LayerShape:
    """The shape of a row; what the file lacks is OLMoE's."""
    olmoe = OLMOE_1B_7B
    return LayerShape(
        number_of(row, "num_experts", olmoe.num_experts),
        number_of(row, "top_k", olmoe.top_k),
        number_of(row, "hidden", number_of(row, "hidden_size", olmoe.hidden_size)),
        number_of(row, "intermediate", number_of(row, "intermediate_size", olmoe.intermediate_size)),
    )


def network_of(row: Row) -> NetworkSpec:
    """The network of a measured row: the switches of an INC form are PEs that store and forward.

    The relay of a plain form forwards each packet as it lands, and its device has a port for every rank's share, so that it is
    modelled as a real switch, in one step. Without relays the rows of a rank's own experts stay where they are.
    """
    implementation, placement = Implementation(row["implementation"]), row["placement"]
    inc = MODEL_OF[implementation].in_network
    stays = not inc and placement == "native"
    return NetworkSpec(
        switch=SwitchKind.EMULATED if inc and placement != "simulated" else SwitchKind.REAL,
        forwarding=Forwarding.STORE_AND_FORWARD,
        planes=number_of(row, "planes", 1) if inc else 1,
        dual_role=row.get("dual_role", "") in ("1", "true", "True"),
        local_bypass=stays or row.get("local_bypass", "") in ("1", "true", "True"),
    )


def _cut_beside_the_baseline(tokens: int) -> tuple[int, int, int]:
    """m_b, edge and depth of a megakernel measured by `measure_moe_layer.py`, whose rows name those of the Baseline.

    As `results/megakernel_plug.py` cuts it.
    """
    return min(tokens, max(1024, min(tokens // 2, 2048))), 0, 4


def scenario_of(row: Row) -> Scenario:
    """The scenario of a measured row; columns that the file lacks take the OLMoE layer and the default pipeline."""
    base = Scenario()
    tokens, port = number_of(row, "num_tokens", base.tokens_per_rank), row.get("rank_port_gbps")
    size, depth, edge = number_of(row, "microbatch_tokens", tokens), number_of(row, "depth", base.depth), 0
    if Implementation(row["implementation"]) is not Implementation.BASELINE:
        edge = number_of(row, "edge_tokens", 0)
        if row["placement"] == "native" and not row.get("depth"):
            size, edge, depth = _cut_beside_the_baseline(tokens)
    scenario = Scenario(
        name=row["file"],
        shape=shape_of_row(row),
        num_ranks=number_of(row, "num_ranks", base.num_ranks),
        implementation=Implementation(row["implementation"]),
        tokens_per_rank=tokens,
        microbatch_tokens=min(tokens, size),
        edge_tokens=edge,
        depth=depth,
        ranks_per_phase=number_of(row, "ranks_per_phase", 1),
        network=replace(network_of(row), port_gbps=float(port) if port and float(port) else None),
        placement=row["placement"],
    )
    scenario.check()
    return scenario


@dataclass(frozen=True)
class Prediction:
    """A line of the table of predicted against measured. `fitted`: the fit has seen this point."""

    point: Point
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.point.measured - 1


def predictions(points: Sequence[Point], calibration: Calibration, fitted: Sequence[Point]) -> list[Prediction]:
    """Predict every point; `fitted` are those that the fit has seen."""
    seen = set(fitted)
    return [Prediction(p, p.predict(calibration), p in seen) for p in points]


@dataclass(frozen=True)
class HeldOut:
    """How well a fit without one implementation, or one placement, predicts its layers. Errors are relative.

    `note`: what is left out with it that nothing else shows.
    """

    what: str
    num_points: int
    rms_error: float
    max_error: float
    note: str = ""


def prediction_table(lines: Sequence[Prediction], calibration: Calibration, held_out: Sequence[HeldOut]) -> str:
    """Predicted against measured as Markdown: the layers, what fits that have not seen them make of them, and the parts."""
    out = ["# Predicted against measured", "", f"Predicted: source: simulated, calibration: {calibration.name}; fitted to:", ""]
    out += [f"- {name}" for name in calibration.data_files]
    layers = [line for line in lines if isinstance(line.point, LayerPoint)]
    if layers:
        out += ["", "## Layers", "", *_lines(layers)]
    else:
        out += ["", "No layer time has been measured yet: nothing here says how well a layer is predicted."]
    if held_out:
        out += ["", "## Layers that a fit has not seen", ""]
        out += ["Each from a fit of its own, without any row of that implementation or placement, its parts included.", ""]
        out += ["| held out | points | rms error | largest error | |", "|---|---|---|---|---|"]
        rates = [(h, f"{100 * h.rms_error:.1f} % | {100 * h.max_error:.1f} %") for h in held_out]
        out += [f"| {h.what} | {h.num_points} | {rate} | {h.note} |" for h, rate in rates]
    parts = [line for line in lines if not isinstance(line.point, LayerPoint)]
    if parts:
        out += ["", "## Parts: products, stages of the Baseline, collectives alone", "", *_lines(parts)]
    return "\n".join(out) + "\n"


def _lines(lines: Sequence[Prediction]) -> list[str]:
    """A table of predictions. `seen`: by the fit."""
    columns = ("what", "placement", "implementation", "W", "N or rows", "m_b", "metric", "measured", "predicted", "error", "seen")
    out = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for line in lines:
        label = " | ".join(str(part) for part in line.point.label)
        values = f"{line.point.measured:.4g} {line.point.unit} | {line.predicted:.4g} | {100 * line.error:+.1f} %"
        out.append(f"| {label} | {values} | {'yes' if line.fitted else 'no'} |")
    return out
