"""All-to-All through a relay switch, or straight where the world has none, rank side. Switch side: `relay_switch.py`.

Dispatch: the rank packs a copy of each token per destination and sends W messages; chunk 0 of each carries the number of
rows and the routing of its tokens, so that no exchange of counts comes first. Combine: it returns the partial sums of each
token rank's tokens to that rank, which adds the W of them (global reduce). Source: post, All-to-All.
AllGather-ReduceScatter runs the same programs with every row to every rank. With local bypass the message of a rank to itself is
written in place, and its own partial sums are added where they stand, in their place of the rank order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from inc_runtime.collectives.microbatch import (
    Call,
    ReceivedRows,
    RoutedTokens,
    check_header,
    first_row,
    membership_of_own_tokens,
    plane_tokens,
    received_rows,
    write_routing,
)
from inc_runtime.collectives.relayed import num_chunks, send_message
from inc_runtime.heap_layout import Dims
from inc_runtime.one_sided import Awaited, Flag, OneSided
from inc_runtime.protocol import Header, Role, Tag, has_payload, slot_of
from inc_runtime.routing import rows_of_expert_ranks


def rows_of_own_tokens(pe: OneSided, magic: int) -> list[np.ndarray]:
    """For each expert rank, the tokens of this rank's microbatch that it needs, in token order."""
    return rows_of_expert_ranks(membership_of_own_tokens(pe, magic))


def pack(pe: OneSided, call: Call, magic: int, routed: RoutedTokens) -> list[np.ndarray]:
    """The extra stage before the dispatch: lay out a copy of each token per destination, in token order."""
    slot = slot_of(magic, pe.layout.dims.depth)
    write_routing(pe, call, magic, routed)
    rows_for = rows_of_own_tokens(pe, magic)
    with pe.stage("pack", magic, rows=sum(map(len, rows_for))):
        for destination, rows in enumerate(rows_for):
            pe.memory["packed_tokens"][slot, destination, : len(rows)] = routed.tokens[rows]
    return rows_for


def push_microbatch(
    pe: OneSided,
    call: Call,
    magic: int,
    routed: RoutedTokens,
    before_plane: Callable[[int], object] = lambda plane: None,
) -> None:
    """Send each rank its tokens, the next rank first. `before_plane` lets the phased form wait for a grant."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    rows_for = pack(pe, call, magic, routed)
    records = pe.memory["tokens_routing"][slot]
    for plane in range(dims.dispatch_planes):
        before_plane(plane)
        part = plane_tokens(len(routed), plane, dims.dispatch_plane_tokens)
        for step in range(dims.num_ranks):
            destination = (pe.pe + 1 + step) % dims.num_ranks
            rows = rows_for[destination]
            low, high = np.searchsorted(rows, (part.start, part.stop))
            send_message(
                pe,
                Role.DISPATCH_SWITCH,
                plane,
                destination,
                magic,
                header=pe.memory["tokens_header"][slot, plane],
                source=pe.memory["packed_tokens"][slot, destination],
                rows=np.arange(low, high),
                routing=records[rows[low:high]],
            )


def wait_for_message(pe: OneSided, flags: str, index: tuple[int, ...], magic: int, tag: Tag, count: int | None) -> bool:
    """Wait for all chunks of one message of `count` rows. `count` None: chunk 0 says how many. Returns has_payload."""
    dims = pe.layout.dims
    role_pe = dims.world.dispatch_switch if flags == "expert_chunk_arrived" else dims.world.combine_switch
    sender = f"rank {index[-1]}"
    if not dims.direct:
        sender = f"{dims.world.name_of(role_pe(index[1]))} for {sender}"
    word = pe.wait_until(Awaited(Flag(flags, (*index, 0)), magic, sender), tag)
    if count is None:
        count = int(pe.memory["expert_rows_header"][(*index, Header.NUM_ROWS)]) if has_payload(word) else 0
    for number in range(1, num_chunks(count, dims.rows_per_chunk)):
        pe.wait_until(Awaited(Flag(flags, (*index, number)), magic, sender), tag)
    return has_payload(word)


def wait_for_expert_rows(pe: OneSided, call: Call, magic: int) -> ReceivedRows:
    """Wait for the messages of all ranks. Every sender has a subregion of its own."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    runs = []
    for plane in range(dims.dispatch_planes):
        for sender in range(dims.num_ranks):
            index = (slot, plane, sender)
            payload = wait_for_message(pe, "expert_chunk_arrived", index, magic, Tag.EXPERT_ROWS, None)
            header = pe.memory["expert_rows_header"][index]
            if payload:
                check_header(header, pe.memory["tokens_header"][slot, plane], magic, dims, f"rank {sender}")
            count = int(header[Header.NUM_ROWS]) if payload else 0
            header[Header.NUM_ROWS] = count
            runs.append((first_row(dims, plane, sender, 0), count))
    return received_rows(pe, magic, runs)


def rows_to_return(pe: OneSided, magic: int, owner: int, combine_plane: int) -> np.ndarray:
    """Positions in the slot of the partial sums that `owner` awaits from this rank through one combine relay."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    low, high = combine_range(dims, combine_plane)
    parts = []
    for plane in range(dims.dispatch_planes):
        count = int(pe.memory["expert_rows_header"][slot, plane, owner, Header.NUM_ROWS])
        start = first_row(dims, plane, owner, 0)
        tokens = pe.memory["expert_rows_routing"][slot, start : start + count]["token"]
        parts.append(start + np.flatnonzero((tokens >= low) & (tokens < high)))
    return np.concatenate(parts)


def combine_range(dims: Dims, combine_plane: int) -> tuple[int, int]:
    """The tokens of a microbatch that one combine switch serves: first, and one past the last."""
    return combine_plane * dims.combine_plane_tokens, (combine_plane + 1) * dims.combine_plane_tokens


def return_partial_sums(pe: OneSided, call: Call, magic: int, owner: int, combine_plane: int) -> None:
    """Send `owner` the partial sums of its tokens through one combine relay; with local bypass none to this rank itself."""
    dims = pe.layout.dims
    if dims.local_bypass and owner == pe.pe:
        return
    slot = slot_of(magic, dims.depth)
    send_message(
        pe,
        Role.COMBINE_SWITCH,
        combine_plane,
        owner,
        magic,
        source=pe.memory["expert_rows"][slot],
        rows=rows_to_return(pe, magic, owner, combine_plane),
    )


def publish_partial_sums(pe: OneSided, call: Call, magic: int) -> None:
    """Return the partial sums to every token rank, the next rank first; a rank that sent nothing gets a signal alone."""
    dims = pe.layout.dims
    for plane in range(dims.combine_planes):
        for step in range(dims.num_ranks):
            return_partial_sums(pe, call, magic, (pe.pe + 1 + step) % dims.num_ranks, plane)


def own_rows(dims: Dims, plane: int, rows: np.ndarray) -> np.ndarray:
    """Of `rows`, the tokens that one combine relay serves."""
    low, high = combine_range(dims, plane)
    return rows[(rows >= low) & (rows < high)]


def wait_for_partial_sums(pe: OneSided, call: Call, magic: int) -> list[np.ndarray]:
    """Wait for the partial sums of all ranks that send them. Returns the tokens of each rank's sums."""
    dims = pe.layout.dims
    rows_for = rows_of_own_tokens(pe, magic)
    for plane in range(dims.combine_planes):
        for expert_rank, rows in enumerate(rows_for):
            if dims.local_bypass and expert_rank == pe.pe:
                continue
            index = (slot_of(magic, dims.depth), plane, expert_rank)
            count = len(own_rows(dims, plane, rows))
            wait_for_message(pe, "partial_chunk_arrived", index, magic, Tag.TOKEN_SUMS, count)
    return rows_for


def wait_for_token_sums(pe: OneSided, call: Call, magic: int, num_tokens: int) -> np.ndarray:
    """Wait for the partial sums of all ranks and add them in rank order: [num_tokens, H], a new array."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    rows_for = wait_for_partial_sums(pe, call, magic)
    sums = np.zeros((num_tokens, dims.hidden_size), np.float32)
    with pe.stage("global_reduce", magic, rows=num_tokens):
        for plane in range(dims.combine_planes):
            for expert_rank, rows in enumerate(rows_for):
                own = own_rows(dims, plane, rows)
                if dims.local_bypass and expert_rank == pe.pe:
                    partial = pe.memory["expert_rows"][slot, rows_to_return(pe, magic, expert_rank, plane)]
                else:
                    partial = pe.memory["received_partial_sums"][slot, plane, expert_rank, : len(own)]
                sums[own] += partial.astype(np.float32)
    return sums.astype(dims.row_dtype)
