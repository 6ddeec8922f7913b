"""What a record that a kernel left in pinned memory says, as the exception that the host backend raises for the same cause."""

from __future__ import annotations

import numpy as np

from inc_runtime.device.arguments import MAX_RANKS, ErrorKind
from inc_runtime.errors import ArrivalTimeout, ConfigurationError, Mismatch, WaitRecord
from inc_runtime.heap_layout import Dims
from inc_runtime.protocol import Header, Tag, World, slot_of


def error_of_record(record: np.void, name: str, world: World, dims: Dims) -> Exception:
    """The exception for a whole ERROR_RECORD of the PE `name`: ArrivalTimeout, Mismatch or ConfigurationError."""
    tag, magic, sender = Tag(int(record["tag"])), int(record["magic"]), int(record["sender"])
    kind, seen_value = ErrorKind(int(record["kind"])), int(record["seen"][:1].view(np.int64)[0])
    if kind is ErrorKind.MISMATCH:
        field = Header(int(record["field"])).name.lower()
        return Mismatch(
            f"{world.name_of(sender)} brought {field} = {seen_value} to magic {magic}, expected {record['expected']}. "
            "Give every rank the same bound, microbatch size, shape and call order."
        )
    if kind is ErrorKind.BAD_LOGIT:
        return ConfigurationError(
            f"router_logits[{record['field']}, {seen_value}] of {world.name_of(sender)} is not a finite number. "
            "Look for an overflow in the layers before."
        )
    if kind is ErrorKind.BAD_EXPERT:
        return ConfigurationError(
            f"{world.name_of(sender)} sent token {record['field']} of magic {magic} to expert {seen_value}, "
            f"expected -1 to {int(record['expected']) - 1}. Use -1 for a choice that does not count."
        )
    awaited = awaited_senders(world, tag, dims, sender)
    wait = WaitRecord(
        name,
        tag.name,
        magic - 1,
        slot_of(magic, dims.depth),
        magic,
        int(record["expected"]),
        {who: int(record["seen"][i]) for i, who in enumerate(awaited)},
        list(dict.fromkeys(who for i, who in enumerate(awaited) if int(record["missing"]) >> i & 1)),
        int(record["waited_ns"]) * 1e-9,
    )
    return ArrivalTimeout(wait, "Raise INC_WAIT_LIMIT_S if it is only slow, or look at what the missing PE printed.")


def awaited_senders(world: World, tag: Tag, dims: Dims, sender: int) -> list[str]:
    """Who raises the flags that a wait with this tag watches, in the order of its lanes.

    `sender`: who raises all of them, where the lanes do not stand for ranks, else -1. A relay or a phased switch raises a flag
    for each rank.
    """
    if dims.direct:
        return [world.name_of(rank) for rank in range(world.num_ranks)]
    dispatch, combine = world.name_of(world.dispatch_switch(0)), world.name_of(world.combine_switch(0))
    per_rank = {
        Tag.EXPERT_ROWS: dispatch if dims.senders_per_flag > 1 or not dims.model.in_network else "",
        Tag.TOKEN_SUMS: "" if dims.model.in_network else combine,
        Tag.RELAY_PHASE: combine,
    }
    if switch := per_rank.get(tag):
        ranks = range(world.num_ranks) if sender < 0 else [sender] * MAX_RANKS
        return [f"{switch} for rank {rank}" for rank in ranks]
    if tag in (Tag.EXPERT_ROWS, Tag.COMBINE_PLAN):
        return [dispatch]
    if tag is Tag.TOKEN_SUMS:
        return [combine]
    if tag in (Tag.RELAY_CREDIT, Tag.DISPATCH_GRANT, Tag.DISPATCH_BARRIER) and sender >= 0:
        return [world.name_of(sender)]
    return [world.name_of(rank) for rank in range(world.num_ranks)]
