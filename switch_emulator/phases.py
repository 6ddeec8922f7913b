"""Phases and the INC barrier, switch side: who may go next, in order of request, at most G at once. Our own design."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inc_runtime.one_sided import Awaited, Flag, OneSided
from inc_runtime.protocol import magic_of, signal_word


@dataclass
class PhaseQueue:
    """Requests in order of arrival and the G places that serve them. A request is (rank, magic)."""

    num_places: int
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)

    def request(self, rank: int, magic: int) -> None:
        self.waiting.append((rank, magic))

    def open_next(self) -> tuple[int, tuple[int, int]] | None:
        """Give a free place to the oldest request. Returns (place, request), or None."""
        free = [place for place in range(self.num_places) if place not in self.places]
        if not free or not self.waiting:
            return None
        self.places[free[0]] = self.waiting.popleft()
        return free[0], self.places[free[0]]

    def close(self, request: tuple[int, int]) -> None:
        place = next(place for place, held in self.places.items() if held == request)
        del self.places[place]


class DispatchGrants:
    """Credits of a phased dispatch: watches the requests of all ranks and grants places in their order."""

    def __init__(self, pe: OneSided, first_magic: int) -> None:
        self.pe = pe
        self.queue = PhaseQueue(pe.layout.dims.ranks_per_phase)
        self.next_magic = [first_magic] * pe.world.num_ranks

    def watched(self) -> list[Awaited]:
        behind = min(self.next_magic)
        return [
            Awaited(Flag("dispatch_requests", (rank,)), magic, f"rank {rank}", optional=self.in_step or magic > behind)
            for rank, magic in enumerate(self.next_magic)
        ]

    def requested(self, rank: int) -> None:
        self.queue.request(rank, self.next_magic[rank])
        self.next_magic[rank] += 1

    def grant_free_places(self) -> None:
        plane = self.pe.world.plane_of(self.pe.pe)
        while opened := self.queue.open_next():
            place, (rank, magic) = opened
            self.pe.signal(rank, Flag("dispatch_grants", (plane, place)), signal_word(magic, True), magic=magic)

    @property
    def in_step(self) -> bool:
        """No rank has begun a microbatch that another has not."""
        return len(set(self.next_magic)) == 1


class InNetworkBarrier:
    """The INC barrier after a phased dispatch: releases all ranks once the last has joined.

    A call may run without it, so the magics of successive barriers need not be consecutive: the joined word says which.
    """

    def __init__(self, pe: OneSided, first_magic: int) -> None:
        self.pe = pe
        self.joined_magic = [first_magic - 1] * pe.world.num_ranks
        self.released = first_magic - 1

    def watched(self) -> list[Awaited]:
        behind = min(self.joined_magic)
        return [
            Awaited(Flag("barrier_joined", (rank,)), magic + 1, f"rank {rank}", optional=self.in_step or magic > behind)
            for rank, magic in enumerate(self.joined_magic)
        ]

    def joined(self, rank: int) -> None:
        self.joined_magic[rank] = magic_of(self.pe.word(Flag("barrier_joined", (rank,))))
        if min(self.joined_magic) > self.released:
            self.released = min(self.joined_magic)
            for peer in range(self.pe.world.num_ranks):
                word = signal_word(self.released, True)
                self.pe.signal(peer, Flag("barrier_released", (0,)), word, magic=self.released)

    @property
    def in_step(self) -> bool:
        return len(set(self.joined_magic)) == 1
