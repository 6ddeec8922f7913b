"""Which rows a combine switch pulls from each expert rank, and to which token each of them belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inc_runtime.collectives.microbatch import first_row, plane_tokens
from inc_runtime.one_sided import OneSided
from inc_runtime.protocol import Header, slot_of
from inc_runtime.routing import expert_rank_membership


@dataclass(frozen=True)
class Pull:
    """A run of rows of one expert rank: `count` rows from `start` of its slot belong to `tokens` [count] of `owner`."""

    start: int
    owner: int
    tokens: np.ndarray

    @property
    def count(self) -> int:
        return len(self.tokens)


class CombinePlan:
    """The plan of one microbatch, read from `plan_header` and `plan_routing` of this switch.

    `membership[plane][owner]`: [num_rows, num_ranks] bool, as on the dispatch switch. Only the plans of `owners` that
    have arrived may be asked for; without phases all have.
    """

    def __init__(self, pe: OneSided, magic: int) -> None:
        self.pe, self.magic = pe, magic
        self.dims = pe.layout.dims
        self.slot = slot_of(magic, self.dims.depth)
        plane = self.dims.world.plane_of(pe.pe)
        capacity = self.dims.combine_plane_tokens
        self.token_range = range(plane * capacity, (plane + 1) * capacity)
        self._membership: dict[tuple[int, int], np.ndarray] = {}

    def membership(self, plane: int, owner: int) -> np.ndarray:
        key = (plane, owner)
        if key not in self._membership:
            header = self.pe.memory["plan_header"][self.slot, plane, owner]
            routing = self.pe.memory["plan_routing"][self.slot, plane, owner, : header[Header.NUM_ROWS]]
            self._membership[key] = expert_rank_membership(
                routing["expert_ids"],
                int(header[Header.NUM_EXPERTS]),
                self.dims.num_ranks,
                selective=self.dims.model.selective,
            )
        return self._membership[key]

    def num_tokens(self, owner: int) -> int:
        """Tokens of `owner` that this plane sums."""
        header = self.pe.memory["plan_header"][self.slot, :, owner, Header.NUM_ROWS]
        return len(plane_tokens(int(header.sum()), self.dims.world.plane_of(self.pe.pe), len(self.token_range)))

    def pulls(self, expert_rank: int, owners: Sequence[int]) -> list[Pull]:
        """The runs to pull from `expert_rank` for `owners`; tokens are counted from the plane's first."""
        runs = []
        for plane in range(self.dims.world.num_dispatch_switches):
            before = 0
            for sender in range(self.dims.num_ranks):
                packed = not self.dims.model.phased
                if not packed and sender not in owners:
                    continue
                rows = np.flatnonzero(self.membership(plane, sender)[:, expert_rank])
                if sender in owners and len(rows):
                    tokens = rows + plane * self.dims.dispatch_plane_tokens
                    low, high = np.searchsorted(tokens, (self.token_range.start, self.token_range.stop))
                    if high > low:
                        start = first_row(self.dims, plane, sender, before) + int(low)
                        runs.append(Pull(start, sender, tokens[low:high] - self.token_range.start))
                before += len(rows)
        return runs
