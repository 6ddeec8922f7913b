"""The structure that the Baseline's kernels take, defined once: the C text and the numpy dtype come from the same table."""

from __future__ import annotations

import enum

import numpy as np

from inc_runtime.config import LayerShape, Router
from inc_runtime.device.arguments import MAX_RANKS, c_enum, c_struct

HEADER_BYTES = 128
"""Of a block, before its packets: the number of packets (int32), then nothing."""
MAX_EXPERTS = 256
MAX_TOP_K = 32
"""A warp holds one choice of a token in each lane."""


class RouterKind(enum.IntEnum):
    """How the route kernel chooses and weighs. The bias counts for the choice alone."""

    SOFTMAX = 0
    SIGMOID = 1
    SIGMOID_WITH_BIAS = 2

    @classmethod
    def of(cls, shape: LayerShape, has_bias: bool) -> RouterKind:
        if shape.router is Router.SOFTMAX:
            return cls.SOFTMAX
        return cls.SIGMOID_WITH_BIAS if has_bias else cls.SIGMOID


class BaselineError(enum.IntEnum):
    """What the error word says in its upper half; the lower half is the token, or the block that waited."""

    NONE = 0
    BAD_LOGIT = 1
    BAD_EXPERT = 2
    BAD_WEIGHT = 3
    GRID_BARRIER = 4


BASELINE_ARGUMENTS = np.dtype(
    [
        # the call
        ("tokens", "<u8"),  # [num_tokens, H] bfloat16
        ("logits", "<u8"),  # [num_tokens, E] float32
        ("bias", "<u8"),  # [E] float32
        ("given_ids", "<u8"),  # [num_tokens, k] int32
        ("given_weights", "<u8"),  # [num_tokens, k] float32
        ("output", "<u8"),  # [num_tokens, H] bfloat16
        # tensors between the stages
        ("expert_ids", "<u8"),  # [num_tokens, k] int32
        ("weights", "<u8"),  # [num_tokens, k] float32
        ("token_ranks", "<u8"),  # [num_tokens] uint32: the ranks that get the token
        ("slots", "<u8"),  # [num_tokens, W] int32
        ("grouped", "<u8"),  # [pairs, H] bfloat16
        ("pair_positions", "<u8"),  # [received rows, k] int32
        ("expert_ends", "<u8"),  # [local experts] int32
        ("projections", "<u8"),  # [pairs, 2I] bfloat16
        ("activations", "<u8"),  # [pairs, I] bfloat16
        ("expert_outputs", "<u8"),  # [pairs, H] bfloat16
        # by rank: packets out; rows, records (k ids, k weights) and their number in; partial sums out and in
        ("send_blocks", "<u8", (MAX_RANKS,)),
        ("received_rows", "<u8", (MAX_RANKS,)),
        ("received_records", "<u8", (MAX_RANKS,)),
        ("received_counts", "<u8", (MAX_RANKS,)),
        ("partial_blocks", "<u8", (MAX_RANKS,)),
        ("returned_blocks", "<u8", (MAX_RANKS,)),
        # what blocks of one launch tell each other
        ("sent_counts", "<u8"),  # [W] int32
        ("group_counts", "<u8"),  # [local experts, blocks] int32
        ("group_barrier", "<u8"),
        ("error_word", "<u8"),  # pinned host memory
        # sizes
        ("num_tokens", "<i4"),
        ("num_experts", "<i4"),
        ("top_k", "<i4"),
        ("hidden_size", "<i4"),
        ("intermediate_size", "<i4"),
        ("num_ranks", "<i4"),
        ("smaller_share", "<i4"),  # E div W: the experts of most ranks
        ("larger_ranks", "<i4"),  # E mod W: the first ranks hold one more
        ("first_expert", "<i4"),
        ("num_local_experts", "<i4"),
        ("row_stride", "<i4"),  # bytes from one received row to the next, and of their records; a packet is both
        ("record_stride", "<i4"),
        ("router", "<i4"),
        ("renormalize", "<i4"),
    ],
    align=True,
)


def header_text() -> str:
    """The text of `baseline_arguments.h`."""
    limits = {"MAX_RANKS": MAX_RANKS, "HEADER_BYTES": HEADER_BYTES, "MAX_EXPERTS": MAX_EXPERTS}
    return "\n".join(
        [
            "// Generated from megakernel/baseline_arguments.py. Do not edit.",
            "#pragma once",
            "#include <cstdint>",
            "namespace inc {",
            *(f"constexpr int {name} = {value};" for name, value in limits.items()),
            c_enum(RouterKind),
            c_enum(BaselineError),
            c_struct("BaselineArguments", BASELINE_ARGUMENTS),
            "}  // namespace inc",
            "",
        ]
    )


def record_bytes(top_k: int) -> int:
    """Bytes of one routing record: k ids and k weights."""
    return 8 * top_k


def packet_bytes(hidden_size: int, top_k: int) -> int:
    """Bytes from one packet to the next: a row, its record, and what is missing to whole 16-byte words."""
    return -(-(2 * hidden_size + record_bytes(top_k)) // 16) * 16


def error_of(word: int, rank: int) -> str | None:
    """What the error word of a rank means, or None. A sentence with the remedy."""
    kind, detail = BaselineError(word >> 32), word & 0xFFFFFFFF
    sentences = {
        BaselineError.BAD_LOGIT: f"router_logits of token {detail} hold a value that is not finite. "
        "Look for an overflow in the layers before.",
        BaselineError.BAD_EXPERT: f"expert_ids of token {detail} hold an expert that does not exist. "
        "Use -1 for a choice that does not count.",
        BaselineError.BAD_WEIGHT: f"weights of token {detail} hold a value that is not finite.",
        BaselineError.GRID_BARRIER: f"block {detail} waited 2 s for the others of its launch. "
        "Leave this process the SMs that it counted on.",
    }
    return f"rank {rank}, an earlier call: {sentences[kind]}" if kind in sentences else None
