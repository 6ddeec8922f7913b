"""Tables of the measured layer are functions of their data file; they refuse what was not measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from inc_runtime.config import CommunicationModel
from inc_runtime.protocol import World
from megakernel.workload import Routing
from results.layer_cases import Case
from results.layer_tables import COLUMNS, by_case, read_rows, redraw, table
from results.megakernel_plug import layout_of

ROW = {"source": "measured_gpu", "implementation": "baseline", "num_tokens": "1024", "shape": "olmoe", "routing": "uniform"}


def data_file(folder: Path, *rows: dict[str, str]) -> Path:
    lines = ["# date: today", "# device: 2 x some GPU", ",".join(COLUMNS)]
    lines += [",".join({**ROW, **row}.get(name, "") for name in COLUMNS) for row in rows]
    path = folder / "moe_layer_native_x.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_layer_is_shown_with_its_ratio_to_the_products_alone(tmp_path):
    time = {"metric": "layer_time", "unit": "us"}
    path = data_file(tmp_path, {**time, "value": "375"}, {**time, "implementation": "grouped_mm", "value": "250"})
    assert "| 1,024 | 0.250 | 0.375 (1.50) |" in table(path)
    assert by_case(read_rows(path)[1], "layer_time") == {
        ("olmoe", "uniform"): {"baseline": {1024: 375.0}, "grouped_mm": {1024: 250.0}}
    }


def test_the_table_counts_the_round_trips_of_each_implementation(tmp_path):
    text = table(data_file(tmp_path))
    for name, count in (("baseline", 10), ("megakernel", 7), ("megakernel_inc", 5)):
        assert f"| {name} | {count} |" in text


def test_simulated_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="never share a table"):
        read_rows(data_file(tmp_path, {"source": "simulated"}))


@pytest.mark.parametrize("path", sorted(Path("results/data").glob("moe_layer_native_*.csv")), ids=lambda path: path.stem)
def test_tables_in_the_repository_are_those_of_their_data(path, tmp_path):
    redraw(path, tmp_path)
    seen = Path("results/tables") / f"{path.stem}.md"
    assert seen.read_text() == (tmp_path / "tables" / seen.name).read_text()
    assert (tmp_path / "figures" / f"{path.stem}.png").stat().st_size > 0


def test_the_heap_of_a_measured_layer_does_not_grow_with_its_tokens():
    world = World(2, 0, 0)
    layouts = [layout_of(Case("olmoe", n, Routing.UNIFORM), world, CommunicationModel.ALL_TO_ALL) for n in (8192, 65536)]
    assert layouts[0].heap_bytes == layouts[1].heap_bytes
