"""INC all-to-all, rank side. Switch side: `switch_emulator/dispatch_switch.py` and `combine_switch.py`.

Dispatch, a push: the rank puts its microbatch once, in token order, into its slot on each dispatch switch; the switch
multicasts. Combine, a pull: the rank writes its partial sums over the rows it received and signals; the switch reads
them, adds them and returns one finished row per token. Source: post, INC All-to-All-Dispatch and -Combine.

The same four functions exist for every communication model. INC AllGather-ReduceScatter runs these programs, with a
switch that sends every token to every rank.

Why no rank calls `quiet`: a slot is rewritten only after the sums of the microbatch that used it came back from every
plane. They come back only once every rank has published, hence received its rows, hence after the switch had read the
tokens of all senders. The last sum proves the first read.
"""

from __future__ import annotations

import numpy as np

from inc_runtime.collectives.cut_through import put_groups, wait_for_groups
from inc_runtime.collectives.local_bypass import add_own_partial_sums, keep_own_rows, rows_to_put, with_own_rows
from inc_runtime.collectives.microbatch import (
    Call,
    ReceivedRows,
    RoutedTokens,
    first_row,
    plane_tokens,
    received_rows,
    write_routing,
)
from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Header, Tag, has_payload, signal_word, slot_of


def stage_tokens(pe: OneSided, call: Call, magic: int, routed: RoutedTokens) -> None:
    """Write the microbatch into this rank's heap, where the put reads it."""
    slot = slot_of(magic, pe.layout.dims.depth)
    pe.memory["tokens"][slot, : len(routed)] = routed.tokens
    write_routing(pe, call, magic, routed)
    if pe.layout.dims.local_bypass:
        keep_own_rows(pe, magic, routed)


def put_tokens(pe: OneSided, magic: int, num_tokens: int, plane: int, inbox_slot: int) -> None:
    """Put one plane's share of the microbatch into `inbox_slot` of its dispatch switch: one packet.

    A rank without tokens sends the header alone and a word without payload, so that the switch can compare bounds. With local
    bypass all records go, so that tokens keep their places, but only those rows that another rank needs.
    """
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    part = plane_tokens(num_tokens, plane, dims.dispatch_plane_tokens)
    own = slice(part.start, part.stop)
    segments = [Segment(pe.memory["tokens_header"][slot, plane][None], "inbox_header", (slice(inbox_slot, inbox_slot + 1),))]
    if len(part):
        segments.append(Segment(pe.memory["tokens_routing"][slot, own], "inbox_routing", (inbox_slot, slice(len(part)))))
        for run in rows_to_put(pe, magic, part):
            rows = pe.memory["tokens"][slot, part.start + run.start : part.start + run.stop]
            segments.append(Segment(rows, "inbox_tokens", (inbox_slot, run)))
    flag = Flag("tokens_arrived", (slot, pe.pe))
    pe.put_signal(dims.world.dispatch_switch(plane), segments, flag, signal_word(magic, len(part) > 0), magic=magic)


def push_microbatch(pe: OneSided, call: Call, magic: int, routed: RoutedTokens) -> None:
    """Put the microbatch into this rank's slot on every dispatch switch. Returns before it has landed."""
    dims = pe.layout.dims
    stage_tokens(pe, call, magic, routed)
    for plane in range(dims.dispatch_planes):
        inbox_slot = slot_of(magic, dims.depth) * dims.num_ranks + pe.pe
        if dims.row_groups:
            put_groups(pe, magic, len(routed), plane, inbox_slot)
            continue
        put_tokens(pe, magic, len(routed), plane, inbox_slot)


def wait_for_expert_rows(pe: OneSided, call: Call, magic: int) -> ReceivedRows:
    """Wait for the coalesced packet of every dispatch switch. Rows are packed by sender, in token order."""
    dims = pe.layout.dims
    if dims.row_groups:
        return wait_for_groups(pe, magic)
    slot = slot_of(magic, dims.depth)
    runs = []
    for plane in range(dims.dispatch_planes):
        sender = dims.world.name_of(dims.world.dispatch_switch(plane))
        word = pe.wait_until(Awaited(Flag("expert_rows_arrived", (slot, plane, 0)), magic, sender), Tag.EXPERT_ROWS)
        count = int(pe.memory["expert_rows_header"][slot, plane, 0, Header.NUM_ROWS]) if has_payload(word) else 0
        runs.append((first_row(dims, plane, 0, 0), count))
    received = received_rows(pe, magic, runs)
    return with_own_rows(pe, magic, received) if dims.local_bypass else received


def publish_partial_sums(pe: OneSided, call: Call, magic: int) -> None:
    """Tell every combine switch that the partial sums stand in `expert_rows`; also when there are none."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    for plane in range(dims.combine_planes):
        flag = Flag("partial_sums_ready", (slot, pe.pe))
        pe.signal(dims.world.combine_switch(plane), flag, signal_word(magic, True), magic=magic)


def wait_for_token_sums(pe: OneSided, call: Call, magic: int, num_tokens: int) -> np.ndarray:
    """Wait for the sums of this rank's tokens from every combine switch: [num_tokens, H], a view of the slot.

    Every plane is awaited, also one that had no token: its word closes the slot. With local bypass the own partial sums are
    added, in a new array.
    """
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    for plane in range(dims.combine_planes):
        sender = dims.world.name_of(dims.world.combine_switch(plane))
        pe.wait_until(Awaited(Flag("token_sums_arrived", (slot, plane)), magic, sender), Tag.TOKEN_SUMS)
    if dims.local_bypass:
        return add_own_partial_sums(pe, magic, num_tokens)
    return pe.memory["token_sums"][slot, :num_tokens]
