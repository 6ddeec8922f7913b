"""Placements: who sits where, and what is refused."""

from __future__ import annotations

import pytest

from inc_runtime.errors import ConfigurationError
from inc_runtime.placement import FREE_SMS, Placement, PlacementKind, choose, place
from inc_runtime.protocol import World

WORLD = World(4)
SMS = 132


def blocks_of(placement: Placement, gpu: int) -> int:
    return sum(seat.num_blocks for seat in placement.on_gpu(gpu))


def test_native_gives_every_pe_a_gpu():
    placement = place(PlacementKind.NATIVE, WORLD, [SMS] * 6)
    assert [seat.gpu for seat in placement.seats] == list(range(6))
    assert not placement.needs_mps


def test_scale_model_separates_ranks_from_switches():
    placement = place(PlacementKind.SCALE_MODEL, WORLD, [SMS, SMS])
    assert [seat.gpu for seat in placement.seats] == [0, 0, 0, 0, 1, 1]
    assert [seat.num_blocks for seat in placement.seats] == [32, 32, 32, 32, 16, 16]
    assert placement.needs_mps


@pytest.mark.parametrize("num_ranks, num_gpus", [(1, 2), (2, 2), (3, 2), (8, 2), (8, 4), (5, 3)])
def test_scale_model_holds_any_world_and_ranks_share_equally(num_ranks, num_gpus):
    world = World(num_ranks, 2, 1)
    placement = place(PlacementKind.SCALE_MODEL, world, [SMS] * num_gpus)
    assert len({seat.gpu for seat in placement.seats[:num_ranks]} & {seat.gpu for seat in placement.seats[num_ranks:]}) == 0
    for gpu in placement.gpus:
        assert blocks_of(placement, gpu) <= SMS


def test_shared_puts_switches_beside_ranks():
    placement = place(PlacementKind.SHARED, World(2), [SMS, SMS])
    assert [seat.gpu for seat in placement.seats] == [0, 1, 0, 1]
    assert [seat.num_blocks for seat in placement.seats] == [SMS - FREE_SMS - 8, SMS - FREE_SMS - 8, 8, 8]


def test_one_gpu_holds_all_with_sms_to_spare():
    placement = place(PlacementKind.ONE_GPU, WORLD, [SMS])
    assert [seat.num_blocks for seat in placement.seats] == [28, 28, 28, 28, 8, 8]
    assert blocks_of(placement, 0) <= SMS - FREE_SMS


def test_dual_role_puts_both_switches_of_a_plane_on_one_gpu():
    placement = place(PlacementKind.DUAL_ROLE, World(4, 2, 2), [SMS] * 6)
    assert [seat.gpu for seat in placement.seats] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert [seat.num_blocks for seat in placement.seats] == [SMS] * 4 + [16] * 4
    assert placement.needs_mps
    with pytest.raises(ConfigurationError, match="need 6 GPUs, found 5"):
        place(PlacementKind.DUAL_ROLE, World(4, 2, 2), [SMS] * 5)


def test_host_needs_no_gpu():
    placement = place(PlacementKind.HOST, WORLD, [])
    assert placement.gpus == [] and not placement.needs_mps


@pytest.mark.parametrize("num_gpus, kind", [(0, "host"), (1, "one_gpu"), (2, "scale_model"), (5, "scale_model"), (6, "native")])
def test_the_gpus_found_choose_the_placement(num_gpus, kind):
    assert choose(WORLD, num_gpus).value == kind


def test_too_few_gpus_are_refused_with_the_placement_that_fits():
    with pytest.raises(ConfigurationError, match=r"need 6 GPUs, found 2\. Use --placement scale_model"):
        place(PlacementKind.NATIVE, WORLD, [SMS, SMS])


def test_more_pes_than_sms_are_refused():
    with pytest.raises(ConfigurationError, match="leave no SM for rank 0"):
        place(PlacementKind.ONE_GPU, World(30), [24])


def test_the_plan_names_every_pe():
    text = place(PlacementKind.SCALE_MODEL, WORLD, [SMS, SMS]).describe()
    assert "GPU 0: rank 0 (32 blocks)" in text and "GPU 1: dispatch switch 0 (16 blocks), combine switch 0 (16 blocks)" in text
