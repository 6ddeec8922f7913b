"""The relay switch of the plain models: forwards each chunk as it lands, computes nothing, holds no microbatch.

Waits on: `relay_arrived` of every sender's next cell; when phased also the requests and the barrier. Signals: the chunk's own
flag on its destination, then, once a quiet has completed several, `relay_credits` on their senders. Reads: its cells,
`relay_cells` of 32 KiB per sender. Writes: `expert_rows` (dispatch) or `received_partial_sums` (combine) on the ranks.
The dispatch switch PE relays the dispatch, the combine switch PE the combine. Rank side: `collectives/relayed.py`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from inc_runtime.collectives.microbatch import first_row
from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Chunk, Header, Role, Tag, signal_word, slot_of
from switch_emulator.phases import DispatchGrants, InNetworkBarrier, PhaseQueue
from switch_emulator.serving import Stopped, stop_words


class RelaySwitch:
    """State of one relay: the next chunk of every sender and, when phased, who may send."""

    def __init__(self, pe: OneSided, first_magic: int) -> None:
        self.pe, self.dims = pe, pe.layout.dims
        self.plane = pe.world.plane_of(pe.pe)
        self.index = pe.pe - pe.world.num_ranks
        self.dispatch = pe.role is Role.DISPATCH_SWITCH
        self.phased = self.dims.model.phased
        self.messages_of_request = self.dims.num_ranks - self.dims.local_bypass
        self.next_chunk = [1] * self.dims.num_ranks
        self.messages_done: Counter[tuple[int, int]] = Counter()
        self.stops_seen: set[str] = set()
        self.to_give_back: list[tuple[int, int]] = []
        self.last_magic = first_magic - 1
        self.grants = DispatchGrants(pe, first_magic)
        self.barrier = InNetworkBarrier(pe, first_magic)
        self.combine_phases = PhaseQueue(self.dims.ranks_per_phase)
        self.next_combine = [first_magic] * self.dims.num_ranks

    def serve(self) -> None:
        """Serve until every rank has stopped and every chunk has left."""
        while True:
            chunks = [
                Awaited(Flag("relay_arrived", (s, n % self.dims.relay_cells)), n, f"rank {s}", optional=True)
                for s, n in enumerate(self.next_chunk)
            ]
            requests = self.requests()
            joins = self.barrier.watched() if self.phased and self.dispatch else []
            stops = [s for s in stop_words(self.pe, self.last_magic + 1) if s.sender not in self.stops_seen]
            watched = chunks + requests + joins + stops
            for position in sorted(self.pe.wait_until_some(watched, Tag.RELAY_CHUNK, idle=True)):
                self.on_arrival(watched[position])
            self.give_back_cells()
            if len(self.stops_seen) == self.dims.num_ranks:
                raise Stopped
            self.open_phases()

    def requests(self) -> list[Awaited]:
        if not self.phased:
            return []
        if self.dispatch:
            return self.grants.watched()
        return [
            Awaited(Flag("combine_requests", (slot_of(m, self.dims.depth), r)), m, f"rank {r}", optional=True)
            for r, m in enumerate(self.next_combine)
        ]

    def on_arrival(self, arrived: Awaited) -> None:
        region, index = arrived.flag.region, arrived.flag.index
        if region == "relay_arrived":
            self.forward(index[0], index[1])
        elif region == "dispatch_requests":
            self.grants.requested(index[0])
        elif region == "combine_requests":
            self.combine_phases.request(index[1], arrived.magic)
            self.next_combine[index[1]] += 1
        elif region == "barrier_joined":
            self.barrier.joined(index[0])
        else:
            self.stops_seen.add(arrived.sender)

    def forward(self, sender: int, cell: int) -> None:
        """Pass one chunk on to its destination."""
        fields = self.pe.memory["relay_chunk"][sender, cell]
        destination, magic, number = (int(fields[f]) for f in (Chunk.DESTINATION, Chunk.MAGIC, Chunk.NUMBER))
        flags = "expert_chunk_arrived" if self.dispatch else "partial_chunk_arrived"
        flag = Flag(flags, (slot_of(magic, self.dims.depth), self.plane, sender, number))
        segments = self.segments(sender, cell, fields)
        self.last_magic = max(self.last_magic, magic)
        if segments:
            word = signal_word(magic, True)
            self.pe.put_signal(destination, segments, flag, word, magic=magic, part=number)
        else:
            self.pe.signal(destination, flag, signal_word(magic, False), magic=magic)
        self.to_give_back.append((sender, self.next_chunk[sender]))
        self.next_chunk[sender] += 1
        if number == fields[Chunk.NUM_CHUNKS] - 1:
            self.message_done(sender, destination, magic)

    def give_back_cells(self) -> None:
        """Complete the chunks that were passed on, then give their cells back, once a sender has used most of its own.

        A quiet after every chunk would make the relay forward one chunk of each sender per round trip: W + 1 steps to a
        dispatch of W messages that should take two.
        """
        cells = self.dims.relay_cells
        if max(Counter(sender for sender, _ in self.to_give_back).values(), default=0) < max(1, cells * 3 // 4):
            return
        self.pe.quiet()
        for sender, chunk in self.to_give_back:
            credit = Flag("relay_credits", (self.index, chunk % cells))
            self.pe.signal(sender, credit, signal_word(chunk, True), magic=self.last_magic)
        self.to_give_back.clear()

    def segments(self, sender: int, cell: int, fields: np.ndarray) -> list[Segment]:
        """What the chunk brings to its destination; nothing for a message without rows."""
        count, start = int(fields[Chunk.NUM_ROWS]), int(fields[Chunk.FIRST_ROW])
        if not count:
            return []
        slot = slot_of(int(fields[Chunk.MAGIC]), self.dims.depth)
        rows = self.pe.memory["relay_rows"][sender, cell, :count]
        if not self.dispatch:
            target = (slot, self.plane, sender, slice(start, start + count))
            return [Segment(rows, "received_partial_sums", target)]
        base = first_row(self.dims, self.plane, sender, 0) + start
        run = (slot, slice(base, base + count))
        segments = [
            Segment(self.pe.memory["relay_routing"][sender, cell, :count], "expert_rows_routing", run),
            Segment(rows, "expert_rows", run),
        ]
        if start == 0:
            # The header's row count becomes that of the message: the destination derives the number of chunks from it.
            header = self.pe.memory["relay_header"][sender, cell]
            header[Header.NUM_ROWS] = fields[Chunk.MESSAGE_ROWS]
            own = slice(sender, sender + 1)
            segments.append(Segment(header[None], "expert_rows_header", (slot, self.plane, own)))
        return segments

    def message_done(self, sender: int, destination: int, magic: int) -> None:
        """Close the phase of a rank once all W messages of it have left; W - 1 where no rank sends to itself."""
        if not self.phased:
            return
        request = (sender if self.dispatch else destination, magic)
        self.messages_done[request] += 1
        if self.messages_done[request] == self.messages_of_request:
            del self.messages_done[request]
            (self.grants.queue if self.dispatch else self.combine_phases).close(request)

    def open_phases(self) -> None:
        if not self.phased:
            return
        if self.dispatch:
            self.grants.grant_free_places()
            return
        while opened := self.combine_phases.open_next():
            _, (owner, magic) = opened
            flag = Flag("phase_opened", (slot_of(magic, self.dims.depth), self.plane, owner))
            for rank in range(self.dims.num_ranks):
                self.pe.signal(rank, flag, signal_word(magic, True), magic=magic)
