"""Phases and the INC barrier, switch side: who may go next, in order of request, at most G at once. Our own design."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inc_runtime.one_sided import Awaited, Flag, OneSided
from inc_runtime.protocol import signal_word, slot_of


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

    @property
    def busy(self) -> bool:
        return bool(self.places or self.waiting)


class DispatchGrants:
    """Credits of a phased dispatch: watches the requests of all ranks and grants places in their order."""

    def __init__(self, pe: OneSided, first_magic: int) -> None:
        self.pe = pe
        self.queue = PhaseQueue(pe.layout.dims.ranks_per_phase)
        self.next_magic = [first_magic] * pe.world.num_ranks

    def watched(self) -> list[Awaited]:
        behind = min(self.next_magic)
        return [
            Awaited(Flag("dispatch_requests", (rank,)), magic, f"rank {rank}", optional=magic > behind)
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
    """The INC barrier after a phased dispatch: releases all ranks once the last has joined."""

    def __init__(self, pe: OneSided, first_magic: int) -> None:
        self.pe = pe
        self.next_magic = [first_magic] * pe.world.num_ranks
        self.released = first_magic - 1

    def watched(self) -> list[Awaited]:
        depth = self.pe.layout.dims.depth
        behind = min(self.next_magic)
        return [
            Awaited(
                Flag("barrier_joined", (slot_of(magic, depth), rank)), magic, f"rank {rank}", optional=magic > behind
            )
            for rank, magic in enumerate(self.next_magic)
        ]

    def joined(self, rank: int) -> None:
        self.next_magic[rank] += 1
        while min(self.next_magic) - 1 > self.released:
            self.released += 1
            flag = Flag("barrier_released", (slot_of(self.released, self.pe.layout.dims.depth),))
            for peer in range(self.pe.world.num_ranks):
                self.pe.signal(peer, flag, signal_word(self.released, True), magic=self.released)

    @property
    def in_step(self) -> bool:
        return len(set(self.next_magic)) == 1
