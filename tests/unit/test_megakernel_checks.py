"""What the megakernel is given is checked before a launch: shapes, heaps, sizes that would overflow its words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inc_runtime.compile_cache import Verbs
from inc_runtime.config import OLMOE_1B_7B, CommunicationModel, LayerShape, Pipeline
from inc_runtime.errors import ConfigurationError, PlacementError
from inc_runtime.heap_layout import Dims
from inc_runtime.protocol import World
from megakernel.device_arguments import MAX_LOCAL_EXPERTS, TALLY_BITS, TILE_ROWS
from megakernel.launch_megakernel import check_heap, check_supported
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


@pytest.mark.parametrize(
    ("shape", "num_ranks", "words"),
    [
        (LayerShape(64, 8, 2176, 1024), 4, "hidden_size = 2176: the megakernel takes a multiple of 256"),
        (LayerShape(64, 8, 2048, 1000), 4, "intermediate_size = 1000"),
        (LayerShape(64, 33, 2048, 1024), 4, "top_k = 33"),
        (LayerShape(512, 8, 2048, 1024), 4, "experts per rank = 128.*at most 64"),
        (LayerShape(2048, 8, 2048, 1024), 32, "num_experts = 2048"),
    ],
    ids=lambda value: value.split(" =")[0] if isinstance(value, str) else "",
)
def test_shapes_beyond_the_kernel_are_refused_with_those_it_takes(shape: LayerShape, num_ranks: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_supported(shape, num_ranks, "sm_90a")


def test_a_gpu_that_is_not_hopper_is_refused_and_told_what_works() -> None:
    with pytest.raises(PlacementError, match=r"needs a Hopper GPU.*found sm_100a. Use the host backend"):
        check_supported(OLMOE_1B_7B, 4, "sm_100a")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"microbatch_tokens": 32}, "microbatch_tokens = 32: the heap was laid out for 16"),
        ({"depth": 6}, "depth = 6: the heap was laid out for 4"),
        ({"ranks_per_phase": 3}, "ranks_per_phase = 3: the heap was laid out for 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_heap_for_another_pipeline_is_refused(given: dict[str, int], words: str) -> None:
    laid_out = {"bound_tokens": 64, "microbatch_tokens": 16, "depth": 4, "ranks_per_phase": 2}
    dims = Dims.of(CommunicationModel.INC_ALL_TO_ALL_PHASED, World(4), OLMOE_1B_7B, Pipeline(**laid_out))
    heap = SimpleNamespace(layout=SimpleNamespace(dims=dims), verbs=Verbs.DIRECT)
    check_heap(heap, OLMOE_1B_7B, Pipeline(**laid_out))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=words):
        check_heap(heap, OLMOE_1B_7B, Pipeline(**laid_out | given))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="top_k = 9: the heap's records hold 8"):
        check_heap(heap, LayerShape(64, 9, 2048, 1024), Pipeline(**laid_out))  # type: ignore[arg-type]
    heap.verbs = Verbs.NVSHMEM
    with pytest.raises(PlacementError, match="takes the direct verbs"):
        check_heap(heap, OLMOE_1B_7B, Pipeline(**laid_out))  # type: ignore[arg-type]
