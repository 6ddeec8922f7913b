"""INC All-to-All-Dispatch (Phased), switch side: G inbox slots, multicast of each microbatch as it arrives.

Waits on: `dispatch_requests`, `tokens_arrived` of the ranks that hold a place, `barrier_joined`. Signals: `dispatch_grants`,
`expert_rows_arrived` (one flag per sender, payload or not) and `barrier_released` on every rank. Reads: its inbox of G slots.
Writes: `expert_rows` in the sender's own subregion. Our own design; rank side: `collectives/inc_all_to_all_phased.py`.
"""

from __future__ import annotations

import numpy as np

from inc_runtime.collectives.microbatch import check_header, first_row
from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Header, Tag, signal_word, slot_of
from switch_emulator.dispatch_switch import rows_of_sender
from switch_emulator.phases import DispatchGrants, InNetworkBarrier
from switch_emulator.serving import Stopped, stop_words


def serve(pe: OneSided, first_magic: int) -> None:
    """Serve until every rank has stopped."""
    dims = pe.layout.dims
    grants = DispatchGrants(pe, first_magic)
    barrier = InNetworkBarrier(pe, first_magic)
    first_headers: dict[int, np.ndarray] = {}
    stops_seen: set[str] = set()
    while True:
        held = list(grants.queue.places.items())
        arrivals = [
            Awaited(Flag("tokens_arrived", (slot_of(magic, dims.depth), rank)), magic, f"rank {rank}")
            for _, (rank, magic) in held
        ]
        idle = not held and grants.in_step and barrier.in_step
        stops = stop_words(pe, grants.next_magic[0]) if idle else []
        stops = [stop for stop in stops if stop.sender not in stops_seen]
        groups = [arrivals, grants.watched(), barrier.watched(), stops]
        tag = Tag.DISPATCH_TOKENS if held else Tag.DISPATCH_REQUEST
        ready = pe.wait_until_some([a for group in groups for a in group], tag, idle=idle)
        bounds = np.cumsum([len(group) for group in groups])
        for position in ready:
            kind = int(np.searchsorted(bounds, position, side="right"))
            index = position - (int(bounds[kind - 1]) if kind else 0)
            if kind == 0:
                place, request = held[index]
                multicast(pe, place, request, first_headers)
                grants.queue.close(request)
            elif kind == 1:
                grants.requested(index)
            elif kind == 2:
                barrier.joined(index)
            else:
                stops_seen.add(stops[index].sender)
        if len(stops_seen) == dims.num_ranks:
            raise Stopped
        grants.grant_free_places()


def multicast(pe: OneSided, place: int, request: tuple[int, int], first_headers: dict[int, np.ndarray]) -> None:
    """Send the microbatch in inbox slot `place` to every expert rank, then complete the reads of the slot."""
    dims = pe.layout.dims
    sender, magic = request
    slot, plane = slot_of(magic, dims.depth), dims.world.plane_of(pe.pe)
    header = pe.memory["inbox_header"][place]
    first = first_headers.setdefault(magic, header.copy())
    first_headers.pop(magic - dims.depth, None)
    check_header(header, first, magic, dims, f"rank {sender}")
    with pe.stage("regroup", magic, rows=int(header[Header.NUM_ROWS])):
        rows_for = rows_of_sender(pe, place, sender)
    flag = Flag("expert_rows_arrived", (slot, plane, sender))
    outboxes, start = pe.memory["outbox_header"][slot, :, sender], first_row(dims, plane, sender, 0)
    routing, tokens = pe.memory["inbox_routing"][place], pe.memory["inbox_tokens"][place]
    for expert_rank, rows in enumerate(rows_for):
        if not len(rows):
            pe.signal(expert_rank, flag, signal_word(magic, False), magic=magic)
            continue
        outbox = outboxes[expert_rank]
        outbox[:] = header
        outbox[Header.NUM_ROWS] = len(rows)
        target = (slot, slice(start, start + len(rows)))
        segments = [
            Segment(outbox[None], "expert_rows_header", (slot, plane, slice(sender, sender + 1))),
            Segment(routing, "expert_rows_routing", target, rows),
            Segment(tokens, "expert_rows", target, rows),
        ]
        pe.put_signal(expert_rank, segments, flag, signal_word(magic, True), magic=magic)
    pe.quiet()
