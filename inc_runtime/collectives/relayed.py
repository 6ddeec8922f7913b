"""How a rank sends through a relay switch: a message is a run of rows to one rank, cut into chunks of at most 32 KiB.

Each chunk is one put_signal into a cell of the relay, which forwards it as it lands. A sender owns `relay_cells` cells per
relay, uses them in turn, and writes a cell again only once the credit of that cell says that the chunk in it has left. Each cell
has a word of its own in both directions, so a relay may serve cells in any order. A message without rows is one
chunk without payload, which the relay passes on as a signal alone. In a world without switches a message goes straight to its
destination, whole: one put_signal, or a signal alone where it has no rows. With local bypass the dispatch message of a rank
to itself is written where the relay would write it, and the rank raises its words itself.
"""

from __future__ import annotations

import numpy as np

from inc_runtime.collectives.microbatch import first_row
from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Chunk, Header, Role, Tag, signal_word, slot_of


def num_chunks(num_rows: int, rows_per_chunk: int) -> int:
    """Chunks of a message; an empty one is one chunk."""
    return max(1, -(-num_rows // rows_per_chunk))


def send_message(
    pe: OneSided,
    role: Role,
    plane: int,
    destination: int,
    magic: int,
    *,
    source: np.ndarray,
    rows: np.ndarray,
    header: np.ndarray | None = None,
    routing: np.ndarray | None = None,
) -> None:
    """Send `source[rows]` to `destination` through the relay of `role` and `plane`, or straight. Waits for credits only.

    A dispatch message brings its header and its records: `routing[i]` belongs to row i of the message.
    """
    dims = pe.layout.dims
    if dims.direct:
        _send_whole(pe, destination, magic, header, source, rows, routing)
        return
    if dims.local_bypass and destination == pe.pe:
        assert header is not None and routing is not None, "partial sums of own tokens are added in place"
        _keep_message(pe, plane, magic, header, source, rows, routing)
        return
    relay = dims.world.dispatch_switch(plane) if role is Role.DISPATCH_SWITCH else dims.world.combine_switch(plane)
    total = num_chunks(len(rows), dims.rows_per_chunk)
    for number in range(total):
        start = number * dims.rows_per_chunk
        part = rows[start : start + dims.rows_per_chunk]
        fields = {
            Chunk.DESTINATION: destination,
            Chunk.MAGIC: magic,
            Chunk.NUMBER: number,
            Chunk.NUM_CHUNKS: total,
            Chunk.FIRST_ROW: start,
            Chunk.NUM_ROWS: len(part),
            Chunk.MESSAGE_ROWS: len(rows),
        }
        records = None if routing is None else routing[start : start + len(part)]
        _send_chunk(pe, relay, magic, fields, header, source, part, records)


def _keep_message(
    pe: OneSided, plane: int, magic: int, header: np.ndarray, source: np.ndarray, rows: np.ndarray, routing: np.ndarray
) -> None:
    """Write the dispatch message of this rank to itself in place. Every chunk has its word, as if it had been relayed."""
    dims = pe.layout.dims
    slot, base = slot_of(magic, dims.depth), first_row(dims, plane, pe.pe, 0)
    if len(rows):
        own = pe.memory["expert_rows_header"][slot, plane, pe.pe]
        own[:] = header
        own[Header.NUM_ROWS] = len(rows)
        pe.memory["expert_rows_routing"][slot, base : base + len(rows)] = routing
        pe.memory["expert_rows"][slot, base : base + len(rows)] = source[rows]
    for number in range(num_chunks(len(rows), dims.rows_per_chunk)):
        flag = Flag("expert_chunk_arrived", (slot, plane, pe.pe, number))
        pe.signal(pe.pe, flag, signal_word(magic, len(rows) > 0), magic=magic)


def _send_whole(
    pe: OneSided,
    destination: int,
    magic: int,
    header: np.ndarray | None,
    source: np.ndarray,
    rows: np.ndarray,
    routing: np.ndarray | None,
) -> None:
    """Put a message where a relay would: a dispatch message, which has a header, into expert_rows, another into the owner's sums.

    No credit is needed: a slot is used again once the sums of all ranks are back, which they send after they have read it.
    """
    dims = pe.layout.dims
    slot, count = slot_of(magic, dims.depth), len(rows)
    flags = "expert_chunk_arrived" if header is not None else "partial_chunk_arrived"
    flag = Flag(flags, (slot, 0, pe.pe, 0))
    if not count:
        pe.signal(destination, flag, signal_word(magic, False), magic=magic)
        return
    if header is None:
        segments = [Segment(source, "received_partial_sums", (slot, 0, pe.pe, slice(count)), rows)]
    else:
        own = pe.memory["message_header"][slot, destination]
        own[:] = header
        own[Header.NUM_ROWS] = count
        base = first_row(dims, 0, pe.pe, 0)
        run = (slot, slice(base, base + count))
        assert routing is not None
        segments = [
            Segment(own[None], "expert_rows_header", (slot, 0, slice(pe.pe, pe.pe + 1))),
            Segment(routing, "expert_rows_routing", run),
            Segment(source, "expert_rows", run, rows),
        ]
    pe.put_signal(destination, segments, flag, signal_word(magic, True), magic=magic)


def _send_chunk(
    pe: OneSided,
    relay: int,
    magic: int,
    fields: dict[Chunk, int],
    header: np.ndarray | None,
    source: np.ndarray,
    rows: np.ndarray,
    records: np.ndarray | None,
) -> None:
    index = relay - pe.world.num_ranks
    pe.memory["chunks_sent"][index] += 1
    chunk = int(pe.memory["chunks_sent"][index])
    cells = pe.layout.dims.relay_cells
    cell = chunk % cells
    if chunk > cells:
        credit = Awaited(Flag("relay_credits", (index, cell)), chunk - cells, pe.world.name_of(relay))
        pe.wait_until(credit, Tag.RELAY_CREDIT, microbatch=magic - 1)
    own = pe.memory["chunk_header"][index, cell]
    for field, value in fields.items():
        own[field] = value
    here = (pe.pe, slice(cell, cell + 1))
    segments = [Segment(own[None], "relay_chunk", here)]
    if header is not None:
        segments.append(Segment(header[None], "relay_header", here))
    if len(rows):
        there = (pe.pe, cell, slice(len(rows)))
        segments.append(Segment(source, "relay_rows", there, rows))
        if records is not None:
            segments.append(Segment(records, "relay_routing", there))
    flag = Flag("relay_arrived", (pe.pe, cell))
    word = signal_word(chunk, len(rows) > 0)
    pe.put_signal(relay, segments, flag, word, magic=magic, part=fields[Chunk.NUMBER])
