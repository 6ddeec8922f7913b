"""What the simulator writes: every row simulated, with its calibration; tables and figures from the data alone; the command."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from inc_runtime.cli import main
from results.plot_simulated import FIGURES
from results.simulated_data import read_points
from results.simulated_tables import TABLES

RESULTS = Path(__file__).parents[2] / "results"


def data_of(question: str) -> Path:
    return next((RESULTS / "data").glob(f"simulated_layer_{question}_*.csv"))


@pytest.mark.parametrize("question", list(TABLES))
def test_a_question_has_data_a_table_and_a_figure_that_follow_from_it(question, tmp_path):
    data = data_of(question)
    for point in read_points(data):
        assert point.row["source"] == "simulated" and point.row["calibration"] and point.layer_time_us > 0
    table = (RESULTS / "tables" / f"{data.stem}.md").read_text()
    assert table == TABLES[question](data) and "source: simulated, calibration: published_h200 (published)" in table
    FIGURES[question](data, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert (RESULTS / "figures" / f"{data.stem}.png").exists()


def test_measured_rows_never_share_a_file_with_simulated_ones(tmp_path):
    text = data_of("two_level").read_text().replace("simulated_layer,simulated,", "simulated_layer,measured_gpu,", 1)
    (tmp_path / "mixed.csv").write_text(text)
    with pytest.raises(ValueError, match="never share a series"):
        read_points(tmp_path / "mixed.csv")


def test_simulate_prints_and_writes_its_source(tmp_path, capsys):
    (tmp_path / "layer.toml").write_text("[ranks]\nnum_ranks = 2\ntokens_per_rank = 64\n")
    out, trace = tmp_path / "out.csv", tmp_path / "trace.json"
    assert main(["simulate", str(tmp_path / "layer.toml"), "--output", str(out), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "source: simulated, calibration: published_h200 (published)" in printed and "rows_sent" in printed
    lines = [line for line in out.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert {row["source"] for row in rows} == {"simulated"} and {row["calibration"] for row in rows} == {"published_h200"}
    assert {"layer_time", "rows_sent", "switch_row_bytes"} <= {row["metric"] for row in rows}
    assert "matmul_gate_up" in trace.read_text()


def test_simulate_sweeps(capsys):
    arguments = [
        "simulate",
        "--mode",
        "fast",
        "--sweep",
        "ranks.num_ranks=2,4",
        "--sweep",
        "implementation.name=megakernel,megakernel_inc",
    ]
    assert main([*arguments, "--set", "network.port_gbps=100"]) == 0
    assert capsys.readouterr().out.count(" fast ") == 4


def test_simulate_refuses_with_one_message(capsys):
    assert main(["simulate", "--set", "network.port_gbps=0"]) == 2
    assert "port_gbps = 0" in capsys.readouterr().err
    assert main(["simulate", "--set", "ports"]) == 2
    assert "TABLE.KEY=VALUE" in capsys.readouterr().err


def test_simulate_teaches(capsys):
    assert main(["simulate", "--example"]) == 0
    assert "[network]" in capsys.readouterr().out
    assert main(["simulate", "--models"]) == 0
    assert "deepseek_v3" in capsys.readouterr().out
