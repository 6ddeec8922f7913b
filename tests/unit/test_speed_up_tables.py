"""The table of speed-ups takes the best cut of each implementation, and only measured rows; every point is measured."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest

from inc_runtime.config import Implementation
from results.measure_speed_ups import points
from results.speed_up_tables import COLUMNS, best, redraw, table

TIMES = {
    ("baseline", 1024, 1024, ""): 900.0,
    ("megakernel", 1024, 512, ""): 600.0,
    ("megakernel", 1024, 256, ""): 500.0,
    ("megakernel_inc_phased", 1024, 512, "2"): 450.0,
    ("megakernel_inc", 1024, 512, ""): 400.0,
    ("grouped_mm", 1024, 1024, ""): 320.0,
}


def data_file(folder: Path, source: str = "measured_gpu") -> Path:
    path = folder / "speed_ups_scale_model_test.csv"
    with path.open("w", newline="") as file:
        file.write("# date: 2026-11-29\n# device: none, a test\n")
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for (name, tokens, microbatch, group), value in TIMES.items():
            row = {"source": source, "implementation": name, "num_tokens": tokens, "microbatch_tokens": microbatch}
            writer.writerow(row | {"ranks_per_phase": group, "metric": "layer_time", "value": value, "unit": "us"})
    return path


def test_speed_ups_are_ratios_of_the_best_cuts(tmp_path: Path) -> None:
    text = table(data_file(tmp_path))
    assert "| megakernel | 0.500 (m_b 256) |" in text
    assert "| Baseline to MegaKernel | 1.80 |" in text
    assert "| MegaKernel to MegaKernel INC Phased | 1.11 |" in text
    assert "| MegaKernel INC Phased to MegaKernel INC | 1.12 |" in text
    assert "| megakernel_inc | 1.25 |" in text, "times grouped_mm alone"
    assert "| megakernel_phased |  |" in text, "what was not measured stays empty"


def test_the_figure_and_the_table_are_written_beside_each_other(tmp_path: Path) -> None:
    redraw(data_file(tmp_path), tmp_path)
    assert (tmp_path / "figures" / "speed_ups_scale_model_test.png").stat().st_size > 10_000
    assert (tmp_path / "tables" / "speed_ups_scale_model_test.md").exists()


def test_simulated_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="simulated"):
        table(data_file(tmp_path, "simulated"))


def test_of_two_rows_of_one_implementation_the_shorter_counts() -> None:
    rows = [{"implementation": "megakernel", "num_tokens": "8", "metric": "layer_time", "value": v} for v in ("3", "2", "4")]
    assert best(rows)["megakernel", 8]["value"] == "2"


def test_rows_with_local_bypass_are_a_series_of_their_own(tmp_path: Path) -> None:
    path = data_file(tmp_path)
    with path.open("a", newline="") as file:
        for name, value in (("megakernel", 300.0), ("megakernel_inc", 200.0)):
            row = {"source": "measured_gpu", "implementation": name, "num_tokens": 1024, "microbatch_tokens": 512}
            row |= {"metric": "layer_time", "value": value, "unit": "us", "local_bypass": "1"}
            csv.DictWriter(file, COLUMNS, restval="").writerow(row)
    text = table(path)
    assert "| megakernel | 0.500 (m_b 256) |" in text and "| megakernel, local bypass | 0.300 (m_b 512) |" in text
    assert "| Baseline to MegaKernel | 1.80 |" in text and "| Baseline to MegaKernel, local bypass |  |" in text


def test_every_implementation_is_measured_at_every_size_and_cut() -> None:
    options = argparse.Namespace(tokens=[1024, 65536], microbatches=[256, 1024, 2048], groups=[1, 2], edges=[0, 256], depth=4)
    options.local_bypass = False
    found = points(options)
    assert {point.implementation for point in found} == set(Implementation)
    keys = [point.key for point in found]
    assert len(set(keys)) == len(keys)
    assert ("megakernel_inc_phased", "65536", "2048", "2", "256", "") in keys
    assert ("megakernel", "1024", "256", "", "", "") in keys
    assert not [key for key in keys if key[1:3] in (("1024", "2048"), ("65536", "256"))], "beyond the batch, or 256 of them"
