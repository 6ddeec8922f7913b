"""What passes between the layer and a collective, and the pieces that all rank-side programs share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inc_runtime.config import LayerShape, Pipeline
from inc_runtime.errors import Mismatch
from inc_runtime.heap_layout import Dims
from inc_runtime.one_sided import OneSided
from inc_runtime.protocol import Header, slot_of
from inc_runtime.routing import NO_EXPERT, expert_rank_membership


@dataclass(frozen=True)
class Call:
    """One call of one layer: equal on all ranks."""

    shape: LayerShape
    pipeline: Pipeline
    layer: int = 0


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens of one microbatch of one rank: `tokens` [n, H] as rows, `expert_ids` [n, k] int32, `weights` [n, k] float32."""

    tokens: np.ndarray
    expert_ids: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class ReceivedRows:
    """Rows of one microbatch on its expert rank.

    `rows` [capacity, H] and `routing` [capacity] are the slot itself; `valid` [n] int64 says which of its rows
    hold tokens. The partial sums overwrite those rows in place.
    """

    rows: np.ndarray
    routing: np.ndarray
    valid: np.ndarray

    def __len__(self) -> int:
        return len(self.valid)


def plane_tokens(num_tokens: int, plane: int, plane_capacity: int) -> range:
    """The tokens of a microbatch that plane number `plane` serves: contiguous, `plane_capacity` at most."""
    start = min(plane * plane_capacity, num_tokens)
    return range(start, min(start + plane_capacity, num_tokens))


def planes_that_meet(dims: Dims, combine_plane: int) -> range:
    """The dispatch planes that serve a token which this combine plane sums; all of a plane that serves none: the first."""
    first = combine_plane * dims.combine_plane_tokens
    last = min(first + dims.combine_plane_tokens, dims.microbatch_tokens) - 1
    if last < first:
        return range(1)
    return range(first // dims.dispatch_plane_tokens, last // dims.dispatch_plane_tokens + 1)


def write_header(header: np.ndarray, call: Call, magic: int, num_rows: int) -> None:
    """Fill one header: [HEADER_FIELDS] int64."""
    header[Header.NUM_ROWS] = num_rows
    header[Header.STEP] = magic
    header[Header.BOUND_TOKENS] = call.pipeline.bound_tokens
    header[Header.MICROBATCH_TOKENS] = call.pipeline.microbatch_tokens
    header[Header.NUM_EXPERTS] = call.shape.num_experts
    header[Header.TOP_K] = call.shape.top_k
    header[Header.HIDDEN_SIZE] = call.shape.hidden_size
    header[Header.LAYER] = call.layer
    header[Header.EDGE_TOKENS] = call.pipeline.edge_tokens or 0


COMPARED_FIELDS = (
    Header.STEP,
    Header.BOUND_TOKENS,
    Header.MICROBATCH_TOKENS,
    Header.NUM_EXPERTS,
    Header.TOP_K,
    Header.HIDDEN_SIZE,
    Header.LAYER,
    Header.EDGE_TOKENS,
)


def check_header(header: np.ndarray, first: np.ndarray, magic: int, dims: Dims, sender: str) -> None:
    """Refuse a header that disagrees with the heap or with `first`, another one of the same microbatch. Raises Mismatch."""
    wanted = first.copy()
    wanted[Header.STEP] = magic
    wanted[Header.MICROBATCH_TOKENS] = dims.microbatch_tokens
    wanted[Header.HIDDEN_SIZE] = dims.hidden_size
    for field in COMPARED_FIELDS:
        if header[field] != wanted[field]:
            raise Mismatch(
                f"{sender} brought {field.name.lower()} = {header[field]} to magic {magic}, "
                f"expected {wanted[field]}. Give every rank the same bound, microbatch size, shape and call order."
            )


def write_routing(pe: OneSided, call: Call, magic: int, routed: RoutedTokens) -> None:
    """Write routing records and headers of the microbatch into this rank's heap; unused columns hold expert -1."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    records = pe.memory["tokens_routing"][slot][: len(routed)]
    top_k = call.shape.top_k
    records["token"] = np.arange(len(routed))
    records["sender"] = pe.pe
    records["expert_ids"][:, top_k:] = NO_EXPERT
    records["weights"][:, top_k:] = 0
    records["expert_ids"][:, :top_k] = routed.expert_ids
    records["weights"][:, :top_k] = routed.weights
    for plane in range(dims.dispatch_planes):
        part = plane_tokens(len(routed), plane, dims.dispatch_plane_tokens)
        write_header(pe.memory["tokens_header"][slot, plane], call, magic, len(part))


def num_tokens_of(pe: OneSided, magic: int) -> int:
    """Tokens that this rank itself brought to the microbatch."""
    slot = slot_of(magic, pe.layout.dims.depth)
    return int(pe.memory["tokens_header"][slot, :, Header.NUM_ROWS].sum())


def membership_of_own_tokens(pe: OneSided, magic: int) -> np.ndarray:
    """Which expert ranks need each token of this rank's microbatch: [n, W] bool, from the records in its heap."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    records = pe.memory["tokens_routing"][slot, : num_tokens_of(pe, magic)]
    num_experts = int(pe.memory["tokens_header"][slot, 0, Header.NUM_EXPERTS])
    return expert_rank_membership(records["expert_ids"], num_experts, dims.num_ranks, selective=dims.model.selective)


def membership_through_switch(dims: Dims, expert_ids: np.ndarray, num_experts: int, owner: int) -> np.ndarray:
    """Which expert ranks get each token of `owner` from a switch: [n, W] bool; with local bypass never the owner itself."""
    membership = expert_rank_membership(expert_ids, num_experts, dims.num_ranks, selective=dims.model.selective)
    if dims.local_bypass:
        membership[:, owner] = False
    return membership


def runs_of(chosen: np.ndarray) -> list[slice]:
    """The runs of neighbours among the True of `chosen` [n] bool."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def first_row(dims: Dims, plane: int, sender: int, rows_before: int) -> int:
    """Where the rows of `sender` begin in the expert rank's slot.

    Phased and relayed models, and cut-through, give every sender a subregion of its own, so that a sender may write while
    rows of others are still read. The coalesced packet of the INC collectives packs the senders in rank order, `rows_before` rows
    of lower ranks first.
    """
    if dims.model.phased or not dims.model.in_network or dims.row_groups:
        return (plane * dims.num_ranks + sender) * dims.dispatch_plane_tokens
    return plane * dims.num_ranks * dims.dispatch_plane_tokens + rows_before


def received_rows(pe: OneSided, magic: int, runs: list[tuple[int, int]]) -> ReceivedRows:
    """The received rows of a slot from `runs` of (first row, number of rows)."""
    slot = slot_of(magic, pe.layout.dims.depth)
    parts = [np.arange(start, start + count) for start, count in runs if count]
    valid = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return ReceivedRows(pe.memory["expert_rows"][slot], pe.memory["expert_rows_routing"][slot], valid)
