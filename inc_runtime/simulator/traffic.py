"""Routing of a simulated layer: which experts every token of every microbatch chooses, and what follows from it.

Kinds: uniform, Zipf, hot expert, hot rank, or a recorded trace. Draws are seeded per microbatch, so that event and fast
mode, and every communication model, see the same tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from inc_runtime.config import LayerShape
from inc_runtime.errors import ConfigurationError
from inc_runtime.routing import NO_EXPERT, rank_of_experts

CHUNK_TOKENS = 8192


class RoutingKind(enum.Enum):
    """How tokens choose experts."""

    UNIFORM = "uniform"
    ZIPF = "zipf"
    HOT_EXPERT = "hot_expert"
    HOT_RANK = "hot_rank"
    RECORDED = "recorded"


@dataclass(frozen=True)
class RoutingSpec:
    """`exponent`: of Zipf's law. `hot_factor`: how much more popular the hot expert, or each expert of the hot rank, is.

    `trace`: for RECORDED, a .npy file of expert ids, [num_tokens, k] integers; it is repeated as often as needed.
    """

    kind: RoutingKind = RoutingKind.UNIFORM
    exponent: float = 1.0
    hot_factor: float = 16.0
    seed: int = 0
    trace: Path | None = None


def popularity(spec: RoutingSpec, shape: LayerShape, num_ranks: int) -> np.ndarray:
    """Relative weight of each expert: [num_experts] float64, mean 1. Experts of a Zipf law are shuffled by the seed."""
    weights: np.ndarray = np.ones(shape.num_experts)
    if spec.kind is RoutingKind.ZIPF:
        weights = 1.0 / np.arange(1, shape.num_experts + 1) ** spec.exponent
        np.random.default_rng(spec.seed).shuffle(weights)
    elif spec.kind is RoutingKind.HOT_EXPERT:
        weights[0] = spec.hot_factor
    elif spec.kind is RoutingKind.HOT_RANK:
        weights[list(shape.experts_of_rank(0, num_ranks))] = spec.hot_factor
    return weights / weights.mean()


def draw_experts(rng: np.random.Generator, weights: np.ndarray, num_tokens: int, top_k: int) -> np.ndarray:
    """`top_k` distinct experts for each token, by weight without replacement: [num_tokens, top_k] int32."""
    num_experts = len(weights)
    if np.ptp(weights) == 0 and top_k * (top_k - 1) < 2 * num_experts:
        return _draw_uniform(rng, num_experts, num_tokens, top_k)
    keys = np.log(weights)
    chosen = np.empty((num_tokens, top_k), np.int32)
    for start in range(0, num_tokens, CHUNK_TOKENS):
        part = chosen[start : start + CHUNK_TOKENS]
        gumbel = keys - np.log(rng.standard_exponential((len(part), num_experts)))
        part[...] = np.argpartition(gumbel, num_experts - top_k, axis=1)[:, num_experts - top_k :]
    return chosen


def _draw_uniform(rng: np.random.Generator, num_experts: int, num_tokens: int, top_k: int) -> np.ndarray:
    """Uniform subsets by rejection: redraw every token with a repeated expert."""
    chosen = rng.integers(0, num_experts, (num_tokens, top_k), np.int32)
    todo = np.arange(num_tokens)
    while len(todo):
        ordered = np.sort(chosen[todo], axis=1)
        todo = todo[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
        chosen[todo] = rng.integers(0, num_experts, (len(todo), top_k), np.int32)
    return chosen


def load_trace(path: Path, shape: LayerShape) -> np.ndarray:
    """Expert ids of a recorded run: [num_tokens, k] int32. Raises ConfigurationError."""
    try:
        ids = np.load(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"trace = {path}: it cannot be read ({error}). Save expert ids with numpy.save.") from None
    if ids.ndim != 2 or ids.shape[1] != shape.top_k or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigurationError(f"trace = {path}: {ids.dtype} {ids.shape}; it must be integers [num_tokens, {shape.top_k}].")
    if ids.min() < NO_EXPERT or ids.max() >= shape.num_experts:
        raise ConfigurationError(f"trace = {path}: ids {ids.min()} to {ids.max()}; they must be -1 to {shape.num_experts - 1}.")
    return ids.astype(np.int32)


@dataclass(frozen=True)
class MicrobatchLoads:
    """What one microbatch asks of every rank; the tokens of a rank are `n`, in rank order.

    `tokens` [W]: tokens of each rank. `rows` [W, W]: tokens of the first rank that the second needs. `pairs` [W]:
    (row, expert) pairs; `padded` [W]: the same with every expert rounded up to whole tiles; `active` [W]: experts
    with rows. `leaf_up` [W]: tokens of each rank with an expert under another leaf; `leaf_rows` [W, leaves]: tokens of each
    rank that another leaf needs, each once; `leaf_cross` [leaves, leaves]: rows from one leaf to ranks of another.
    `at_home` [W]: tokens of each rank whose experts are all on that rank. `plane_rows` [planes, W, W]: `rows` of the tokens
    that each plane serves; float where they are shared out.
    """

    tokens: np.ndarray
    rows: np.ndarray
    pairs: np.ndarray
    padded: np.ndarray
    active: np.ndarray
    leaf_up: np.ndarray
    leaf_rows: np.ndarray
    leaf_cross: np.ndarray
    at_home: np.ndarray
    plane_rows: np.ndarray

    @cached_property
    def leaf_down(self) -> np.ndarray:
        """Tokens of other leaves that each leaf needs: [leaves]."""
        return self.leaf_rows.sum(axis=0)

    @cached_property
    def received(self) -> np.ndarray:
        """Rows that each expert rank receives: [W]."""
        return self.rows.sum(axis=0)

    @cached_property
    def sent_copies(self) -> np.ndarray:
        """Rows that each rank would send without a multicast: [W]."""
        return self.rows.sum(axis=1)


@dataclass(frozen=True)
class UnitLoads:
    """What the units of the ranks are asked for in several microbatches, [M, W] each; fields as in `MicrobatchLoads`."""

    tokens: np.ndarray
    sent_copies: np.ndarray
    received: np.ndarray
    pairs: np.ndarray
    padded: np.ndarray
    active: np.ndarray


def stack_loads(loads: Sequence[MicrobatchLoads]) -> UnitLoads:
    """The loads of the units in all microbatches."""
    return UnitLoads(*(np.stack([getattr(one, f.name) for one in loads]) for f in fields(UnitLoads)))


def loads_of(
    expert_ids: np.ndarray,
    shape: LayerShape,
    num_ranks: int,
    *,
    selective: bool,
    tile_rows: int,
    ranks_per_leaf: int,
    plane_tokens: Sequence[int] = (),
) -> MicrobatchLoads:
    """Loads of `expert_ids` [W, n, k] (-1 counts for nothing); `ranks_per_leaf` W means one switch.

    `plane_tokens`: how many tokens of a rank each plane serves, in order; all of them for one plane.
    """
    num_tokens = expert_ids.shape[1]
    owner = np.append(rank_of_experts(shape.num_experts, num_ranks), num_ranks)
    counts = np.bincount(expert_ids.ravel() + 1, minlength=shape.num_experts + 1)[1:]
    tiles = -(-counts // tile_rows) * tile_rows
    pairs, padded, active = (np.bincount(owner[:-1], x, num_ranks).astype(np.int64) for x in (counts, tiles, counts > 0))
    tokens = np.full(num_ranks, num_tokens)
    if selective:
        rows = _distinct(owner[expert_ids], num_ranks)
    else:
        rows = np.full((num_ranks, num_ranks), num_tokens)
    leaf_of = np.arange(num_ranks) // ranks_per_leaf
    num_leaves = int(leaf_of[-1]) + 1
    leaf_up, leaf_rows = np.zeros(num_ranks, np.int64), np.zeros((num_ranks, num_leaves), np.int64)
    leaf_cross = np.zeros((num_leaves, num_leaves), np.int64)
    if num_leaves > 1:
        leaf_ids = np.append(leaf_of, num_leaves)[owner[expert_ids]] if selective else None
        reached = num_tokens * np.ones((num_ranks, num_leaves), np.int64) if leaf_ids is None else _distinct(leaf_ids, num_leaves)
        own = leaf_of[:, None] == np.arange(num_leaves)
        leaf_rows = np.where(own, 0, reached)
        leaf_up = tokens.copy() if leaf_ids is None else _leaves_own(leaf_ids, leaf_of, num_leaves)
        edges = np.arange(0, num_ranks, ranks_per_leaf)
        leaf_cross = np.add.reduceat(np.add.reduceat(rows, edges, axis=0), edges, axis=1)
        np.fill_diagonal(leaf_cross, 0)
    at_home = np.zeros(num_ranks, np.int64)
    if selective:
        own = (owner[expert_ids] == np.arange(num_ranks)[:, None, None]) | (expert_ids == NO_EXPERT)
        at_home = own.all(axis=2).sum(axis=1)
    plane_rows = rows[None]
    if len(plane_tokens) > 1:
        cuts = np.cumsum(plane_tokens)[:-1]
        parts = [_distinct(owner[part], num_ranks) for part in np.split(expert_ids, cuts, axis=1)]
        plane_rows = np.stack(parts) if selective else rows[None] * np.array(plane_tokens)[:, None, None] // max(1, num_tokens)
    return MicrobatchLoads(tokens, rows, pairs, padded, active, leaf_up, leaf_rows, leaf_cross, at_home, plane_rows)


def _distinct(places: np.ndarray, num_places: int) -> np.ndarray:
    """How many tokens of each rank need each place: `places` [W, n, k], `num_places` stands for none; [W, num_places]."""
    ordered = np.sort(places, axis=2)
    first = np.ones(ordered.shape, bool)
    first[:, :, 1:] = ordered[:, :, 1:] != ordered[:, :, :-1]
    flat = (np.arange(len(places))[:, None, None] * (num_places + 1) + ordered)[first]
    counts = np.bincount(flat, minlength=len(places) * (num_places + 1))
    return counts.reshape(len(places), num_places + 1)[:, :num_places]


def _leaves_own(leaf_ids: np.ndarray, leaf_of: np.ndarray, num_leaves: int) -> np.ndarray:
    """Tokens of each rank with at least one expert under another leaf: [W]."""
    other = (leaf_ids != leaf_of[:, None, None]) & (leaf_ids < num_leaves)
    return other.any(axis=2).sum(axis=1)
