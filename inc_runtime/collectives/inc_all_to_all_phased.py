"""INC all-to-all phased, rank side. Switch side: `dispatch_switch_phased.py` and `combine_switch_phased.py`.

The post withholds its implementation; this one is our own design. Dispatch: a rank asks for one of the G inbox slots of the
switch, puts its microbatch into it once granted, and the switch multicasts it at once. Combine: the request of a rank
carries the routing of its tokens and says at the same time that its own partial sums are ready; the switch serves G owners
per phase. Every sender keeps a subregion of its own on the expert rank (stride: the tokens of one plane), because the
sums that return to one rank prove only that the rows of that rank have been read.
"""

from __future__ import annotations

from inc_runtime.collectives.inc_all_to_all import put_tokens, stage_tokens, wait_for_token_sums
from inc_runtime.collectives.local_bypass import with_own_rows
from inc_runtime.collectives.microbatch import (
    Call,
    ReceivedRows,
    RoutedTokens,
    first_row,
    received_rows,
)
from inc_runtime.collectives.phases import join_barrier, request_grant
from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Header, Tag, has_payload, magic_of, signal_word, slot_of

__all__ = ["publish_partial_sums", "push_microbatch", "wait_for_expert_rows", "wait_for_token_sums"]


def push_microbatch(pe: OneSided, call: Call, magic: int, routed: RoutedTokens) -> None:
    """Put the microbatch into the inbox slot that each dispatch switch grants. Waits for the grants."""
    stage_tokens(pe, call, magic, routed)
    for plane in range(pe.layout.dims.dispatch_planes):
        inbox_slot = request_grant(pe, magic, plane)
        put_tokens(pe, magic, len(routed), plane, inbox_slot)


def wait_for_expert_rows(pe: OneSided, call: Call, magic: int) -> ReceivedRows:
    """Wait for the rows of every sender from every dispatch switch, then join the INC barrier if the call has one."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    keys = [(p, s) for p in range(dims.dispatch_planes) for s in range(dims.num_ranks)]
    counts = {}
    pending = list(keys)
    while pending:
        awaited = [
            Awaited(Flag("expert_rows_arrived", (slot, p, s)), magic, f"dispatch switch {p} for rank {s}")
            for p, s in pending
        ]
        arrived = {pending[i] for i in pe.wait_until_some(awaited, Tag.EXPERT_ROWS)}
        for p, s in arrived:
            word = pe.word(Flag("expert_rows_arrived", (slot, p, s)))
            header = pe.memory["expert_rows_header"][slot, p, s]
            counts[p, s] = int(header[Header.NUM_ROWS]) if brought_rows(word, magic) else 0
        pending = [key for key in pending if key not in arrived]
    if call.pipeline.barrier_after_dispatch:
        join_barrier(pe, magic)
    received = received_rows(pe, magic, [(first_row(dims, p, s, 0), counts[p, s]) for p, s in keys])
    return with_own_rows(pe, magic, received) if dims.local_bypass else received


def brought_rows(word: int, magic: int) -> bool:
    """Whether rows of this microbatch came with the word of a sender, which has arrived.

    A word of a later microbatch says no: a sender that brought rows cannot be further before their partial sums are back, one
    that brought none can, where there is no barrier.
    """
    return has_payload(word) and magic_of(word) == magic


def publish_partial_sums(pe: OneSided, call: Call, magic: int) -> None:
    """Send every combine switch the request of this rank: its partial sums are ready, and this is the routing of its tokens."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    for combine_plane in range(dims.combine_planes):
        segments = []
        for plane in range(dims.dispatch_planes):
            header = pe.memory["tokens_header"][slot, plane]
            count = int(header[Header.NUM_ROWS])
            start = plane * dims.dispatch_plane_tokens
            own = slice(pe.pe, pe.pe + 1)
            segments.append(Segment(header[None], "plan_header", (slot, plane, own)))
            if count:
                records = pe.memory["tokens_routing"][slot, start : start + count]
                segments.append(Segment(records, "plan_routing", (slot, plane, pe.pe, slice(count))))
        flag = Flag("combine_requests", (slot, pe.pe))
        switch = dims.world.combine_switch(combine_plane)
        pe.put_signal(switch, segments, flag, signal_word(magic, True), magic=magic)
