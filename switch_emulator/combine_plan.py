"""Which rows a combine switch pulls from each expert rank, and to which token each of them belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inc_runtime.collectives.microbatch import first_row, membership_through_switch, planes_that_meet, runs_of
from inc_runtime.one_sided import OneSided
from inc_runtime.protocol import Header, slot_of
from inc_runtime.routing import rows_of_expert_ranks


@dataclass(frozen=True)
class Pull:
    """A run of rows of one expert rank, from `start` of its slot: row i belongs to token `tokens[i]` of `owners[i]`.

    `tokens`, `owners`: [count] int64; tokens are counted from the plane's first.
    """

    start: int
    owners: np.ndarray
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
        self.planes = planes_that_meet(self.dims, plane)
        self._membership: dict[tuple[int, int], np.ndarray] = {}
        self._rows_of: dict[tuple[int, int], list[np.ndarray]] = {}
        self._packed_rows: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def membership(self, plane: int, owner: int) -> np.ndarray:
        key = (plane, owner)
        if key not in self._membership:
            header = self.pe.memory["plan_header"][self.slot, plane, owner]
            routing = self.pe.memory["plan_routing"][self.slot, plane, owner, : header[Header.NUM_ROWS]]
            num_experts = int(header[Header.NUM_EXPERTS])
            self._membership[key] = membership_through_switch(self.dims, routing["expert_ids"], num_experts, owner)
        return self._membership[key]

    def num_tokens(self, owner: int) -> int:
        """Tokens of `owner` that this plane sums."""
        capacity, count = self.dims.dispatch_plane_tokens, 0
        for plane in self.planes:
            rows = int(self.pe.memory["plan_header"][self.slot, plane, owner, Header.NUM_ROWS])
            first, end = plane * capacity, plane * capacity + rows
            count += max(0, min(end, self.token_range.stop) - max(first, self.token_range.start))
        return count

    def runs_to_return(self, owner: int) -> list[slice]:
        """Runs of `owner`'s tokens of this plane, counted from its first, whose sums go back: all, but for local bypass."""
        count = self.num_tokens(owner)
        if not self.dims.local_bypass:
            return [slice(0, count)] if count else []
        summed = np.concatenate([self.membership(plane, owner).any(axis=1) for plane in self.planes])
        start = self.token_range.start - self.planes.start * self.dims.dispatch_plane_tokens
        return runs_of(summed[start : start + count])

    def _rows_of_owner(self, plane: int, owner: int) -> list[np.ndarray]:
        """Rows of one owner's tokens on each expert rank, as positions in its packet."""
        key = (plane, owner)
        if key not in self._rows_of:
            self._rows_of[key] = rows_of_expert_ranks(self.membership(plane, owner))
        return self._rows_of[key]

    def holders(self, owners: Sequence[int]) -> list[int]:
        """The expert ranks that hold rows of `owners` whose tokens this plane sums, in rank order."""
        found = np.zeros(self.dims.num_ranks, bool)
        for plane in self.planes:
            first = self.token_range.start - plane * self.dims.dispatch_plane_tokens
            own = slice(max(first, 0), max(first + len(self.token_range), 0))
            for owner in owners:
                found |= self.membership(plane, owner)[own].any(axis=0)
        return np.flatnonzero(found).tolist()

    def _packed(self, plane: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of a coalesced packet: owner and token in order of expert rank, owner, token; first row of each rank."""
        if plane not in self._packed_rows:
            tokens, ranks = zip(*(np.nonzero(self.membership(plane, s)) for s in range(self.dims.num_ranks)), strict=True)
            owner = np.repeat(np.arange(self.dims.num_ranks), [len(t) for t in tokens])
            rank = np.concatenate(ranks)
            order = np.argsort(rank, kind="stable")
            first = np.searchsorted(rank[order], np.arange(self.dims.num_ranks + 1))
            self._packed_rows[plane] = owner[order], np.concatenate(tokens)[order], first
        return self._packed_rows[plane]

    def pulls(self, expert_rank: int, owners: Sequence[int]) -> list[Pull]:
        """The contiguous runs to pull from `expert_rank` for `owners`; all ranks own without phases."""
        runs = []
        for plane in self.planes:
            if self.dims.row_groups:
                for sender in sorted(owners):
                    start = first_row(self.dims, plane, sender, 0)
                    for run in runs_of(self.membership(plane, sender)[:, expert_rank]):
                        rows = np.arange(run.start, run.stop)
                        runs += self._runs(plane, start + run.start, np.full(len(rows), sender), rows)
            elif self.dims.model.phased:
                for sender in sorted(owners):
                    rows = self._rows_of_owner(plane, sender)[expert_rank]
                    if not len(rows):
                        continue
                    runs += self._runs(plane, first_row(self.dims, plane, sender, 0), np.full(len(rows), sender), rows)
            else:
                owner, token, first = self._packed(plane)
                own = slice(first[expert_rank], first[expert_rank + 1])
                runs += self._runs(plane, first_row(self.dims, plane, 0, 0), owner[own], token[own])
        return runs

    def _runs(self, plane: int, start: int, owner: np.ndarray, rows: np.ndarray) -> list[Pull]:
        """Contiguous runs of those rows, which begin at `start`, whose tokens this combine plane sums."""
        if not len(rows):
            return []
        token = rows + (plane * self.dims.dispatch_plane_tokens - self.token_range.start)
        if self.dims.world.num_combine_switches == 1:
            return [Pull(start, owner, token)]
        position = np.flatnonzero((token >= 0) & (token < len(self.token_range)))
        if not len(position):
            return []
        cuts = np.flatnonzero(np.diff(position) != 1) + 1
        return [Pull(start + int(p[0]), owner[p], token[p]) for p in np.split(position, cuts)]
