"""The fit: parts from committed data, whole layers from synthetic data, and points that the fit has not seen."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.calibration import Calibration, load_calibration, save_calibration
from inc_runtime.simulator.fit import UNFUSED, Points, calibrate, fit_means, fit_points, rows_without
from inc_runtime.simulator.measured import COLUMNS, layer_points, predictions, read_rows

DATA = Path(__file__).parents[2] / "results" / "data"
TRUTH = replace(
    load_calibration(),
    matrix_tflops=610.0,
    port_gbps=290.0,
    latency_us=2.2,
    vector_overhead_us=3.5,
    matrix_overhead_us=5.0,
    fused_vector_efficiency=0.7,
    interference=0.4,
    fused_rate=0.8,
    communication_sms=0,
)
ROOT = Path(__file__).parents[2]


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
    committed = load_calibration()
    rows = read_rows([DATA / name for name in committed.data_files])
    fitted = fit_means(rows, replace(committed, latency_us=9.0, port_gbps=9.0, memory_tbps=9.0, vector_overhead_us=9.0))
    for name in ("latency_us", "port_gbps", "memory_tbps", "vector_overhead_us", "matrix_overhead_us"):
        assert getattr(fitted, name) == pytest.approx(getattr(committed, name), rel=1e-6), name
    points = Points.of(rows)
    fitted = fit_points(points.unfused, replace(fitted, matrix_tflops=600.0), UNFUSED)
    assert fitted.matrix_tflops == pytest.approx(committed.matrix_tflops, rel=0.01)
    assert max(abs(line.error) for line in predictions(points.unfused, committed, [])) < 0.05
    assert committed.source == "published"


def test_what_a_machine_can_reach_is_measured_before_published_and_never_on_one_gpu():
    rows = read_rows(sorted(DATA.glob("machine_figures_*.csv")) + sorted(DATA.glob("*_native_e57833e.csv")))
    means = fit_means(rows, TRUTH)
    assert (means.memory_tbps, means.launch_us, means.port_gbps) == pytest.approx((4.24578, 4.96, 385.488))
    one_gpu = read_rows(sorted(DATA.glob("collectives_one_gpu_*.csv")))
    assert fit_means(one_gpu, TRUTH) == TRUTH


def test_a_fit_without_an_implementation_or_a_placement_sees_no_row_of_it():
    rows = read_rows(sorted(DATA.glob("*_native_e57833e.csv")) + sorted(DATA.glob("collectives_*.csv")))
    without = rows_without(rows, implementation="baseline")
    kept = {row["metric"] for row in without if row["implementation"] == "baseline"}
    assert kept <= {"copy_peak", "link_peak", "launch"}
    assert {row["implementation"] for row in rows_without(rows, implementation="megakernel_inc")} >= {"megakernel", "baseline"}
    assert {row["placement"] for row in rows_without(rows, placement="scale_model")} == {"native", "one_gpu"}


def test_rows_of_speed_ups_and_of_plugs_give_the_cut_that_was_measured():
    base = dict.fromkeys(COLUMNS, "") | {"implementation": "megakernel_inc", "placement": "scale_model", "file": "x.csv"}
    base |= {"measurement": "moe_layer", "source": "measured_gpu", "num_ranks": "4", "metric": "layer_time", "value": "9"}
    base |= {"num_tokens": "8192", "microbatch_tokens": "1024", "unit": "us"}
    speed_up = base | {"depth": "4", "edge_tokens": "256", "rank_port_gbps": "23"}
    plug = base | {"placement": "native", "implementation": "megakernel", "num_ranks": "2", "microbatch_tokens": "8192"}
    first, second = (point.scenario for point in layer_points([speed_up, plug]))
    assert (first.pipeline.microbatch_tokens, first.pipeline.edge_tokens, first.depth) == (1024, 256, 4)
    assert first.pipeline.num_microbatches == 11 and first.network.port_gbps == 23
    assert (second.microbatch_tokens, second.edge_tokens, second.depth, second.network.local_bypass) == (2048, 256, 4, True)


def test_make_calibrate_reads_every_kind_of_measured_file():
    listed = (ROOT / "Makefile").read_text()
    for kind in ("machine_figures", "expert_matmul", "collectives", "moe_layer", "speed_ups"):
        assert f"results/data/{kind}_*.csv" in listed


def test_a_fit_reaches_the_points_it_saw_and_an_implementation_it_did_not(tmp_path):
    cases = grid("scale_model", ("baseline", "megakernel", "megakernel_inc"))
    write_layers(tmp_path / "layers.csv", TRUTH, cases)
    fit = calibrate([tmp_path / "layers.csv"], "test", load_calibration(), unseen_implementation="megakernel_inc")
    errors = fit.calibration.fit
    assert {line.point.scenario.implementation.value for line in fit.lines if not line.fitted} == {"megakernel_inc"}
    assert errors["fitted_layers_max_error"] < 0.10 and errors["unseen_layers_max_error"] < 0.15
    assert fit.calibration.source == "measured_gpu" and fit.calibration.data_files == ("layers.csv",)
    assert [held.what for held in fit.held_out] == [f"implementation {x}" for x in ("baseline", "megakernel", "megakernel_inc")]
    assert "| implementation megakernel_inc | 4 |" in fit.table


@pytest.mark.parametrize("unseen", ["native", "shared"])
def test_a_fit_predicts_a_placement_it_has_not_seen(unseen, tmp_path):
    cases = grid("scale_model", ("baseline", "megakernel_inc_phased")) + grid(unseen, ("megakernel_inc_phased",))
    write_layers(tmp_path / "layers.csv", TRUTH, cases)
    fit = calibrate([tmp_path / "layers.csv"], "test", load_calibration(), unseen_placement=unseen, held_out=False)
    errors = fit.calibration.fit
    assert {line.point.label[1] for line in fit.lines if line.fitted} == {"scale_model"}
    assert errors["fitted_layers_max_error"] < 0.10 and errors["unseen_layers_max_error"] < 0.15
    assert "source: simulated, calibration: test" in fit.table and "| no |" in fit.table and "| yes |" in fit.table


def test_the_committed_table_is_what_the_committed_calibration_predicts():
    """The fit itself takes minutes: `make calibrate`."""
    committed = load_calibration(Path("two_h200"))
    rows = read_rows([DATA / name for name in committed.data_files])
    table = (DATA.parent / "tables" / "predicted.md").read_text()
    assert "calibration: two_h200" in table and all(f"- {name}" in table for name in committed.data_files)
    points = Points.of(rows)
    for line in predictions([*points.products, *points.stages, *points.alone], committed, []):
        label = " | ".join(str(part) for part in line.point.label)
        assert f"| {label} | {line.point.measured:.4g} {line.point.unit} | {line.predicted:.4g} |" in table
    assert {p.label for p in points.layers} <= {tuple_of(line) for line in table.splitlines() if line.startswith("| layer ")}


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
