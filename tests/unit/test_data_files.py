"""Damaged and foreign data files are refused by name; those that are committed are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from inc_runtime.simulator.measured import COLUMNS
from results.data_files import BadDataFile, read_data_file, read_folder
from results.measure_on_host import METRICS, data_rows, table
from results.provenance import header, write_data_file

ROOT = Path(__file__).resolve().parents[2]
NAME = "moe_layer_scale_model_abcdef1.csv"
GOOD = """\
# date: 2026-11-29
# device: 2 x NVIDIA H200; placement: scale_model, four ranks share a GPU
# commit: abcdef1
# command: torchrun measure
measurement,source,placement,implementation,num_ranks,num_tokens,microbatch_tokens,metric,value,unit
moe_layer,measured_gpu,scale_model,megakernel_inc,4,8192,1024,layer_time,7300.7,us
moe_layer,measured_gpu,scale_model,megakernel,4,8192,1024,layer_time,8304.0,us
"""


def write(folder: Path, text: str, name: str = NAME) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_says_where_its_numbers_come_from(tmp_path):
    file = read_data_file(write(tmp_path, GOOD))
    assert (file.measurement, file.placement, file.commit, file.part) == ("moe_layer", "scale_model", "abcdef1", "")
    assert file.provenance == "measured_gpu, placement scale_model, commit abcdef1, 2026-11-29, 2 x NVIDIA H200"
    assert read_data_file(write(tmp_path, GOOD, "moe_layer_scale_model_abcdef1_g2.csv")).part == "g2"


BAD = {
    "no header": (GOOD[GOOD.index("measurement") :], "no header"),
    "no date": (GOOD.replace("# date: 2026-11-29\n", ""), "lacks date"),
    "no command": (GOOD.replace("# command: torchrun measure\n", ""), "lacks command"),
    "another commit": (GOOD.replace("commit: abcdef1", "commit: 1234567"), "names the commit 1234567"),
    "another placement in the header": (GOOD.replace("placement: scale_model", "placement: native"), "placement scale_model"),
    "another placement in a row": (GOOD.replace("scale_model,megakernel,", "native,megakernel,"), "rows of placement native"),
    "simulated rows among measured": ("simulated".join(GOOD.rsplit("measured_gpu", 1)), "say source"),
    "all simulated": (GOOD.replace("measured_gpu", "simulated"), "say source simulated"),
    "rows of another measurement": (GOOD.replace("moe_layer,measured", "collectives,measured"), "rows of collectives"),
    "other columns": (GOOD.replace("measurement,source", "source,measurement"), "its columns are"),
    "not a number": (GOOD.replace("8304.0", "fast"), "line 7: value = 'fast'"),
    "infinite": (GOOD.replace("8304.0", "inf"), "not a number"),
    "a cell too few": (GOOD.replace(",layer_time,8304.0", ",8304.0"), "line 7 has 9 cells"),
    "cut off": (GOOD[:-5], "cut off"),
    "empty": ("", "empty"),
    "zero bytes": (GOOD + "\0\n", "zero bytes"),
    "no rows": (GOOD[: GOOD.index("moe_layer,")], "no rows"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_damaged_or_foreign_file_is_refused_by_name(tmp_path, what):
    text, problem = BAD[what]
    path = write(tmp_path, text)
    with pytest.raises(BadDataFile, match=rf"^{NAME} is refused: .*{problem}"):
        read_data_file(path)


@pytest.mark.parametrize("name", ["notes.txt", "moe_layer_abcdef1.csv", "moe_layer_moon_abcdef1.csv"])
def test_a_file_of_another_name_is_refused(tmp_path, name):
    files, refused = read_folder(write(tmp_path, GOOD, name).parent)
    assert not files and refused[0].startswith(f"{name} is refused: its name")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / NAME).write_bytes(b"\xff\xfe\x00")
    assert "not text" in read_folder(tmp_path)[1][0]


def test_every_committed_file_can_be_trusted():
    files, refused = read_folder(ROOT / "results" / "data")
    assert not refused and len(files) > 10


def test_the_demo_becomes_a_data_file_of_tokens_per_rank(tmp_path):
    fields = {"source": "measured_host", "placement": "host", "implementation": "megakernel_inc", "num_ranks": 4}
    demo = [fields | {"collective": "inc_all_to_all", "num_tokens": 256, **dict.fromkeys(METRICS, 2.0)}]
    notes = header(device="2 cores", placement="host", commit="abcdef1", command="inc demo", software="torch 2")
    path = tmp_path / "moe_layer_host_abcdef1.csv"
    write_data_file(path, notes, [*COLUMNS, "collective", "depth"], data_rows(demo))
    file = read_data_file(path)
    assert file.source == "measured_host" and {row["num_tokens"] for row in file.rows} == {"64"}
    assert {row["metric"] for row in file.rows} == {metric for metric, _ in METRICS.values()}
    assert "| megakernel_inc | inc_all_to_all | 2 | 2 |" in table(path) and "layer time" not in table(path)


def test_speed_ups_hold_rows_of_the_layer(tmp_path):
    file = read_data_file(write(tmp_path, GOOD, "speed_ups_scale_model_abcdef1_paced.csv"))
    assert (file.measurement, file.kind, file.part) == ("speed_ups", "moe_layer", "paced")
