"""The relays of the plain forms in fast mode: phases, emulated relays and uplinks, chunk by chunk or nearly so."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from inc_runtime.protocol import RELAY_CELLS
from inc_runtime.simulator.closed_forms import CHUNK as CHUNK_BYTES
from inc_runtime.simulator.closed_forms import HEADER, WORD
from inc_runtime.simulator.fast_phases import Barrier
from inc_runtime.simulator.fast_transfers import Action, Switches, TransferLayer

CREDITS_AFTER = max(1, RELAY_CELLS * 3 // 4)
PARTS, PARTS_OF_A_RANK, PARTS_OF_A_LAYER = 16, 64, 100_000
"""Into how many parts at most a message is cut, in place of its chunks: enough for the order at the ports that it crosses.
The messages of a rank have together at least as many as the second says: few long ones wait for their parts; those of a layer
no more than the third."""


@dataclass
class Relay:
    """One relay. `left_at`: when its last chunk leaves; `release_at`: the same at its last quiet, before which it grants nothing.

    `free`: places; `queue`: whom they go to next; `messages`: of a request, those that have left. `landed`: chunks of each
    sender that have come and not left; `passed`: those that left since the last quiet.
    """

    pe: int
    free: int
    left_at: float = 0.0
    release_at: float = 0.0
    queue: deque[Action] = field(default_factory=deque)
    messages: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    landed: dict[int, deque[Chunk]] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    busy: bool = False


@dataclass(frozen=True)
class Chunk:
    """A part of a message. `num_bytes`: what the relay passes on; `last`: of its message."""

    sender: int
    target: int
    number: int
    tokens: bool
    num_bytes: float
    last: bool


class Relays(Switches):
    """A message of every rank to every rank, in chunks that a relay forwards as they land."""

    def __init__(self, layer: TransferLayer) -> None:
        super().__init__(layer)
        group = self.plan.scenario.ranks_per_phase
        self.phased = self.plan.scenario.model.phased
        self.rows_per_chunk = self.plan.scenario.layout.dims.rows_per_chunk
        messages = 2 * len(layer.loads) * self.planes * self.num_ranks**2
        self.most_parts = max(1, min(max(PARTS, PARTS_OF_A_RANK // self.num_ranks), PARTS_OF_A_LAYER // messages))
        if self.phased:
            # A phase ends with the last chunk, and a place is given back after so many: none can be left out.
            self.most_parts = self.plan.scenario.layout.dims.dispatch_chunks
        self.dispatch = [Relay(self.dispatch_pe(plane), group) for plane in range(self.planes)]
        self.combine = [Relay(self.combine_pe(plane), group) for plane in range(self.planes)]
        self.barrier = Barrier(self)
        self.opened: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self.sending: set[tuple[int, int]] = set()
        self.returned: dict[tuple[int, int], int] = defaultdict(int)
        self.rows = [one.plane_rows.tolist() for one in layer.loads]

    def _chunks(self, number: int, plane: int, sender: int, target: int, kind: str) -> list[float]:
        """Rows of each chunk of one message; an empty message is one chunk."""
        loads = self.rows[number][plane]
        rows = loads[sender][target] if kind == "tokens" else loads[target][sender]
        part = float(self._part_rows(rows))
        whole = int(rows // part)
        return [part] * whole + ([rows - whole * part] if rows > whole * part or not whole else [])

    def _part_rows(self, rows: Any) -> Any:
        """Rows of a part of messages of `rows` rows: a chunk, or more."""
        return np.maximum(self.rows_per_chunk, np.ceil(rows / self.most_parts))

    def words_of(self, kind: str, number: int) -> list[int]:
        """Chunks of all messages to each rank."""
        rows = self.layer.loads[number].plane_rows
        chunks = np.maximum(1, np.ceil(rows / self._part_rows(rows)))
        return chunks.sum(axis=(0, 1) if kind == "tokens" else (0, 2)).astype(int).tolist()

    def send(self, rank: int, number: int, plane: int = 0) -> None:
        """Send the messages of one plane after the other, the next rank first; with phases, once a place is granted."""
        if plane == self.planes:
            self.layer.sent(rank)
            return

        def granted() -> None:
            for step in range(self.num_ranks):
                self._message(rank, (rank + 1 + step) % self.num_ranks, number, plane, "tokens")
            self.send(rank, number, plane + 1)

        if not self.phased:
            granted()
            return
        relay = self.dispatch[plane]

        def ask() -> None:
            relay.queue.append(lambda: self.layer.signal_rank(granted, relay.release_at))
            self._wake(relay)

        self.layer.signal(ask)

    def received(self, rank: int, number: int, then: Action) -> None:
        if self.phased and self.plan.scenario.pipeline.barrier_after_dispatch:
            self.layer.signal(lambda: self.barrier.joined(number, then))
        else:
            then()

    def publish(self, rank: int, number: int) -> None:
        if not self.phased:
            for plane in range(self.planes):
                for step in range(self.num_ranks):
                    self._message(rank, (rank + 1 + step) % self.num_ranks, number, plane, "sums")
            self.layer.published(rank)
            return
        for plane, relay in enumerate(self.combine):

            def ask(plane: int = plane, relay: Relay = relay) -> None:
                relay.queue.append(lambda: self._open_phase(number, plane, rank))
                self._wake(relay)

            self.layer.signal(ask)
        self.sending.add((number, rank))
        self._return(number, rank)

    def _open_phase(self, number: int, plane: int, owner: int) -> None:
        """Tell every rank that it may return its partial sums to `owner`."""
        for rank in range(self.num_ranks):

            def opened(rank: int = rank) -> None:
                self.opened[number, rank].add((plane, owner))
                self.layer.at(self.layer.now, lambda: self._return(number, rank))

            self.layer.signal(opened)

    def _return(self, number: int, rank: int) -> None:
        """Return partial sums to the owners whose phase is open, if this rank has them."""
        if (number, rank) not in self.sending:
            return
        phases = self.opened.pop((number, rank), set())
        for plane, owner in sorted(phases):
            self._message(rank, owner, number, plane, "sums")
        self.returned[number, rank] += len(phases)
        if self.returned[number, rank] == self.planes * self.num_ranks:
            self.sending.discard((number, rank))
            self.layer.published(rank)

    def _message(self, sender: int, target: int, number: int, plane: int, kind: str) -> None:
        """One message through a relay, chunk by chunk."""
        tokens = kind == "tokens"
        relay = (self.dispatch if tokens else self.combine)[plane]
        row = self.token_row if tokens else self.plan.combine_row_bytes
        chunks = self._chunks(number, plane, sender, target, kind)
        for position, rows in enumerate(chunks):
            payload = 0.0 if self.bypass and sender == target else rows * row
            out = payload + WORD + HEADER * (tokens and position == 0 and rows > 0)
            chunk = Chunk(sender, target, number, tokens, out, position == len(chunks) - 1)
            into = payload + CHUNK_BYTES + HEADER * tokens + WORD
            self.network.push(sender, relay.pe, into, number + 1, partial(self._land, relay, chunk), True)

    def _land(self, relay: Relay, chunk: Chunk) -> None:
        relay.landed.setdefault(chunk.sender, deque()).append(chunk)
        self._wake(relay)

    def _wake(self, relay: Relay) -> None:
        if not relay.busy:
            relay.busy = True
            self.layer.at(self.layer.now, lambda: self._serve(relay))

    def _serve(self, relay: Relay) -> None:
        """Forward a chunk of every sender that has one, give cells back, open places; again until nothing is left."""
        while True:
            for sender in sorted(relay.landed):
                chunks = relay.landed[sender]
                self._forward(relay, chunks.popleft())
                if not chunks:
                    del relay.landed[sender]
            if max(relay.passed.values(), default=0) >= CREDITS_AFTER:
                relay.passed.clear()
                relay.release_at = relay.left_at
            while relay.free and relay.queue:
                relay.free -= 1
                relay.queue.popleft()()
            if not relay.landed:
                relay.busy = False
                return

    def _forward(self, relay: Relay, chunk: Chunk) -> None:
        sender, target, number = chunk.sender, chunk.target, chunk.number
        tail = self.network.chunk_tails[relay.pe, sender].popleft()
        landed = partial(self.layer.arrive, "tokens" if chunk.tokens else "sums", number, target)
        left = self.network.deliver(
            relay.pe, target, chunk.num_bytes, tail, landed, magic=number + 1, tokens=chunk.tokens, sender=sender
        )
        relay.left_at = max(relay.left_at, left)
        relay.passed[sender] += 1
        if not self.phased or not chunk.last:
            return
        request = (sender if chunk.tokens else target, number)
        relay.messages[request] += 1
        if relay.messages[request] == self.num_ranks:
            del relay.messages[request]
            relay.free += 1
