"""Structures that the host hands to the kernels, defined once: the C text and the numpy dtype come from the same table.

The compile cache writes `header_text()` beside the object files as `arguments.h`. `heap_argument` fills the tables of places from
`HeapLayout`, so that no kernel knows an offset or a stride; the ids of the regions are those of `protocol.h`.
"""

from __future__ import annotations

import enum

import numpy as np

from inc_runtime.heap_layout import REGIONS, HeapLayout
from inc_runtime.protocol import HEADER_FIELDS, RELAY_CELLS, Role

MAX_RANKS = 32
"""Ranks of one job: a warp watches one flag per lane, and a mask of ranks is one 32-bit word."""
MAX_PES = 40
MAX_AXES = 5
MAX_DEPTH = 64
MAX_SWITCH_BLOCKS = 64
PLACES = {Role.COMPUTE_RANK: "rank_places", Role.DISPATCH_SWITCH: "dispatch_places", Role.COMBINE_SWITCH: "combine_places"}


class ErrorKind(enum.IntEnum):
    """What an error record of the device says."""

    TIMEOUT = 1
    MISMATCH = 2
    BAD_EXPERT = 3
    BAD_LOGIT = 4


class Packet(enum.IntEnum):
    """Packets that several blocks fill: the counter of blocks that have finished, per slot."""

    PUSH = 0
    DISPATCH = 1
    PUBLISH = 2
    COMBINE = 3
    LEAVE = 4
    # Meetings of all blocks of a rank in the plain models.
    ROWS_COUNTED = 5
    ROWS_PLACED = 6
    SUMS_WRITTEN = 7
    ROUTED = 10
    # And in the phased models.
    PLACE_GRANTED = 8
    PHASE_OPENED = 9
    # Of the layer, by set of grouped rows in place of the slot.
    ROWS_TALLIED = 11
    ROWS_GROUPED = 12


class ExchangeMode(enum.IntEnum):
    """Which half of the exchange a test runs."""

    BOTH = 0
    DISPATCH = 1
    COMBINE = 2


def _struct(*fields: tuple) -> np.dtype:
    return np.dtype(list(fields), align=True)


PLACE = _struct(("offset", "<u8"), ("stride", "<u8", (MAX_AXES,)))

ERROR_RECORD = _struct(
    ("state", "<u4"),  # 1 once the record is whole
    ("kind", "<u4"),
    ("tag", "<u4"),
    ("missing", "<u4"),  # mask of senders
    ("magic", "<u8"),
    ("expected", "<u8"),
    ("seen", "<u8", (MAX_RANKS,)),
    ("waited_ns", "<u8"),
    ("sender", "<i4"),
    ("field", "<i4"),
)

JOB = _struct(("magic", "<u8"), ("sender", "<i4"), ("place", "<i4"))

WORKSPACE = _struct(
    ("error_claimed", "<u4"),
    ("rows_sent", "<u8"),  # token rows that left this PE, each copy counted
    ("rows_pulled", "<u8"),
    ("finished", "<u8", (len(Packet), MAX_DEPTH)),  # blocks that have finished a packet, by packet and slot
    ("met", "<u8", (len(Packet), MAX_DEPTH)),  # magic of the last meeting of all blocks, by packet and slot
    ("total_rows", "<u4", (MAX_DEPTH, MAX_RANKS)),  # rows of a microbatch for each rank
    ("received_first", "<i4", (MAX_DEPTH, MAX_RANKS + 1)),  # received rows of lower senders, where each has its own run
    # Relayed models: chunks sent before a microbatch, by relay and slot; on a relay, the last chunk forwarded from each cell, and
    # the stop words that the last launch ended with.
    ("chunks_before", "<u8", (2, MAX_DEPTH)),
    ("forwarded", "<u8", (RELAY_CELLS,)),
    ("stops_seen", "<u8", (MAX_RANKS,)),
    # Phased models. On a switch: the last request of each rank, the last barrier, and the microbatches of single ranks that its
    # blocks serve one by one, by number; on a relay, what a request still lacks; on a rank, the place that it was granted.
    ("requested", "<u8", (MAX_RANKS,)),
    ("barrier_released", "<u8"),
    ("jobs", JOB, (MAX_DEPTH,)),
    ("job_done", "<u8", (MAX_DEPTH,)),
    ("jobs_done", "<u8"),
    ("first_headers", "<i8", (MAX_DEPTH, HEADER_FIELDS)),
    ("chunks_left", "<u8", (MAX_DEPTH, MAX_RANKS)),
    ("phase_closed", "<u8", (MAX_DEPTH, MAX_RANKS)),
    ("granted_place", "<i4", (MAX_DEPTH,)),
    # Among the blocks of a switch, by slot: what the first block has decided, and the rows that each block has counted.
    ("opened", "<u8", (MAX_DEPTH,)),  # magic << 16 | blocks that take part; no block: all ranks have stopped
    ("counted", "<u8", (MAX_DEPTH, MAX_SWITCH_BLOCKS)),  # magic
    ("counted_rows", "<u4", (MAX_DEPTH, MAX_SWITCH_BLOCKS, MAX_RANKS)),
)

HEAP = _struct(
    *((name, PLACE, (len(REGIONS[role]),)) for role, name in PLACES.items()),
    ("base", "<u8", (MAX_PES,)),  # this PE's mapping of every PE's slab
    ("workspace", "<u8"),
    ("error_record", "<u8"),  # pinned host memory
    ("accumulators", "<u8"),  # private region of a combine switch
    ("landing", "<u8"),  # NVSHMEM link: one row per warp and rank of a combine switch
    # Plain models, on a rank, by slot: rows for each rank in groups of 32 tokens; the row of each token in the message to each
    # rank, or -1; the token of each row.
    ("group_rows", "<u8"),  # int32 [D, ceil(m_b / 32), W]
    ("row_of_token", "<u8"),  # int32 [D, m_b, W]
    ("token_of_row", "<u8"),  # int32 [D, W, m_b]
    ("ranks_of_token", "<u8"),  # in-network models with local bypass: uint32 [D, m_b], the ranks that need each own token
    ("wait_limit_ns", "<u8"),
    ("port_ps_per_kib", "<u8"),  # what a KiB costs on a port of a rank; 0: no pacing
    ("clock_offset_ns", "<i8"),  # of the host's clock against this GPU's
    ("row_bytes", "<u4"),
    ("record_bytes", "<u4"),
    ("pe", "<i4"),
    ("num_pes", "<i4"),
    ("num_ranks", "<i4"),
    ("dispatch_switch", "<i4"),
    ("combine_switch", "<i4"),  # of plane 0 on a rank, of its own plane on a switch; planes are neighbours
    ("plane", "<i4"),
    ("plane_tokens", "<i4"),
    ("depth", "<i4"),
    ("microbatch_tokens", "<i4"),
    ("hidden_size", "<i4"),
    ("top_k", "<i4"),
    ("selective", "<i4"),
    ("relay_cells", "<i4"),
    ("rows_per_chunk", "<i4"),
    ("phased", "<i4"),
    ("ranks_per_phase", "<i4"),
    ("row_group_tokens", "<i4"),  # with cut-through
    ("row_groups", "<i4"),
    ("barrier_after_dispatch", "<i4"),  # of the call, where the model is phased
)

SWITCH_MOMENT = _struct(("magic", "<u8"), ("arrived", "<u8"), ("done", "<u8"), ("num_tokens", "<u8"))

SWITCH_ARGUMENTS = _struct(
    ("timeline", "<u8"),  # SwitchMoment [timeline_length], nanoseconds of this GPU's clock; 0: none
    ("timeline_length", "<u4"),
    ("rank_order", "<i4"),
    ("replay_plan", "<i4"),  # benchmark of the combine alone: the plan of an earlier microbatch serves again
)

EXCHANGE_MOMENT = _struct(("push", "<u8"), ("rows", "<u8"), ("publish", "<u8"), ("sums", "<u8"))

EXCHANGE_RESULT = _struct(
    ("wrong_rows", "<u8"),
    ("wrong_sums", "<u8"),
    ("clock_begin", "<u8"),
    ("timer_begin", "<u8"),
    ("clock_end", "<u8"),
    ("timer_end", "<u8"),
)

EXCHANGE_ARGUMENTS = _struct(
    # the call
    ("tokens", "<u8"),  # [num_tokens, H] bfloat16
    ("expert_ids", "<u8"),  # [num_tokens, k] int32
    ("weights", "<u8"),  # [num_tokens, k] float32
    ("output", "<u8"),  # [num_tokens, H] bfloat16
    ("num_tokens", "<i4"),
    ("bound_tokens", "<i4"),
    ("num_experts", "<i4"),
    ("top_k", "<i4"),
    ("layer", "<i4"),
    ("num_microbatches", "<i4"),
    ("edge_tokens", "<i4"),
    ("ramp_steps", "<i4"),
    # the test
    ("mode", "<i4"),
    ("verify", "<i4"),  # make tokens from a hash, and check every received row and sum
    ("seed", "<u4"),
    ("delay_ns", "<u4"),
    ("timeline", "<u8"),  # ExchangeMoment [num_microbatches], clock cycles; 0: none
    ("result", "<u8"),
)

STRUCTS = {
    "Place": PLACE,
    "ErrorRecord": ERROR_RECORD,
    "Job": JOB,
    "Workspace": WORKSPACE,
    "Heap": HEAP,
    "SwitchMoment": SWITCH_MOMENT,
    "SwitchArguments": SWITCH_ARGUMENTS,
    "ExchangeMoment": EXCHANGE_MOMENT,
    "ExchangeResult": EXCHANGE_RESULT,
    "ExchangeArguments": EXCHANGE_ARGUMENTS,
}

C_TYPES = {"<u4": "uint32_t", "<i4": "int32_t", "<u8": "uint64_t", "<i8": "int64_t"}


def c_struct(name: str, dtype: np.dtype, known: dict[str, np.dtype] = STRUCTS) -> str:
    """The C text of one structure; members whose dtype is in `known` take its name as their type."""
    lines = []
    for field in dtype.names or ():
        member = dtype.fields[field][0]  # type: ignore[index]
        base, shape = (member.subdtype[0], member.shape) if member.subdtype else (member, ())
        c_type = next((s for s, d in known.items() if d == base), None) or C_TYPES[base.str]
        lines.append(f"    {c_type} {field}{''.join(f'[{n}]' for n in shape)};")
    return f"struct {name} {{\n" + "\n".join(lines) + f"\n}};\nstatic_assert(sizeof({name}) == {dtype.itemsize});\n"


def c_enum(kind: type[enum.IntEnum]) -> str:
    """The C text of an enum of the same name."""
    members = "".join(f"    {member.name} = {int(member)},\n" for member in kind)
    return f"enum class {kind.__name__} : int {{\n{members}}};\n"


def header_text() -> str:
    """The text of `arguments.h`: limits, enums and structures."""
    limits = {"MAX_RANKS": MAX_RANKS, "MAX_PES": MAX_PES, "MAX_DEPTH": MAX_DEPTH, "MAX_SWITCH_BLOCKS": MAX_SWITCH_BLOCKS}
    return "\n".join(
        [
            "// Generated from inc_runtime/device/arguments.py. Do not edit.",
            "#pragma once",
            "#include <cstdint>",
            "namespace inc {",
            *(f"constexpr int {name} = {value};" for name, value in limits.items()),
            "",
            *(c_enum(kind) for kind in (ErrorKind, Packet, ExchangeMode)),
            *(c_struct(name, dtype) for name, dtype in STRUCTS.items()),
            "}  // namespace inc",
            "",
        ]
    )


def heap_argument(layout: HeapLayout, pe: int, bases: list[int], *, wait_limit_s: float) -> np.ndarray:
    """The Heap structure of one PE, pointers to private memory still 0. `bases`: this PE's addresses of all slabs."""
    dims, heap = layout.dims, np.zeros((), HEAP)
    for role, table in REGIONS.items():
        for place, region in zip(heap[PLACES[role]], table, strict=True):
            if region.private or not region.when(dims.model):
                continue
            place["offset"] = layout.offset(role, region.name)
            shape, stride = region.shape(dims), region.dtype(dims).itemsize
            for axis in reversed(range(len(shape))):
                place["stride"][axis] = stride
                stride *= shape[axis]
    heap["base"][: len(bases)] = bases
    heap["wait_limit_ns"] = int(wait_limit_s * 1e9)
    heap["row_bytes"] = 2 * dims.hidden_size
    heap["record_bytes"] = dims.routing_dtype.itemsize
    heap["pe"], heap["num_pes"], heap["num_ranks"] = pe, dims.world.num_pes, dims.num_ranks
    plane = heap["plane"] = dims.world.plane_of(pe)
    heap["dispatch_switch"], heap["combine_switch"] = dims.world.dispatch_switch(plane), dims.world.combine_switch(plane)
    heap["plane_tokens"] = dims.dispatch_plane_tokens
    for name in ("depth", "microbatch_tokens", "hidden_size", "top_k", "relay_cells", "rows_per_chunk", "ranks_per_phase"):
        heap[name] = getattr(dims, name)
    heap["row_group_tokens"], heap["row_groups"] = dims.row_group_tokens, dims.row_groups
    heap["selective"], heap["phased"] = dims.model.selective, dims.model.phased
    heap["barrier_after_dispatch"] = 1
    return heap
