"""The page holds every figure, table and source, needs nothing but itself, and never mixes what must stay apart."""

from __future__ import annotations

import base64
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from results.data_files import DataFile, read_data_file, read_folder
from results.reproduce.page import Standing, write_page
from results.reproduce.post import Line, facts, our_lines, post_lines, read_post
from results.reproduce.repeat import compare
from results.reproduce.runner import Places
from results.reproduce.state import Key, State
from results.reproduce.steps import NO_STEP, STEPS, Missing

RESULTS = Path(__file__).resolve().parents[2] / "results"
COLUMNS = "measurement,source,placement,implementation,num_ranks,num_tokens,microbatch_tokens,metric,value,unit"


def data_file(folder: Path, rows: str, *, commit="abcdef1", placement="scale_model", part="", more="") -> DataFile:
    """A checked file of layer times; `rows`: implementation,W,N,m_b,value and further cells, a line each."""
    source = "measured_host" if placement == "host" else "measured_gpu"
    lines = [f"# date: 2026-11-29; device: 2 x NVIDIA H200; placement: {placement}", f"# commit: {commit}", "# command: x"]
    lines.append(COLUMNS + (f",{more}" if more else ""))
    for line in rows.split():
        name, ranks, tokens, microbatch, value, *cells = line.split(",")
        fixed = ["moe_layer", source, placement, name, ranks, tokens, microbatch, "layer_time", value, "us"]
        lines.append(",".join([*fixed, *cells]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"moe_layer_{placement}_{commit}{f'_{part}' if part else ''}.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_data_file(path)


@pytest.fixture
def places(tmp_path):
    """Results with two measured files, a simulated one, a timeline and a figure of data that are not there."""
    places = Places(tmp_path / "out")
    for pattern in ("data/*scale_model_*.csv", "figures/*scale_model*.png", "*/simulated_layer_price_of_phases_*"):
        for path in RESULTS.glob(pattern):
            (places.output / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, places.output / path.parent.name / path.name)
    (places.output / "figures" / "moe_layer_native_1234567.png").write_bytes(b"of nothing")
    return places


def standing(places: Places) -> Standing:
    state = State(places.run / "state.json", Key("abcdef1", "", "no GPU; 2 cores of x86_64"))
    lacking = {step.name: Missing("It needs 2 GPUs.", "Use a machine with GPUs.") for step in STEPS[1:]}
    return Standing(STEPS, lacking, set(), state)


def test_the_page_holds_every_figure_and_names_every_source(places):
    path, refused = write_page(places, standing(places))
    text = path.read_text(encoding="utf-8")
    files, _ = read_folder(places.data)
    kinds = {file.measurement for file in files}
    assert not refused and kinds >= {"moe_layer", "collectives", "stage_timeline", "simulated_layer"}
    for figure in (places.output / "figures").glob("*.png"):
        embedded = base64.b64encode(figure.read_bytes()).decode() in text
        assert embedded != figure.name.startswith("moe_layer_native"), figure.name
    assert "Not shown, because their data are not here or were refused: moe_layer_native_1234567.png" in text
    for file in files:
        assert f"{file.path.name}: {file.provenance}, {len(file.rows)} rows" in text
    assert "published, placement native" in text and "calibration published_h200" in text
    assert "Price of phases against G" in text
    for what, why in NO_STEP:
        assert re.sub("'", "&#x27;", what) in text and why in text
    assert "It needs 2 GPUs." in text and "Use a machine with GPUs." in text
    assert not re.search(r"<(script|link|iframe)|(src|href)=\"(?!data:)", text), "it needs nothing but itself"


def test_missing_figures_are_drawn_from_their_data(places):
    for figure in (places.output / "figures").glob("*.png"):
        figure.unlink()
    write_page(places, standing(places))
    drawn = {path.stem for path in (places.output / "figures").glob("*.png")}
    assert {"moe_layer_scale_model_aa2d9dc", "stage_timeline_scale_model_aa2d9dc"} <= drawn
    assert any(stem.startswith("simulated_layer_price_of_phases") for stem in drawn)


def test_a_refused_file_is_named_on_the_page_and_none_of_its_numbers_is_used(places):
    path = places.data / "moe_layer_scale_model_d884984.csv"
    path.write_text(path.read_text().replace("measured_gpu,scale_model,megakernel,", "simulated,scale_model,megakernel,"))
    page, refused = write_page(places, standing(places))
    text = page.read_text(encoding="utf-8")
    assert len(refused) == 1 and refused[0].startswith(path.name) and "Refused data files" in text
    assert "8304.0" not in text and f"{path.name} is refused" in text


def test_numbers_are_escaped(places):
    path = places.data / "moe_layer_scale_model_d884984.csv"
    path.write_text(path.read_text().replace("# commit", "# <b>note</b>\n# commit"))
    page, _ = write_page(places, standing(places))
    assert "<b>note" not in page.read_text(encoding="utf-8")


def ratios(lines: list[Line], pair: tuple[str, str]) -> list[tuple[str, dict[int, float]]]:
    return [(line.origin, {n: round(value, 3) for n, value in line.values.items()}) for line in lines if line.pair == pair]


PLAIN_AND_INC = ("megakernel", "megakernel_inc")


def test_a_speed_up_divides_the_best_microbatch_of_each_in_one_origin(tmp_path):
    one = data_file(tmp_path, "megakernel,4,8192,1024,900 megakernel,4,8192,2048,800 megakernel_inc,4,8192,1024,400")
    other = data_file(tmp_path, "megakernel_inc,4,8192,1024,100", commit="1234567")
    native = data_file(tmp_path, "megakernel_inc,4,8192,1024,50", placement="native")
    ((origin, values),) = ratios(our_lines([one, other, native]), PLAIN_AND_INC)
    assert values == {8192: 2.0} and origin == f"{one.provenance} (moe_layer_scale_model_abcdef1), W = 4"


def test_times_of_processes_paced_ports_and_other_numbers_of_ranks_are_never_divided(tmp_path):
    host = data_file(tmp_path, "megakernel,4,64,16,3 megakernel_inc,4,64,16,2", placement="host")
    rows = "megakernel,4,64,16,3,92.5 megakernel_inc,4,64,16,2, megakernel_inc,2,64,16,1,92.5"
    paced = data_file(tmp_path, rows, more="rank_port_gbps")
    assert not ratios(our_lines([host, paced]), PLAIN_AND_INC)


def test_phased_forms_are_compared_at_the_same_g(tmp_path):
    rows = "megakernel,4,64,16,4, megakernel_inc_phased,4,64,16,2,1 megakernel_inc_phased,4,64,16,1,2"
    found = ratios(our_lines([data_file(tmp_path, rows, more="ranks_per_phase")]), ("megakernel", "megakernel_inc_phased"))
    assert [(origin[-5:], values) for origin, values in found] == [("G = 1", {64: 2.0}), ("G = 2", {64: 4.0})]


def test_the_posts_table_and_its_products():
    lines = post_lines(read_post())
    assert ratios(lines, ("baseline", "megakernel"))[0][1][1024] == 1.85
    ((origin, values),) = ratios(lines, PLAIN_AND_INC)
    assert "product" in origin and values[65536] == round(1.52 * 1.03, 3)


def test_facts_are_the_posts_with_ours_where_there_are_some(places):
    files, _ = read_folder(places.data)
    found = {fact.what: fact for fact in facts(files, read_post())}
    assert found["busy matrix"].post == "75 %" and found["busy matrix"].ours[0][0] == "88 %"
    assert found["speed up range: megakernel over megakernel_phased"].ours[0][0] == "1.11 to 1.14"
    assert not found["speed up range, model in prefill: megakernel_inc_phased over baseline"].ours
    assert "without reduce" in found["busy vector"].ours[0][0]
    assert found["stored tensors: megakernel"].ours[0][0] == "7"
    assert not found["busy switch"].ours and not found["moe share, model in prefill: baseline"].ours
    assert all("measured_gpu" in origin for _, origin in found["ranks per token"].ours)


def test_packets_are_counted_per_collective_and_microbatch(tmp_path):
    file = data_file(tmp_path, "megakernel_inc,4,64,16,1,inc_all_to_all", placement="host", more="collective")
    file = replace(file, rows=tuple({**row, "metric": "packets", "value": "64"} for row in file.rows))
    assert next(f for f in facts([file], read_post()) if f.what == "packets: megakernel_inc").ours[0][0] == "8"


def test_two_runs_agree_or_do_not(tmp_path):
    def runs(inc: float) -> list[DataFile]:
        return [data_file(tmp_path / str(inc), f"megakernel,4,64,16,300 megakernel_inc,4,64,16,{inc}")]

    (close,) = compare(runs(200), runs(206))
    assert close.within and close.count == 1 and close.largest == pytest.approx(0.0291, abs=1e-3)
    (far,) = compare(runs(200), runs(220))
    assert not far.within and far.where == "megakernel/16 over megakernel_inc/16, 64 tokens"
    assert not compare([], runs(200))


def test_the_page_says_how_two_runs_agree(places):
    data_file(places.previous / "data", "megakernel,4,64,16,300 megakernel_inc,4,64,16,200")
    data_file(places.data, "megakernel,4,64,16,300 megakernel_inc,4,64,16,202")
    page, _ = write_page(places, standing(places))
    assert "within 5 %" in page.read_text(encoding="utf-8")


def test_every_figure_of_the_post_is_on_the_page(places):
    page, _ = write_page(places, standing(places))
    text = re.sub(r"base64,[^\"]+", "", page.read_text(encoding="utf-8"))
    for row in read_post().rows:
        value = float(row["value"])
        assert (f"{value:.2f}" if row["metric"] == "speed_up" else row["value"]) in text, row
