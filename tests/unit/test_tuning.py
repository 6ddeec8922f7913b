"""The table of cuts, how a batch is cut by it, and the fit of the post's formula."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inc_runtime.config import OLMOE_1B_7B, Implementation, LayerShape, check
from inc_runtime.errors import ConfigurationError
from inc_runtime.placement import PlacementKind
from megakernel.tuning import Cut, measured_cuts, tuned_pipeline
from results import tune

INC = Implementation.MEGAKERNEL_INC
CUT = Cut("scale_model", INC.value, 0.5, 8192, 2048, 1024, 1, 4, 7000.0)
SMALL = replace(CUT, num_tokens=1024, microbatch_tokens=512, edge_tokens=0)


def test_a_measured_size_gets_its_cut_and_another_the_nearest() -> None:
    found = tuned_pipeline(OLMOE_1B_7B, 8192, 4, INC, cuts=[SMALL, CUT])
    assert (found.bound_tokens, found.microbatch_tokens, found.edge_tokens, found.depth) == (8192, 2048, 1024, 4)
    assert tuned_pipeline(OLMOE_1B_7B, 30_000, 4, INC, cuts=[SMALL, CUT]).microbatch_tokens == 2048
    assert tuned_pipeline(OLMOE_1B_7B, 700, 4, INC, cuts=[SMALL, CUT]).edge_tokens is None


def test_another_world_or_shape_gives_its_experts_as_many_rows() -> None:
    two_ranks = tuned_pipeline(OLMOE_1B_7B, 16384, 2, INC, cuts=[SMALL, CUT])
    assert (two_ranks.microbatch_tokens, two_ranks.edge_tokens) == (4096, 2048)
    many_experts = LayerShape(256, 8, 2048, 1024)
    assert tuned_pipeline(many_experts, 32768, 4, INC, cuts=[SMALL, CUT]).microbatch_tokens == 8192
    assert tuned_pipeline(OLMOE_1B_7B, 100, 2, INC, cuts=[SMALL, CUT]).microbatch_tokens == 100, "never more than the batch"


def test_a_batch_that_was_best_whole_stays_whole() -> None:
    whole = replace(SMALL, microbatch_tokens=1024)
    assert tuned_pipeline(OLMOE_1B_7B, 1500, 2, INC, cuts=[whole]).num_microbatches == 1


def test_the_placement_counts_where_it_was_measured_and_an_implementation_always() -> None:
    native = replace(CUT, placement="native", microbatch_tokens=4096)
    assert tuned_pipeline(OLMOE_1B_7B, 8192, 4, INC, PlacementKind.NATIVE, [CUT, native]).microbatch_tokens == 4096
    assert tuned_pipeline(OLMOE_1B_7B, 8192, 4, INC, PlacementKind.SHARED, [CUT]).microbatch_tokens == 2048
    with pytest.raises(ConfigurationError, match=r"megakernel: tuning.csv has no measured cut.*tune.py"):
        tuned_pipeline(OLMOE_1B_7B, 8192, 4, Implementation.MEGAKERNEL, cuts=[CUT])


@pytest.mark.parametrize("implementation", [i for i in Implementation if i is not Implementation.BASELINE])
@pytest.mark.parametrize("num_tokens", [1, 64, 1000, 8192, 100_000])
def test_every_cut_of_the_committed_table_runs(implementation: Implementation, num_tokens: int) -> None:
    for num_ranks in (1, 2, 4, 8):
        check(OLMOE_1B_7B, tuned_pipeline(OLMOE_1B_7B, num_tokens, num_ranks, implementation), num_ranks)


def row_of(cut: Cut, **more: object) -> dict[str, str]:
    fields = {"source": "measured_gpu", "metric": "layer_time", "value": cut.layer_time_us, "num_ranks": 4, "top_k": 8}
    fields |= {name: getattr(cut, name) for name in ("placement", "implementation", "num_tokens", "microbatch_tokens", "depth")}
    fields |= {"num_experts": 64, "edge_tokens": cut.edge_tokens or "", "ranks_per_phase": "", **more}
    return {name: str(value) for name, value in fields.items()}


def test_the_table_holds_the_best_cut_of_ordinary_ports_and_reads_as_it_was_written(tmp_path: Path) -> None:
    slower, paced = replace(CUT, microbatch_tokens=512, layer_time_us=9000.0), replace(CUT, layer_time_us=1.0)
    rows = [row_of(slower), row_of(CUT), row_of(paced, rank_port_gbps=23), row_of(paced, local_bypass=1)]
    rows.append(row_of(replace(CUT, implementation="baseline", layer_time_us=1.0)))
    assert tune.best_cuts(rows) == [CUT]
    tune.write_table([CUT], ["commit: abc"], tmp_path / "tuning.csv")
    assert measured_cuts(tmp_path / "tuning.csv") == (CUT,)


def test_the_fit_finds_the_numbers_that_made_the_times() -> None:
    o, c, stages = 150.0, 0.8, 2.5
    cuts = [
        replace(CUT, num_tokens=n, microbatch_tokens=m, edge_tokens=0, layer_time_us=(n / m + stages - 1) * (o + c * m))
        for n in (4096, 8192, 16384) for m in (256, 512, 1024, 2048)
    ]  # fmt: skip
    found = tune.fit(cuts)
    assert (found.o, found.c, found.stages) == pytest.approx((o, c, stages), rel=0.02) and found.error < 1e-3
    assert found.best_microbatch(8192) == pytest.approx(np.sqrt(o * 8192 / (1.5 * c)), rel=0.02)
    text = tune.formula_table([row_of(cut) for cut in cuts])
    assert "| megakernel_inc | 150 | 0.800 | 2.50 | 0.0 |" in text and "8192: 1012 / 1024" in text


def test_a_command_writes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = [replace(CUT, edge_tokens=0, microbatch_tokens=m, layer_time_us=9000.0 + abs(m - 1000)) for m in (512, 1024, 2048)]
    rows = [row_of(cut) for cut in cuts]
    data = tmp_path / "speed_ups_scale_model_abc1234.csv"
    with data.open("w", newline="") as file:
        file.write("# device: two\n# commit: abc1234\n")
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr("sys.argv", ["tune", str(data), "--output", str(tmp_path / "t.csv"), "--tables", str(tmp_path)])
    tune.main()
    assert "commit: abc1234" in (tmp_path / "t.csv").read_text()
    assert "m* / best m measured" in (tmp_path / "best_microbatch_speed_ups_scale_model_abc1234.md").read_text()
