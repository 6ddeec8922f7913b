"""INC All-to-All-Dispatch, cut-through, switch side: each group of tokens goes on as it arrives, whoever else is late.

Waits on: `group_arrived` of every sender's next group. Signals: `expert_group_arrived` on every rank, payload or not;
`plan_arrived` on the combine switches of its tokens once the last group of a microbatch has gone. Reads: its inbox.
Writes: `expert_rows`, its routing and headers in the sender's run on the expert ranks. Rank side:
`inc_runtime/collectives/cut_through.py`. It compares no headers: every expert rank does.
"""

from __future__ import annotations

from collections import Counter

from inc_runtime.collectives.cut_through import group_tokens
from inc_runtime.collectives.microbatch import first_row, membership_through_switch, runs_of
from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Header, Tag, signal_word, slot_of
from switch_emulator.dispatch_switch import forward_plans
from switch_emulator.serving import Stopped, stop_words


class CutThroughDispatch:
    """State of the switch: the next group of every sender, as (magic, group), and the senders that have ended a microbatch."""

    def __init__(self, pe: OneSided, first_magic: int) -> None:
        self.pe, self.dims = pe, pe.layout.dims
        self.plane = pe.world.plane_of(pe.pe)
        self.next = [(first_magic, 0)] * self.dims.num_ranks
        self.ended: Counter[int] = Counter()
        self.stops_seen: set[str] = set()

    def serve(self) -> None:
        """Serve until every rank has stopped. Raises Stopped."""
        while len(self.stops_seen) < self.dims.num_ranks:
            behind, idle = min(self.next), len(set(self.next)) == 1 and self.next[0][1] == 0
            groups = [
                Awaited(Flag("group_arrived", (slot_of(m, self.dims.depth), r, g)), m, f"rank {r}", idle or (m, g) > behind)
                for r, (m, g) in enumerate(self.next)
            ]
            stops = [s for s in stop_words(self.pe, behind[0]) if s.sender not in self.stops_seen] if idle else []
            for position in self.pe.wait_until_some(groups + stops, Tag.DISPATCH_TOKENS, idle=idle):
                if position < len(groups):
                    self.forward(position)
                else:
                    self.stops_seen.add(stops[position - len(groups)].sender)
        raise Stopped

    def forward(self, sender: int) -> None:
        """Send the next group of a sender to every rank that needs one of its tokens; its records to all."""
        pe, dims = self.pe, self.dims
        magic, group = self.next[sender]
        slot = slot_of(magic, dims.depth)
        inbox = slot * dims.num_ranks + sender
        header = pe.memory["inbox_header"][inbox]
        part = group_tokens(dims, group, int(header[Header.NUM_ROWS]))
        records = pe.memory["inbox_routing"][inbox, part.start : part.stop]
        with pe.stage("regroup", magic, rows=len(part)):
            membership = membership_through_switch(dims, records["expert_ids"], int(header[Header.NUM_EXPERTS]), sender)
        first = first_row(dims, self.plane, sender, 0) + part.start
        flag = Flag("expert_group_arrived", (slot, self.plane, sender, group))
        for rank in range(dims.num_ranks):
            if not len(part) or (dims.local_bypass and rank == sender):
                pe.signal(rank, flag, signal_word(magic, False), magic=magic)
                continue
            segments = [Segment(records, "expert_rows_routing", (slot, slice(first, first + len(part))))]
            if group == 0:
                segments.append(Segment(header[None], "expert_rows_header", (slot, self.plane, slice(sender, sender + 1))))
            for run in runs_of(membership[:, rank]):
                rows = pe.memory["inbox_tokens"][inbox, part.start + run.start : part.start + run.stop]
                segments.append(Segment(rows, "expert_rows", (slot, slice(first + run.start, first + run.stop))))
            pe.put_signal(rank, segments, flag, signal_word(magic, True), magic=magic, part=group)
        last = group == dims.row_groups - 1
        self.next[sender] = (magic + 1, 0) if last else (magic, group + 1)
        if last:
            self.end(magic)

    def end(self, magic: int) -> None:
        """A sender has ended a microbatch; the last one completes the plan."""
        self.ended[magic] += 1
        if self.ended[magic] < self.dims.num_ranks:
            return
        del self.ended[magic]
        forward_plans(self.pe, magic, self.plane)
        self.pe.memory["magic"][0] = magic
