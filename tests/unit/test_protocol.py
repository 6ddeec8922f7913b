"""Words: signal words, magic, slots, roles and planes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from inc_runtime.collectives.microbatch import plane_tokens
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.heap_layout import BF16, Dims
from inc_runtime.one_sided import Awaited, Flag, Segment
from inc_runtime.protocol import (
    Role,
    Tag,
    World,
    arrival_threshold,
    has_payload,
    magic_of,
    signal_word,
    slot_of,
)


@pytest.mark.parametrize("magic", [1, 2, 3, 2**31, 2**62])
@pytest.mark.parametrize("payload", [True, False])
def test_a_word_gives_back_its_magic_and_payload_bit_and_fits_64_bits(magic: int, payload: bool) -> None:
    word = signal_word(magic, payload)
    assert (magic_of(word), has_payload(word)) == (magic, payload)
    assert int(np.uint64(word)) == word


@pytest.mark.parametrize("payload", [True, False])
def test_one_comparison_tells_an_arrival_whatever_its_payload(payload: bool) -> None:
    for magic in range(1, 20):
        arrived = signal_word(magic, payload) >= arrival_threshold(magic)
        assert arrived and signal_word(magic + 1, payload) >= arrival_threshold(magic)
        assert signal_word(magic - 1, True) < arrival_threshold(magic), "an older word never reads as an arrival"
    assert Awaited(Flag("x", (0,)), 7, "rank 0").threshold == arrival_threshold(7)


def test_words_of_rising_magics_rise_whatever_their_payloads() -> None:
    words = [signal_word(magic, magic % 3 == 0) for magic in range(1, 50)]
    assert all(a < b for a, b in pairwise(words))


def test_an_unwritten_flag_is_older_than_the_first_magic() -> None:
    assert arrival_threshold(1) > 0


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_microbatches_in_flight_have_slots_of_their_own(depth: int) -> None:
    for magic in range(1, 30):
        slots = [slot_of(magic + i, depth) for i in range(depth)]
        assert sorted(slots) == list(range(depth)) and slot_of(magic + depth, depth) == slots[0]


def test_every_pe_has_one_role_a_plane_and_a_name() -> None:
    world = World(3, 2, 2)
    assert world.num_pes == 7
    assert [world.role_of(pe) for pe in range(7)] == [Role.COMPUTE_RANK] * 3 + [Role.DISPATCH_SWITCH] * 2 + [
        Role.COMBINE_SWITCH
    ] * 2
    assert [world.plane_of(pe) for pe in range(7)] == [0, 0, 0, 0, 1, 0, 1]
    assert [world.dispatch_switch(p) for p in range(2)] == [3, 4] and [world.combine_switch(p) for p in range(2)] == [5, 6]
    names = [world.name_of(pe) for pe in range(7)]
    assert names[2] == "rank 2" and names[4] == "dispatch switch 1" and names[6] == "combine switch 1"
    assert len(set(names)) == 7


@pytest.mark.parametrize("num_tokens", range(8))
@pytest.mark.parametrize("planes", [1, 2, 3, 7])
def test_planes_cover_every_token_of_a_microbatch_once_and_in_order(num_tokens: int, planes: int) -> None:
    dims = Dims.of(CommunicationModel.INC_ALL_TO_ALL, World(2, planes, planes), LayerShape(2, 1, 8, 1), Pipeline(7, 7, 1))
    parts = [plane_tokens(num_tokens, plane, dims.dispatch_plane_tokens) for plane in range(planes)]
    assert [token for part in parts for token in part] == list(range(num_tokens))
    assert all(len(part) <= dims.dispatch_plane_tokens for part in parts)


def test_segments_count_the_rows_and_bytes_that_they_move() -> None:
    rows = np.arange(40).reshape(5, 8).astype(BF16)
    assert (Segment(rows, "x", (0,)).num_rows, Segment(rows, "x", (0,)).num_bytes) == (5, 80)
    some = Segment(rows, "x", (0,), np.array([3, 1]))
    assert (some.num_rows, some.num_bytes) == (2, 32) and (some.read() == rows[[3, 1]]).all()
    assert Segment(rows[:0], "x", (0,)).num_bytes == 0


def test_tags_are_distinct_numbers_from_one() -> None:
    assert sorted(Tag) == list(range(1, len(Tag) + 1))
