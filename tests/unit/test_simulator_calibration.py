"""The fit: parts from committed data, whole layers from synthetic data, and points that the fit has not seen."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.calibration import Calibration, load_calibration, save_calibration
from inc_runtime.simulator.fit import calibrate, fit_parts
from inc_runtime.simulator.measured import COLUMNS, layer_points, predictions, read_rows
from inc_runtime.simulator.parts import exchange_points, product_points

DATA = Path(__file__).parents[2] / "results" / "data"
TRUTH = replace(
    load_calibration(),
    matrix_tflops=610.0,
    port_gbps=290.0,
    latency_us=2.2,
    vector_overhead_us=3.5,
    matrix_overhead_us=5.0,
    vector_efficiency=0.7,
    launch_us=9.0,
)


def write_layers(path: Path, truth: Calibration, cases, noise: float = 0.02) -> None:
    """Layer times that `truth` predicts, with seeded noise, as a data file of measurements."""
    rng = np.random.default_rng(0)
    with open(path, "w", newline="") as file:
        file.write("# device: none; synthetic\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for placement, implementation, tokens, microbatch in cases:
            values = (
                "moe_layer",
                "measured_gpu",
                placement,
                implementation,
                "4",
                str(tokens),
                str(microbatch),
                "layer_time",
                "1",
                "us",
            )
            row = dict(zip(COLUMNS, values, strict=True))
            time = layer_points([row | {"file": path.name}])[0].predict(truth)
            writer.writerow(row | {"value": time * (1 + noise * rng.standard_normal())})


def grid(placement: str, implementations) -> list[tuple[str, str, int, int]]:
    return [
        (placement, implementation, tokens, min(microbatch, tokens))
        for implementation in implementations
        for tokens in (1024, 4096)
        for microbatch in (256, 1024)
        if implementation != "baseline" or microbatch == 256
    ]


def test_the_published_calibration_is_what_its_data_give():
    start = Calibration("start", "published", 1.0, 300.0, 600.0, 4.0)
    committed = load_calibration()
    fitted, errors = fit_parts(read_rows([DATA / name for name in committed.data_files]), start)
    for name in ("latency_us", "port_gbps", "matrix_tflops", "memory_tbps", "launch_us", "vector_overhead_us"):
        assert getattr(fitted, name) == pytest.approx(getattr(committed, name), rel=1e-6), name
    assert errors["matmul_rms_error"] < 0.05
    assert committed.source == "published"


def test_a_fit_reaches_the_points_it_saw_and_an_implementation_it_did_not(tmp_path):
    cases = grid("scale_model", ("baseline", "megakernel", "megakernel_inc"))
    write_layers(tmp_path / "layers.csv", TRUTH, cases)
    fit = calibrate([tmp_path / "layers.csv"], "test", load_calibration(), unseen_implementation="megakernel_inc")
    errors = fit.calibration.fit
    assert {line.point.scenario.implementation.value for line in fit.lines if not line.fitted} == {"megakernel_inc"}
    assert errors["fitted_max_error"] < 0.10 and errors["unseen_max_error"] < 0.15
    assert fit.calibration.source == "measured_gpu" and fit.calibration.data_files == ("layers.csv",)
    assert [held.what for held in fit.held_out] == [f"implementation {x}" for x in ("baseline", "megakernel", "megakernel_inc")]
    assert "| implementation megakernel_inc | 4 |" in fit.table


@pytest.mark.parametrize("unseen", ["native", "shared"])
def test_a_fit_predicts_a_placement_it_has_not_seen(unseen, tmp_path):
    cases = grid("scale_model", ("baseline", "megakernel_inc_phased")) + grid(unseen, ("megakernel_inc_phased",))
    write_layers(tmp_path / "layers.csv", TRUTH, cases)
    fit = calibrate([tmp_path / "layers.csv"], "test", load_calibration(), unseen_placement=unseen)
    errors = fit.calibration.fit
    assert {line.point.label[1] for line in fit.lines if line.fitted} == {"scale_model"}
    assert errors["fitted_max_error"] < 0.10 and errors["unseen_max_error"] < 0.15
    assert "source: simulated, calibration: test" in fit.table and "| no |" in fit.table and "| yes |" in fit.table
    assert f"| placement {unseen} |" in fit.table


def test_the_committed_table_is_what_the_committed_calibration_predicts():
    """The fit itself takes minutes: `make calibrate`."""
    committed = load_calibration(Path("two_h200"))
    rows = read_rows([DATA / name for name in committed.data_files])
    table = (DATA.parent / "tables" / "predicted.md").read_text()
    assert "calibration: two_h200" in table and all(f"- {name}" in table for name in committed.data_files)
    points = [*product_points(rows), *exchange_points(rows)]
    for line in predictions(points, committed, []):
        label = " | ".join(str(part) for part in line.point.label)
        assert f"| {label} | {line.point.measured:.4g} {line.point.unit} | {line.predicted:.4g} |" in table
    assert {p.label for p in layer_points(rows)} <= {tuple_of(line) for line in table.splitlines() if line.startswith("| layer ")}


def tuple_of(line: str) -> tuple:
    """The label of a line of the table."""
    what, placement, implementation, ranks, tokens, size, metric = [part.strip() for part in line.split("|")[1:8]]
    return what, placement, implementation, int(ranks), int(tokens), size, metric


def test_without_the_fit_the_predictions_are_off(tmp_path):
    write_layers(tmp_path / "layers.csv", TRUTH, grid("scale_model", ("baseline", "megakernel_inc")))
    points = layer_points(read_rows([tmp_path / "layers.csv"]))
    errors = [abs(line.error) for line in predictions(points, load_calibration(), [])]
    assert max(errors) > 0.15


def test_a_calibration_file_is_read_back_and_refused_when_wrong(tmp_path):
    save_calibration(TRUTH, tmp_path / "c.json")
    assert load_calibration(tmp_path / "c.json") == TRUTH
    (tmp_path / "c.json").write_text('{"name": "x", "speed": 3}')
    with pytest.raises(ConfigurationError, match=r"unknown fields .'speed'"):
        load_calibration(tmp_path / "c.json")
    save_calibration(replace(TRUTH, port_gbps=0.0), tmp_path / "c.json")
    with pytest.raises(ConfigurationError, match=r"port_gbps = 0\.0"):
        load_calibration(tmp_path / "c.json")
    with pytest.raises(ConfigurationError, match="--calibrate"):
        load_calibration(tmp_path / "none.json")


def test_a_data_file_is_refused_with_its_line(tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text("# header\n" + ",".join(COLUMNS) + "\nmoe_layer,measured_gpu,native,baseline,4,64,64,layer_time,soon,us\n")
    with pytest.raises(ConfigurationError, match=r"layers\.csv:3: value = 'soon'"):
        read_rows([path])
    path.write_text("measurement,value\nmoe_layer,3\n")
    with pytest.raises(ConfigurationError, match="missing"):
        read_rows([path])
