"""How a rank sends through a relay switch: a message is a run of rows to one rank, cut into chunks of at most 32 KiB.

Each chunk is one put_signal into a cell of the relay, which forwards it as it lands. A sender owns `relay_cells` cells per
relay, uses them in turn, and writes a cell again only once the credit of that cell says that the chunk in it has left. Each cell
has a word of its own in both directions, so a relay may serve cells in any order. A message without rows is one
chunk without payload, which the relay passes on as a signal alone.
"""

from __future__ import annotations

import numpy as np

from inc_runtime.one_sided import Awaited, Flag, OneSided, Segment
from inc_runtime.protocol import Chunk, Tag, signal_word


def num_chunks(num_rows: int, rows_per_chunk: int) -> int:
    """Chunks of a message; an empty one is one chunk."""
    return max(1, -(-num_rows // rows_per_chunk))


def send_message(
    pe: OneSided,
    relay: int,
    destination: int,
    magic: int,
    *,
    source: np.ndarray,
    rows: np.ndarray,
    header: np.ndarray | None = None,
    routing: np.ndarray | None = None,
) -> None:
    """Send `source[rows]` to `destination` through relay PE `relay`. Waits for credits only.

    A dispatch message brings its header and its records: `routing[i]` belongs to row i of the message.
    """
    dims = pe.layout.dims
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
