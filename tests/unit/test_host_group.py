"""Processes without a launcher meet at a store, and say who did not come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from inc_runtime.errors import PeerMissing
from inc_runtime.host_group import StoreGroup, free_port

NAMES = ["rank 0", "rank 1", "dispatch switch 0"]


def test_every_process_sees_the_values_of_all_in_order_round_after_round():
    port = free_port()

    def program(pe: int) -> list[list[object]]:
        group = StoreGroup(port, pe, NAMES, 30.0)
        rounds = [group.gather((pe, number)) for number in range(5)]
        group.barrier()
        group.close()
        return rounds

    with ThreadPoolExecutor(len(NAMES)) as pool:
        for rounds in pool.map(program, range(len(NAMES))):
            assert rounds == [[(pe, number) for pe in range(len(NAMES))] for number in range(5)]


def test_a_process_that_does_not_come_is_named():
    with pytest.raises(PeerMissing, match="rank 0 waited 1 s for rank 1, which did not come"):
        StoreGroup(free_port(), 0, NAMES, 1.0).gather("here")


def test_a_process_without_rank_0_says_so():
    with pytest.raises(PeerMissing, match="rank 1 cannot reach rank 0 at port"):
        StoreGroup(free_port(), 1, NAMES, 1.0)
