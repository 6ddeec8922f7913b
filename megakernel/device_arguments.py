"""Structures that the host hands to the kernels of the layer, defined once: `layer_arguments.h` and the numpy dtypes.

Symbols: H hidden, I intermediate, E experts of this rank, k choices of a token, R rows that a rank can receive in one microbatch.
"""

from __future__ import annotations

import numpy as np

from inc_runtime.device.arguments import c_struct
from megakernel.stages import Unit

GROUPED_SETS = 3
"""Microbatches whose grouped rows live at once: one in the products, one before them, one in its reduce."""
MAX_LOCAL_EXPERTS = 64
"""Experts of one rank; bounded by the shared memory that the order of tiles takes."""
MAX_EXPERTS = 1024
"""Experts of the layer: the router marks those that are taken in one 32-bit word per lane."""
MAX_TOP_K = 32
TILE_ROWS = 128
TALLY_BITS = 28
"""Grouped rows of one microbatch, and tiles of one launch, stay below 2^28; above them a word carries the magic, below 2^36."""
PIECE_ROWS = 16
"""Rows that one warp copies before it says so."""
TRACED_STAGES = ("route", "dispatch", "group", "matmul_gate_up", "matmul_down", "reduce", "combine", "wait")
"""Stages as the trace numbers them; SwiGLU runs inside matmul_gate_up. `wait` is time in which a warp has nothing to do."""
TRACED_UNITS = (Unit.VECTOR, Unit.MATRIX)

TENSOR_MAP = np.dtype([("words", "<u8", (16,))])
"""CUtensorMap: bf16, boxes of 64 columns, 128-byte swizzle."""

EXPERT_MATMUL_ARGUMENTS = np.dtype(
    [
        ("input_rows", TENSOR_MAP),  # [num_rows, H], boxes of 64 rows; unused where rows are gathered
        ("gate_up_weights", TENSOR_MAP),  # [E * 2I, H], boxes of 128 rows; per expert I gate rows, then I up rows
        ("activation_rows", TENSOR_MAP),  # [num_rows, I], boxes of 64 rows; loads and stores
        ("down_weights", TENSOR_MAP),  # [E * H, I], boxes of 128 rows
        ("output_rows", TENSOR_MAP),  # [num_rows, H], boxes of 64 rows
        ("token_rows", "<u8"),  # [., H] bf16: what row_to_token counts
        ("row_to_token", "<u8"),  # int32 [num_rows]: grouped row -> row of token_rows; -1 beyond an expert's rows
        ("grouped_rows", "<u8"),  # bf16 [num_rows, H]: what input_rows describes; only where rows are copied
        ("activation", "<u8"),  # bf16 [num_rows, I]
        ("output", "<u8"),  # bf16 [num_rows, H]
        ("routing_weight", "<u8"),  # float32 [num_rows] or 0: output rows are multiplied by it before rounding
        ("row_tile_arrival", "<u8"),  # uint64 [num_row_tiles] or 0: input rows of a tile are there at PIECES_PER_TILE
        ("activation_flags", "<u8"),  # uint64 [num_row_tiles, I / 128]: one writer each, grow with the magic, never reset
        ("tiles_done", "<u8"),  # uint32 [num_row_tiles] or 0: column tiles of MatMul 2 that are written
        ("ticket_word", "<u8"),  # uint64, one word for all blocks (tile_scheduler.cuh); grows, never reset
        ("error_record", "<u8"),  # uint64: 0, or what a wait that ran out of time was for (bounded_wait.cuh)
        ("abort_word", "<u8"),  # uint64 or 0: other than 0 once some PE has given up; waits for words then end
        ("wait_limit_clocks", "<i8"),
        ("num_experts", "<i4"),  # E, 0 to MAX_LOCAL_EXPERTS
        ("hidden", "<i4"),  # a multiple of 256
        ("intermediate", "<i4"),  # a multiple of 128
        ("lag_tiles", "<i4"),  # tile_scheduler.cuh
        ("abort_value", "<u8"),  # what a wait that ran out of time writes to the abort word
    ]
)
"""Structures with tensor maps are aligned to 128 bytes, hence the padding of those below."""

PRODUCTS_ARGUMENTS = np.dtype(
    [
        ("matmul", EXPERT_MATMUL_ARGUMENTS),
        ("expert_row_offset", "<u8"),  # int32 [E]: first grouped row of each expert
        ("expert_row_count", "<u8"),  # int32 [E]: 0 allowed
        ("magic", "<u8"),  # of this launch; larger than of any earlier one on the same words
        ("padding", "<u8", (13,)),
    ]
)

GROUPING = np.dtype(
    [
        ("tally", "<u8", (MAX_LOCAL_EXPERTS,)),  # magic << TALLY_BITS | rows counted so far; grows, never reset
        ("count", "<i4", (MAX_LOCAL_EXPERTS,)),  # rows of each expert
        ("offset", "<i4", (MAX_LOCAL_EXPERTS,)),  # first grouped row, a multiple of TILE_ROWS
        ("num_row_tiles", "<i4"),  # of all experts
        ("padding", "<i4"),
        ("grouped", "<u8"),  # magic: counts, offsets, row_to_token and position are written
    ]
)

LAYER_ARGUMENTS = np.dtype(
    [
        ("matmul", EXPERT_MATMUL_ARGUMENTS),
        # the call
        ("tokens", "<u8"),  # bf16 [num_tokens, H]
        ("output", "<u8"),  # bf16 [num_tokens, H]
        ("logits", "<u8"),  # float32 or bf16 [num_tokens, num_experts], or 0: the choices are given
        ("bias", "<u8"),  # float32 [num_experts] or 0
        ("expert_ids", "<u8"),  # int32 [num_tokens, k]: given, or where the router writes them
        ("weights", "<u8"),  # float32 [num_tokens, k]
        # scratch of this rank
        ("groupings", "<u8"),  # GROUPING [GROUPED_SETS]
        ("position", "<u8"),  # int32 [GROUPED_SETS, R, k]: grouped row of each choice, -1 where another rank has the expert
        ("trace", "<u8"),  # TRACE_EVENT [num_blocks, TRACED_UNITS, trace_length], or 0
        ("token_count", "<u8"),  # int32 on the GPU: how many of the tokens count, read by the launch; 0: num_tokens
        ("num_tokens", "<i4"),
        ("bound_tokens", "<i4"),
        ("num_experts", "<i4"),
        ("top_k", "<i4"),
        ("layer", "<i4"),
        ("num_microbatches", "<i4"),
        ("edge_tokens", "<i4"),
        ("ramp_steps", "<i4"),
        ("logits_are_bfloat16", "<i4"),
        ("sigmoid", "<i4"),
        ("renormalize", "<i4"),
        ("first_expert", "<i4"),  # of this rank
        ("row_capacity", "<i4"),  # R
        ("grouped_capacity", "<i4"),  # grouped rows of one set, a multiple of TILE_ROWS
        ("trace_length", "<i4"),
        ("group_lag", "<i4"),  # steps between the send of a microbatch and each of its later stages: pipeline.py, device_lags
        ("reduce_lag", "<i4"),
        ("combine_lag", "<i4"),
        ("padding", "<i4", (26,)),
    ]
)

TRACE_EVENT = np.dtype(
    [("begin_ns", "<u8"), ("end_ns", "<u8"), ("clocks", "<u8"), ("magic", "<u8"), ("stage", "<u4"), ("rows", "<u4")]
)

STRUCTS = {
    "CUtensorMap": TENSOR_MAP,
    "ExpertMatmulArguments": EXPERT_MATMUL_ARGUMENTS,
    "ProductsArguments": PRODUCTS_ARGUMENTS,
    "Grouping": GROUPING,
    "LayerArguments": LAYER_ARGUMENTS,
    "TraceEvent": TRACE_EVENT,
}


def header_text() -> str:
    """The text of `layer_arguments.h`."""
    constants = {
        "GROUPED_SETS": GROUPED_SETS,
        "MAX_LOCAL_EXPERTS": MAX_LOCAL_EXPERTS,
        "MAX_EXPERTS": MAX_EXPERTS,
        "MAX_TOP_K": MAX_TOP_K,
        "TILE_ROWS": TILE_ROWS,
        "TALLY_BITS": TALLY_BITS,
        "PIECE_ROWS": PIECE_ROWS,
        "PIECES_PER_TILE": TILE_ROWS // PIECE_ROWS,
    }
    stages = "".join(f"    {name.upper()} = {number},\n" for number, name in enumerate(TRACED_STAGES))
    return "\n".join(
        [
            "// Generated from megakernel/device_arguments.py. Do not edit.",
            "#pragma once",
            "#include <cuda.h>",
            "#include <cstdint>",
            "namespace inc {",
            *(f"constexpr int {name} = {value};" for name, value in constants.items()),
            f"\nenum class TracedStage : uint32_t {{\n{stages}}};\n",
            *(c_struct(name, dtype, STRUCTS) for name, dtype in STRUCTS.items() if name != "CUtensorMap"),
            "}  // namespace inc",
            "",
        ]
    )


HEADERS = {"layer_arguments.h": header_text()}
