"""How a switch waits: in order of arrival, without limit while idle, until every rank says stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inc_runtime.one_sided import Awaited, Flag, OneSided
from inc_runtime.protocol import Tag


class Stopped(Exception):
    """Every rank has raised its stop word: there is nothing left to serve."""


def stop_words(pe: OneSided, magic: int) -> list[Awaited]:
    """The stop words of all ranks: a rank that stops raises its word to the magic that it will not send."""
    return [Awaited(Flag("stop", (r,)), magic, f"rank {r}", optional=True) for r in range(pe.world.num_ranks)]


def in_order_of_arrival(pe: OneSided, expected: Sequence[Awaited], tag: Tag, magic: int) -> Iterator[int]:
    """Yield the positions in `expected` as they arrive. Waits without limit until the first. Raises Stopped."""
    pending = list(range(len(expected)))
    stops = stop_words(pe, magic)
    begun = False
    while pending:
        watched = [expected[i] for i in pending] + ([] if begun else stops)
        ready = pe.wait_until_some(watched, tag, idle=not begun)
        arrived = [pending[i] for i in ready if i < len(pending)]
        if arrived:
            begun = True
            pending = [i for i in pending if i not in arrived]
            yield from arrived
            continue
        stopped = {watched[i].sender for i in ready}
        stops = [stop for stop in stops if stop.sender not in stopped]
        if not stops:
            raise Stopped
