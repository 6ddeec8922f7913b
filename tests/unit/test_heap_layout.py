"""Places: regions do not meet, and their sizes are the functions of D, W, m_b, H and G that the post gives, written out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from inc_runtime.config import CommunicationModel, Implementation, LayerShape, Pipeline, Router
from inc_runtime.errors import UnknownRegion
from inc_runtime.heap_layout import ALIGNMENT, Dims, HeapLayout, Kind
from inc_runtime.protocol import Role, World
from megakernel.memory import fused_bytes, memory_bytes

Model = CommunicationModel
SHAPE = LayerShape(8, 2, 64, 32)
PIPELINE = Pipeline(100, 6, 3, 2)
FOUR_RANKS = World(4)
IN_NETWORK = [model for model in Model if model.in_network]
WORLDS = [World(1), World(3), World(4, 2, 3)]
by_name = {"ids": lambda model: model.value}


def layout_of(model: Model, world: World = FOUR_RANKS, shape: LayerShape = SHAPE, pipeline: Pipeline = PIPELINE) -> HeapLayout:
    return HeapLayout(Dims.of(model, world, shape, pipeline))


@pytest.mark.parametrize("model", list(Model), **by_name)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_regions_of_a_role_are_aligned_lie_in_the_heap_and_do_not_overlap(model: Model, world: World) -> None:
    layout = layout_of(model, world)
    for role in Role:
        spans = []
        for name, region in layout.regions(role).items():
            if region.private:
                continue
            shape, item = layout.shape(role, name), region.dtype(layout.dims).itemsize
            start = layout.offset(role, name)
            assert start % ALIGNMENT == 0
            spans.append((start, start + int(np.prod(shape)) * item, name))
        spans.sort()
        for (_, end, name), (start, _, following) in pairwise(spans):
            assert end <= start, f"{name} runs into {following}"
        assert spans[-1][1] <= layout.heap_bytes


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_writing_one_region_changes_no_other(model: Model) -> None:
    layout = layout_of(model, World(3, 2, 2))
    for role in Role:
        slab = np.zeros(layout.heap_bytes, np.uint8)
        views = layout.carve(role, slab)
        for name, view in views.items():
            slab[:] = 0
            view.view("u1")[...] = 1
            assert slab.sum() == view.nbytes, name
            assert all(not other.view("u1").any() for key, other in views.items() if key != name), name


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_the_heap_is_as_large_as_its_largest_role_and_every_role_has_flags_to_abort_and_meet(model: Model) -> None:
    layout = layout_of(model)
    needed = []
    for role in Role:
        names = layout.regions(role)
        assert {"abort", "pe_barrier", "magic", "error_record"} <= set(names)
        sizes = [region.num_bytes(layout.dims) for region in names.values() if not region.private]
        needed.append(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    assert layout.heap_bytes == max(needed)


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_heap_bytes_do_not_depend_on_tokens_bound_or_routing(model: Model) -> None:
    wanted = layout_of(model).heap_bytes
    for bound in (1, 6, 10_000, 1 << 40):
        assert layout_of(model, pipeline=replace(PIPELINE, bound_tokens=bound)).heap_bytes == wanted
    other = replace(SHAPE, num_experts=999, intermediate_size=4096, router=Router.SIGMOID, renormalize=True)
    assert layout_of(model, shape=other).heap_bytes == wanted


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_row_bytes_of_a_rank_are_proportional_to_depth_microbatch_and_hidden_size(model: Model) -> None:
    def rows(**changes: int) -> int:
        shape = replace(SHAPE, hidden_size=changes.pop("hidden_size", 64))
        return layout_of(model, shape=shape, pipeline=replace(PIPELINE, **changes)).row_bytes(Role.COMPUTE_RANK)

    for factor in (2, 5):
        assert rows(depth=3 * factor) == factor * rows()
        assert rows(microbatch_tokens=6 * factor) == factor * rows()
        assert rows(hidden_size=64 * factor) == factor * rows()


@pytest.mark.parametrize("model", IN_NETWORK, **by_name)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 33])
@pytest.mark.parametrize("ranks_per_phase", [1, "W"])
def test_a_slot_set_of_a_rank_is_w_plus_2_units_with_in_network_computing(
    model: Model, num_ranks: int, ranks_per_phase: int | str
) -> None:
    """One unit of m_b rows to send, W received, which the partial sums overwrite, and one for the sums."""
    group = num_ranks if ranks_per_phase == "W" else 1
    layout = layout_of(model, World(num_ranks), pipeline=replace(PIPELINE, ranks_per_phase=group))
    assert layout.rank_buffer_units() == num_ranks + 2
    depth, microbatch_tokens, hidden_size, bf16 = 3, 6, 64, 2
    wanted = depth * (num_ranks + 2) * microbatch_tokens * hidden_size * bf16
    regions = layout.regions(Role.COMPUTE_RANK).values()
    assert sum(region.num_bytes(layout.dims) for region in regions if region.kind is Kind.ROWS) == wanted
    assert {region.name for region in regions if region.kind is Kind.ROWS} == {"tokens", "expert_rows", "token_sums"}


@pytest.mark.parametrize("model", [m for m in Model if not m.in_network], **by_name)
def test_without_in_network_computing_a_rank_also_holds_packed_copies_and_w_partial_results(model: Model) -> None:
    assert layout_of(model).rank_buffer_units() == 3 * 4


def test_rows_of_a_phased_switch_are_proportional_to_g_and_at_g_of_w_those_of_one_collective() -> None:
    """Dispatch: G inbox slots of m_b rows. Combine: G sums of m_b rows in bfloat16 out, bfloat16 in, float32 accumulated."""
    num_ranks, unit = 4, 6 * 64
    for model in IN_NETWORK:
        for group in range(1, num_ranks + 1):
            layout = layout_of(model, pipeline=replace(PIPELINE, ranks_per_phase=group))
            served = group if model.phased else num_ranks
            depth = 1 if model.phased else 3
            assert layout.row_bytes(Role.DISPATCH_SWITCH) == depth * served * unit * 2, (model, group)
            assert layout.row_bytes(Role.COMBINE_SWITCH) == served * unit * (2 + 2 + 4), (model, group)
    whole = layout_of(Model.INC_ALL_TO_ALL, pipeline=replace(PIPELINE, depth=1))
    for group in range(1, num_ranks + 1):
        phased = layout_of(Model.INC_ALL_TO_ALL_PHASED, pipeline=replace(PIPELINE, ranks_per_phase=group))
        for role in (Role.DISPATCH_SWITCH, Role.COMBINE_SWITCH):
            assert phased.row_bytes(role) * num_ranks == whole.row_bytes(role) * group


def test_several_switches_share_the_rows_of_one() -> None:
    one, three = (layout_of(Model.INC_ALL_TO_ALL, World(4, planes, planes)) for planes in (1, 3))
    for role in (Role.DISPATCH_SWITCH, Role.COMBINE_SWITCH):
        assert three.row_bytes(role) * 3 == one.row_bytes(role)


def test_a_relay_holds_chunks_and_no_microbatch() -> None:
    """Its rows do not grow with m_b nor D, beyond full cells: 512 of 32 KiB."""
    for pipeline in (replace(PIPELINE, microbatch_tokens=4096), replace(PIPELINE, microbatch_tokens=8192, depth=9)):
        layout = layout_of(Model.ALL_TO_ALL, pipeline=pipeline)
        for role in (Role.DISPATCH_SWITCH, Role.COMBINE_SWITCH):
            assert layout.row_bytes(role) == 512 * 32 * 1024


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_a_ring_of_d_sets_holds_d_over_m_of_what_m_sets_would(model: Model) -> None:
    """The allocator that the post leaves open: 64 microbatches against a depth of 5."""
    pipeline = Pipeline(64 * 6, 6, 5)
    ring = layout_of(model, pipeline=pipeline).row_bytes(Role.COMPUTE_RANK)
    all_sets = layout_of(model, pipeline=replace(pipeline, depth=pipeline.num_microbatches)).row_bytes(Role.COMPUTE_RANK)
    assert ring * 64 == all_sets * 5
    tile = "one tile of the experts"
    counted = fused_bytes(model, SHAPE, pipeline, World(4), ring_sets=64)
    assert sum(counted.values()) - counted[tile] == all_sets


def test_fused_forms_hold_the_same_for_every_batch_and_the_baseline_grows_with_it() -> None:
    world, shape = World(4), LayerShape(64, 8, 2048, 1024)

    def held(implementation: Implementation, model: Model, num_tokens: int) -> int:
        pipeline = Pipeline(num_tokens, 256, 5)
        return memory_bytes(implementation, model, shape, pipeline, num_tokens, world)

    for implementation, model in (
        (Implementation.MEGAKERNEL, Model.ALL_TO_ALL),
        (Implementation.MEGAKERNEL_PHASED, Model.ALL_TO_ALL_PHASED),
        (Implementation.MEGAKERNEL_INC, Model.INC_ALL_TO_ALL),
        (Implementation.MEGAKERNEL_INC_PHASED, Model.INC_ALL_TO_ALL_PHASED),
    ):
        assert len({held(implementation, model, n) for n in (1024, 4096, 65536)}) == 1, implementation
    tile = 16 * (2048 + 3 * 1024) * 2
    assert held(Implementation.MEGAKERNEL_INC, Model.INC_ALL_TO_ALL, 65536) == 5 * (4 + 2) * 256 * 2048 * 2 + tile
    n, h, i, k, w = 1024, 2048, 1024, 8, 4
    # tokens, sums; packed, received, partial sums out and in; grouped, expert outputs; projections and activations
    rows = n * h * (1 + 1 + 4 * min(k, w) + 2 * k) + n * k * 3 * i
    assert held(Implementation.BASELINE, Model.ALL_TO_ALL, n) == 2 * rows
    assert held(Implementation.BASELINE, Model.ALL_TO_ALL, 64 * n) == 64 * 2 * rows


def test_a_region_that_a_role_lacks_is_refused_with_those_that_it_has() -> None:
    layout = layout_of(Model.INC_ALL_TO_ALL)
    with pytest.raises(UnknownRegion, match=r"combine switch has no region 'tokens'.*It has: .*plan_header"):
        layout.offset(Role.COMBINE_SWITCH, "tokens")
    with pytest.raises(UnknownRegion, match="private memory of the combine switch"):
        layout.offset(Role.COMBINE_SWITCH, "accumulators")


def test_private_regions_are_poisoned_so_that_a_read_before_a_write_shows() -> None:
    private = layout_of(Model.INC_ALL_TO_ALL).private(Role.COMBINE_SWITCH)
    assert set(private) == {"landing", "accumulators"}
    assert np.isnan(private["accumulators"]).all() and np.isnan(private["landing"].astype("f4")).all()


def test_offsets_reach_beyond_two_gib() -> None:
    """64k tokens of OLMoE: the received rows alone pass 2^31 bytes."""
    shape, pipeline = LayerShape(64, 8, 2048, 1024), Pipeline(65536, 65536, 3)
    layout = layout_of(Model.INC_ALL_TO_ALL, shape=shape, pipeline=pipeline)
    assert layout.offset(Role.COMPUTE_RANK, "token_sums") > 2**31
    assert layout.row_bytes(Role.COMPUTE_RANK) == 3 * 6 * 65536 * 2048 * 2
