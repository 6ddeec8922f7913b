"""INC All-to-All-Dispatch, switch side: one copy of each token in, one coalesced packet per expert rank out.

Waits on: `tokens_arrived` of every rank, in order of arrival. Signals: `expert_rows_arrived` on every rank, payload or
not; `plan_arrived` on the combine switches of its tokens. Reads: its inbox. Writes: `expert_rows` and its routing on
the expert ranks.
Rank side: `inc_runtime/collectives/inc_all_to_all.py`. Store-and-forward: nothing leaves before all ranks are in.
"""

from __future__ import annotations

import numpy as np

from inc_runtime.collectives.microbatch import check_header, first_row, membership_through_switch, planes_that_meet
from inc_runtime.heap_layout import Dims
from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Header, Tag, signal_word, slot_of
from inc_runtime.routing import rows_of_expert_ranks
from switch_emulator.serving import in_order_of_arrival


def serve_microbatch(pe: OneSided, magic: int) -> None:
    """Collect one microbatch of all ranks and multicast it. Raises Stopped instead when all ranks have stopped."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    expected = [Awaited(Flag("tokens_arrived", (slot, r)), magic, f"rank {r}") for r in range(dims.num_ranks)]
    members: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0, np.int64),) * 2] * dims.num_ranks
    first = None
    for sender in in_order_of_arrival(pe, expected, Tag.DISPATCH_TOKENS, magic):
        inbox_slot = slot * dims.num_ranks + sender
        header = pe.memory["inbox_header"][inbox_slot]
        first = header.copy() if first is None else first
        check_header(header, first, magic, dims, f"rank {sender}")
        with pe.stage("regroup", magic, rows=int(header[Header.NUM_ROWS])):
            rows, ranks = np.nonzero(membership_of_sender(pe, inbox_slot, sender))
        members[sender] = rows, ranks
    plane = dims.world.plane_of(pe.pe)
    for expert_rank, rows in enumerate(rows_in_packed_order(dims, members)):
        multicast_to(pe, magic, plane, expert_rank, rows)
    forward_plans(pe, magic, plane)


def membership_of_sender(pe: OneSided, inbox_slot: int, sender: int) -> np.ndarray:
    """Which expert ranks get each row of one inbox slot from here: [num_rows, num_ranks] bool."""
    dims = pe.layout.dims
    header = pe.memory["inbox_header"][inbox_slot]
    routing = pe.memory["inbox_routing"][inbox_slot, : header[Header.NUM_ROWS]]
    return membership_through_switch(dims, routing["expert_ids"], int(header[Header.NUM_EXPERTS]), sender)


def rows_of_sender(pe: OneSided, inbox_slot: int, sender: int) -> list[np.ndarray]:
    """For each expert rank, the rows of one inbox slot that it gets from here, in token order."""
    return rows_of_expert_ranks(membership_of_sender(pe, inbox_slot, sender))


def rows_in_packed_order(dims: Dims, members: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """For each expert rank, its rows of all senders as positions in the slot's inbox, in order of sender, then token.

    `members[sender]`: rows of that sender and the expert rank of each. W gathers of one run, not W * W of a few rows:
    at W = 1,024 the switch would otherwise describe 10^6 runs per microbatch.
    """
    position = np.concatenate([sender * dims.dispatch_plane_tokens + row for sender, (row, _) in enumerate(members)])
    rank = np.concatenate([ranks for _, ranks in members])
    order = np.argsort(rank, kind="stable")
    return np.split(position[order], np.searchsorted(rank[order], np.arange(1, dims.num_ranks)))


def multicast_to(pe: OneSided, magic: int, plane: int, expert_rank: int, rows: np.ndarray) -> None:
    """Send one expert rank its rows of all senders in one packet, or a signal alone. `rows`: positions in the inbox."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    flag = Flag("expert_rows_arrived", (slot, plane, 0))
    total = len(rows)
    if not total:
        pe.signal(expert_rank, flag, signal_word(magic, False), magic=magic)
        return
    header = pe.memory["outbox_header"][slot, expert_rank, 0]
    header[:] = pe.memory["inbox_header"][slot * dims.num_ranks]
    header[Header.NUM_ROWS] = total
    segments = [Segment(header[None], "expert_rows_header", (slot, plane, slice(0, 1)))]
    start = first_row(dims, plane, 0, 0)
    target = (slot, slice(start, start + total))
    inbox = slice(slot * dims.num_ranks, (slot + 1) * dims.num_ranks)
    routing, tokens = pe.memory["inbox_routing"][inbox], pe.memory["inbox_tokens"][inbox]
    segments += [
        Segment(routing.reshape(-1), "expert_rows_routing", target, rows),
        Segment(tokens.reshape(-1, dims.hidden_size), "expert_rows", target, rows),
    ]
    pe.put_signal(expert_rank, segments, flag, signal_word(magic, True), magic=magic)


def forward_plans(pe: OneSided, magic: int, plane: int) -> None:
    """Hand the plan to the combine switches that sum tokens of this plane: that of its number, where both roles have as many."""
    dims = pe.layout.dims
    for combine_plane in range(dims.world.num_combine_switches):
        if plane in planes_that_meet(dims, combine_plane):
            forward_plan(pe, magic, plane, combine_plane)


def forward_plan(pe: OneSided, magic: int, plane: int, combine_plane: int) -> None:
    """Hand the headers and the routing of all senders to a combine switch, which needs to know how much to pull.

    In one physical switch this is a read of its own memory; the two emulating PEs need a put.
    """
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    segments = []
    for sender in range(dims.num_ranks):
        inbox_slot = slot * dims.num_ranks + sender
        count = int(pe.memory["inbox_header"][inbox_slot, Header.NUM_ROWS])
        target = slice(sender, sender + 1)
        segments.append(Segment(pe.memory["inbox_header"][inbox_slot][None], "plan_header", (slot, plane, target)))
        if count:
            records = pe.memory["inbox_routing"][inbox_slot, :count]
            segments.append(Segment(records, "plan_routing", (slot, plane, sender, slice(count))))
    flag = Flag("plan_arrived", (slot, plane))
    pe.put_signal(dims.world.combine_switch(combine_plane), segments, flag, signal_word(magic, True), magic=magic)
