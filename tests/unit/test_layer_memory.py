"""What the megakernel is given is checked before a launch: sizes that would overflow its words."""

from __future__ import annotations

import pytest

from inc_runtime.config import OLMOE_1B_7B, LayerShape, Pipeline
from inc_runtime.errors import ConfigurationError
from megakernel.device_arguments import MAX_LOCAL_EXPERTS, TALLY_BITS, TILE_ROWS
from megakernel.layer_memory import check_size, grouped_rows
from megakernel.pipeline import device_lags


@pytest.mark.parametrize("rows_of_experts", [[4096 * 8] + [0] * 15, [1] * 16, [129, 127, 128] + [0] * 13])
def test_every_split_of_the_choices_fits_the_grouped_rows(rows_of_experts: list[int]) -> None:
    used = sum(-(-rows // TILE_ROWS) * TILE_ROWS for rows in rows_of_experts)
    assert used <= grouped_rows(OLMOE_1B_7B, 16, 4096)


def test_ids_that_occur_twice_have_room_where_a_rank_has_fewer_experts_than_choices() -> None:
    """Two experts a rank and k = 8: a row whose ids are all equal brings eight rows."""
    assert grouped_rows(LayerShape(64, 8, 2048, 1024), 2, 1000) >= 8 * 1000 + TILE_ROWS


def test_a_layer_of_65536_tokens_is_counted() -> None:
    for microbatch_tokens in (1024, 4096):
        check_size(OLMOE_1B_7B, Pipeline(65536, microbatch_tokens, 4), 16, 4 * microbatch_tokens)


@pytest.mark.parametrize(
    ("shape", "pipeline", "name"),
    [
        (LayerShape(64, 8, 16384, 16384), Pipeline(1 << 21, 64, 4), "tiles"),
        (OLMOE_1B_7B, Pipeline(1 << 26, 1 << 24, 1), "grouped rows"),
        (LayerShape(64, 1, 16384, 128), Pipeline(1 << 21, 1 << 18, 4), "pieces"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_overflow_is_refused_by_name(shape: LayerShape, pipeline: Pipeline, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        check_size(shape, pipeline, MAX_LOCAL_EXPERTS, 4 * pipeline.microbatch_tokens)


@pytest.mark.parametrize("depth", range(1, 12))
def test_three_sets_of_grouped_rows_suffice_at_every_depth(depth: int) -> None:
    """Set m % 3 serves microbatch m + 3 once the sums of m are back: group of m + 3 comes after combine of m."""
    lags = device_lags(depth)
    assert 0 <= lags.group <= lags.reduce <= lags.combine == depth - 1
    assert lags.reduce - lags.group <= 1
    assert 3 + lags.group > lags.combine
    assert TALLY_BITS == 28
