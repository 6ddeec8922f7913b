"""The words of the protocol: roles, signal words, magic, slots, header fields, wait tags. Written once.

`inc_runtime/device/protocol.h` is generated from this module and from `heap_layout.py` (see `device/generate.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_CHUNK_BYTES = 32 * 1024
"""Rows that one relayed chunk carries at most, or one row: one warp copies a chunk, so chunks are small and many."""

RELAY_CELLS = 512
"""Chunks that a relay may hold, an equal share of each sender: a link of 350 GB/s turns 16 MiB over in 48 us."""

MIN_RELAY_CELLS = 8
"""Chunks that one sender may have in the relay at least, before it waits for a credit."""


class Role(enum.Enum):
    """What a PE does. A PE has one role."""

    COMPUTE_RANK = "rank"
    DISPATCH_SWITCH = "dispatch switch"
    COMBINE_SWITCH = "combine switch"


@dataclass(frozen=True)
class World:
    """PEs in order: the compute ranks, then the dispatch switches, then the combine switches.

    Switch number p of a role is the role's *plane* p: it serves a fixed share of the tokens of every microbatch.
    """

    num_ranks: int
    num_dispatch_switches: int = 1
    num_combine_switches: int = 1

    @property
    def num_pes(self) -> int:
        return self.num_ranks + self.num_dispatch_switches + self.num_combine_switches

    def role_of(self, pe: int) -> Role:
        if pe < self.num_ranks:
            return Role.COMPUTE_RANK
        if pe < self.num_ranks + self.num_dispatch_switches:
            return Role.DISPATCH_SWITCH
        return Role.COMBINE_SWITCH

    def plane_of(self, pe: int) -> int:
        """Number of a switch among those of its role; 0 for a rank."""
        role = self.role_of(pe)
        if role is Role.COMPUTE_RANK:
            return 0
        return pe - self.num_ranks - (self.num_dispatch_switches if role is Role.COMBINE_SWITCH else 0)

    def dispatch_switch(self, plane: int) -> int:
        return self.num_ranks + plane

    def combine_switch(self, plane: int) -> int:
        return self.num_ranks + self.num_dispatch_switches + plane

    def name_of(self, pe: int) -> str:
        role = self.role_of(pe)
        return f"{role.value} {pe if role is Role.COMPUTE_RANK else self.plane_of(pe)}"


def signal_word(magic: int, has_payload: bool) -> int:
    """The 64-bit word that a sender writes into a flag: `magic << 1 | has_payload`."""
    return magic << 1 | has_payload


def arrival_threshold(magic: int) -> int:
    """A flag has arrived at `magic` once its word is `>=` this, whatever its payload bit."""
    return magic << 1


def magic_of(word: int) -> int:
    """The magic in a signal word."""
    return word >> 1


def has_payload(word: int) -> bool:
    """Whether rows came with the word."""
    return bool(word & 1)


def slot_of(magic: int, depth: int) -> int:
    """The slot set of the ring that the microbatch with this magic uses."""
    return magic % depth


class Header(enum.IntEnum):
    """The int64 fields in front of the rows of a put. All but NUM_ROWS must be equal on all senders."""

    NUM_ROWS = 0
    STEP = 1
    BOUND_TOKENS = 2
    MICROBATCH_TOKENS = 3
    NUM_EXPERTS = 4
    TOP_K = 5
    HIDDEN_SIZE = 6
    LAYER = 7
    EDGE_TOKENS = 8


HEADER_FIELDS = len(Header)


class Chunk(enum.IntEnum):
    """The int64 fields in front of a relayed chunk."""

    DESTINATION = 0
    MAGIC = 1
    NUMBER = 2
    NUM_CHUNKS = 3
    FIRST_ROW = 4
    NUM_ROWS = 5
    MESSAGE_ROWS = 6


CHUNK_FIELDS = len(Chunk)


class Tag(enum.IntEnum):
    """What a wait waits for. An error names it."""

    DISPATCH_TOKENS = 1
    DISPATCH_REQUEST = 2
    DISPATCH_GRANT = 3
    DISPATCH_BARRIER = 4
    EXPERT_ROWS = 5
    COMBINE_PLAN = 6
    COMBINE_PARTIAL_SUMS = 7
    COMBINE_REQUEST = 8
    TOKEN_SUMS = 9
    RELAY_CHUNK = 10
    RELAY_CREDIT = 11
    RELAY_PHASE = 12
    PE_BARRIER = 13
