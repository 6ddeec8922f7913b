"""Cut-through dispatch, rank side: a microbatch goes in groups, each with a word of its own.

Switched on by `Pipeline.row_group_tokens`. Switch side: `switch_emulator/dispatch_switch_cut_through.py`, which
forwards each group as it arrives and waits for no other rank. So that a group needs no count of what came before it,
token t of a sender stands at place t of the sender's run on every expert rank (stride: the tokens of one plane); the
records of all its tokens go to every rank and say which of the places hold a row. The header comes with every group, as
they come in any order. Every word is raised in every microbatch, also that of a group without tokens: else a word of a
later microbatch in the slot would be taken for it.

Why a slot is free once its sums are back: the combine switch returns them when all ranks have published, hence have
seen the words of all groups, which the dispatch switch raises after it has read them. The runs of the senders never
meet.
"""

from __future__ import annotations

import numpy as np

from inc_runtime.collectives.local_bypass import rows_to_put
from inc_runtime.collectives.microbatch import ReceivedRows, check_header, first_row, plane_tokens
from inc_runtime.heap_layout import Dims
from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Header, Tag, has_payload, signal_word, slot_of
from inc_runtime.routing import expert_rank_membership


def group_tokens(dims: Dims, group: int, num_tokens: int) -> range:
    """The tokens of one group, of a plane's share of `num_tokens`."""
    start = min(group * dims.row_group_tokens, num_tokens)
    return range(start, min(start + dims.row_group_tokens, num_tokens))


def put_groups(pe: OneSided, magic: int, num_tokens: int, plane: int, inbox_slot: int) -> None:
    """Put one plane's share of the microbatch into `inbox_slot` of its dispatch switch: one packet a group."""
    dims = pe.layout.dims
    slot, share = slot_of(magic, dims.depth), plane_tokens(num_tokens, plane, dims.dispatch_plane_tokens)
    for group in range(dims.row_groups):
        part = group_tokens(dims, group, len(share))
        own = range(share.start + part.start, share.start + part.stop)
        header = pe.memory["tokens_header"][slot, plane][None]
        segments = [Segment(header, "inbox_header", (slice(inbox_slot, inbox_slot + 1),))]
        if len(part):
            records = pe.memory["tokens_routing"][slot, own.start : own.stop]
            segments.append(Segment(records, "inbox_routing", (inbox_slot, slice(part.start, part.stop))))
        for run in rows_to_put(pe, magic, own):
            rows = pe.memory["tokens"][slot, own.start + run.start : own.start + run.stop]
            target = slice(part.start + run.start, part.start + run.stop)
            segments.append(Segment(rows, "inbox_tokens", (inbox_slot, target)))
        flag, word = Flag("group_arrived", (slot, pe.pe, group)), signal_word(magic, len(part) > 0)
        pe.put_signal(dims.world.dispatch_switch(plane), segments, flag, word, magic=magic, part=group)


def wait_for_groups(pe: OneSided, magic: int) -> ReceivedRows:
    """Wait for every group of every sender from every dispatch switch. Rows in order of plane, sender, token."""
    dims = pe.layout.dims
    slot, places = slot_of(magic, dims.depth), []
    for plane in range(dims.dispatch_planes):
        name = dims.world.name_of(dims.world.dispatch_switch(plane))
        own_header = pe.memory["tokens_header"][slot, plane]
        for sender in range(dims.num_ranks):
            words = [
                pe.wait_until(
                    Awaited(Flag("expert_group_arrived", (slot, plane, sender, group)), magic, f"{name} for rank {sender}"),
                    Tag.EXPERT_ROWS,
                )
                for group in range(dims.row_groups)
            ]
            header = own_header
            if not (dims.local_bypass and sender == pe.pe):
                header = pe.memory["expert_rows_header"][slot, plane, sender]
                if not has_payload(words[0]):
                    header[Header.NUM_ROWS] = 0
                    continue
                check_header(header, own_header, magic, dims, f"rank {sender}")
            start, count = first_row(dims, plane, sender, 0), int(header[Header.NUM_ROWS])
            ids = pe.memory["expert_rows_routing"][slot, start : start + count]["expert_ids"]
            membership = expert_rank_membership(ids, int(header[Header.NUM_EXPERTS]), dims.num_ranks, selective=True)
            places.append(start + np.flatnonzero(membership[:, pe.pe]))
    valid = np.concatenate(places) if places else np.empty(0, np.int64)
    return ReceivedRows(pe.memory["expert_rows"][slot], pe.memory["expert_rows_routing"][slot], valid)
