"""The verbs of the protocol, as every backend offers them, with the ordering guarantee of each.

A role program is a plain function over an `OneSided`. It never touches another PE's memory except through these verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inc_runtime.config import SumOrder
from inc_runtime.heap_layout import HeapLayout
from inc_runtime.protocol import Role, Tag, World, arrival_threshold


@dataclass(frozen=True)
class Segment:
    """A run of rows of one put: `source[rows]` (all of `source` if `rows` is None) goes to `region[index]` on the peer.

    `index` selects an array of the same shape as the rows. A put of several segments is one packet.
    """

    source: np.ndarray
    region: str
    index: tuple[int | slice, ...]
    rows: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.source[:1].nbytes if len(self.source) else 0

    def read(self) -> np.ndarray:
        return self.source if self.rows is None else self.source[self.rows]


@dataclass(frozen=True)
class Piece:
    """A run of rows of one get: `region[index]` on the peer goes to `target` here."""

    region: str
    index: tuple[int | slice, ...]
    target: np.ndarray


@dataclass(frozen=True)
class Flag:
    """The address of a 64-bit signal word on some PE."""

    region: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class Awaited:
    """A flag of this PE, the magic to wait for, and who raises it. An error names the sender, unless `optional`."""

    flag: Flag
    magic: int
    sender: str
    optional: bool = False

    @property
    def threshold(self) -> int:
        return arrival_threshold(self.magic)


class OneSided(Protocol):
    """One PE's hands on the symmetric heap. Raises in every verb: UnknownRegion; Aborted once the abort word is up."""

    pe: int
    role: Role
    name: str
    world: World
    layout: HeapLayout
    sum_order: SumOrder
    memory: dict[str, np.ndarray]
    """Views of this PE's own regions, private ones included, by name."""

    def put_signal(
        self, peer: int, segments: Sequence[Segment], flag: Flag, word: int, *, magic: int, part: int = 0
    ) -> None:
        """Copy all `segments` to `peer`, then raise `flag` there to `word`. One packet.

        Nonblocking: may return before the copy; the sources must not change until `quiet`, or until another
        word proves that the peer has used them. Ordering: whoever sees `word` also sees the bytes of all segments of
        this call; no order between two calls. `magic` is the microbatch and `part` the
        chunk of a message, for the trace.
        """

    def signal(self, peer: int, flag: Flag, word: int, *, magic: int) -> None:
        """Raise `flag` on `peer` to `word`, with no payload. No order against other calls."""

    def get(self, peer: int, pieces: Sequence[Piece], *, magic: int) -> None:
        """Copy all `pieces` from `peer`. Nonblocking: the targets hold the rows only after `quiet`."""

    def quiet(self) -> None:
        """Return once every earlier put of this PE has landed and every get has arrived."""

    def wait_until(self, awaited: Awaited, tag: Tag, *, microbatch: int = -1) -> int:
        """Return the word once the flag has arrived. Raises ArrivalTimeout or PeerDied within the limit."""

    def wait_until_some(
        self, awaited: Sequence[Awaited], tag: Tag, *, microbatch: int = -1, idle: bool = False
    ) -> list[int]:
        """Return the positions in `awaited` that have arrived, at least one, in no particular order.

        `idle`: no limit on the wait, as nothing has begun; stop and abort words still end it.
        """

    def word(self, flag: Flag) -> int:
        """The word that a flag of this PE holds now. Never waits."""

    def barrier(self) -> None:
        """Return once every PE of the world has called it."""

    def stage(self, stage: str, magic: int, *, rows: int = 0) -> AbstractContextManager[None]:
        """A span of local work of this PE, for the trace, and for the virtual clock where there is one."""
