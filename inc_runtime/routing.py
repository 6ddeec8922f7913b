"""Routing: logits to experts and weights, and which rows an expert rank receives. numpy only: switches need no torch.

Sources: GShard and Switch Transformers for top-k gating; the sigmoid router with a selection bias is DeepSeek-V3's.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from inc_runtime.config import LayerShape, Router
from inc_runtime.errors import ConfigurationError

NO_EXPERT = -1


def route(logits: np.ndarray, shape: LayerShape, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Choose the experts of each token.

    `logits`: [num_tokens, num_experts], any float dtype; `bias`: [num_experts] float32, added to the sigmoid scores for
    the selection alone. Returns `expert_ids` [num_tokens, top_k] int32, in falling order of score, the lower id first
    on ties, and `weights` [num_tokens, top_k] float32. Softmax and sigmoid are monotonic, so without a bias experts are
    chosen on the logits themselves, where rounding makes no ties; scores with a bias are computed in float64.
    """
    logits = np.asarray(logits, np.float32)
    if shape.router is Router.SOFTMAX:
        selection = logits
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        scores = exponentials / exponentials.sum(axis=1, keepdims=True)
    else:
        with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
            scores = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
        selection = logits if bias is None else scores + bias
    expert_ids = np.argsort(-selection, axis=1, kind="stable")[:, : shape.top_k].astype(np.int32)
    weights = np.take_along_axis(scores, expert_ids, axis=1)
    if shape.renormalize:
        smallest = np.finfo(np.float32).tiny  # sigmoids of logits below -103 are all 0: weigh nothing, not NaN
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), smallest)
    return expert_ids, weights.astype(np.float32)


def check_router_logits(logits: np.ndarray, shape: LayerShape) -> None:
    """Refuse logits that cannot be routed. Raises ConfigurationError that names the first bad value."""
    if logits.ndim != 2 or logits.shape[1] != shape.num_experts:
        raise ConfigurationError(
            f"router_logits has shape {tuple(logits.shape)}, expected [num_tokens, {shape.num_experts}]. "
            "Pass one logit per expert and token."
        )
    bad = np.argwhere(~np.isfinite(np.asarray(logits, np.float32)))
    if len(bad):
        token, expert = bad[0]
        raise ConfigurationError(
            f"router_logits[{token}, {expert}] = {logits[token, expert]}, expected a finite number "
            f"({len(bad)} bad values in all). Look for an overflow in the layers before."
        )


def check_expert_ids(expert_ids: np.ndarray, weights: np.ndarray, num_tokens: int, shape: LayerShape) -> None:
    """Refuse experts that do not exist. An id of -1 is allowed in any position and contributes nothing."""
    expected = (num_tokens, shape.top_k)
    for name, array in (("expert_ids", expert_ids), ("weights", weights)):
        if array.shape != expected:
            raise ConfigurationError(
                f"{name} has shape {tuple(array.shape)}, expected {list(expected)}: one column per chosen expert. "
                "Fill unused columns with -1."
            )
    if not np.issubdtype(expert_ids.dtype, np.integer):
        raise ConfigurationError(f"expert_ids has dtype {expert_ids.dtype}, expected int32 or int64.")
    bad = np.argwhere((expert_ids < NO_EXPERT) | (expert_ids >= shape.num_experts))
    if len(bad):
        token, column = bad[0]
        raise ConfigurationError(
            f"expert_ids[{token}, {column}] = {expert_ids[token, column]}, expected -1 to {shape.num_experts - 1} "
            f"({len(bad)} bad values in all). Use -1 for a choice that does not count."
        )
    bad = np.argwhere(~np.isfinite(weights) & (expert_ids != NO_EXPERT))
    if len(bad):
        token, column = bad[0]
        raise ConfigurationError(f"weights[{token}, {column}] = {weights[token, column]}, expected a finite number.")


@lru_cache(maxsize=64)
def rank_of_experts(num_experts: int, num_ranks: int) -> np.ndarray:
    """The rank that holds each expert: [num_experts] int32, read-only and kept. The rule is `LayerShape.experts_of_rank`."""
    shape = LayerShape(num_experts, 1, 8, 1)
    owners = np.empty(num_experts, np.int32)
    for rank in range(num_ranks):
        owned = shape.experts_of_rank(rank, num_ranks)
        owners[owned.start : owned.stop] = rank
    owners.setflags(write=False)
    return owners


def expert_rank_membership(
    expert_ids: np.ndarray, num_experts: int, num_ranks: int, *, selective: bool
) -> np.ndarray:
    """Which expert ranks need each token: [num_tokens, num_ranks] bool.

    `expert_ids`: [num_tokens, top_k], -1 where a choice does not count. Not `selective`: every rank gets every token.
    """
    num_tokens = len(expert_ids)
    if not selective:
        return np.ones((num_tokens, num_ranks), bool)
    membership = np.zeros((num_tokens, num_ranks + 1), bool)
    ranks = np.where(expert_ids == NO_EXPERT, num_ranks, rank_of_experts(num_experts, num_ranks)[expert_ids])
    np.put_along_axis(membership, ranks, True, axis=1)
    return membership[:, :num_ranks]


def rows_of_expert_ranks(membership: np.ndarray) -> list[np.ndarray]:
    """For each expert rank, the rows it receives, in token order: num_ranks arrays of int64."""
    ranks, rows = np.nonzero(membership.T)
    bounds = np.searchsorted(ranks, np.arange(membership.shape[1] + 1)).tolist()
    return [rows[first:end] for first, end in pairwise(bounds)]
