"""The MoE layer in float64, written to be obviously right: what every implementation is compared with.

It shares no code with the runtime's routing nor with the stages, on purpose. Arrays may come as torch tensors
or as numpy arrays of any float dtype (bfloat16 included); results are numpy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from inc_runtime.config import LayerShape, Router
from inc_runtime.errors import ConfigurationError

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
ExpertLookup = Callable[[int], tuple[Any, Any]]

# Unit roundoffs: half the distance from 1 to the next value, of 8 and of 24 significant bits.
BFLOAT16_ROUNDOFF = 2.0**-8
FLOAT32_ROUNDOFF = 2.0**-24


def route_reference(router_logits: Any, shape: LayerShape, bias: Any = None) -> tuple[Int64, Float64]:
    """Choose `shape.top_k` experts for every row of `router_logits` ([N, num_experts]).

    Returns `expert_ids` [N, top_k], int64, best first, ties to the lower expert id; and `weights` [N, top_k],
    float64. Softmax router: the probabilities over all experts choose and weigh. Sigmoid router:
    sigmoid(logits) + `bias` ([num_experts], or None for 0) chooses, sigmoid(logits) without the bias weighs.
    With `shape.renormalize` the weights of a row are divided by their sum.

    Raises: ConfigurationError for logits that are NaN or of another shape, or a bias of another shape or for
    a softmax router.
    """
    logits = _float64(router_logits)
    if logits.ndim != 2 or logits.shape[1] != shape.num_experts:
        raise ConfigurationError(
            f"router_logits of shape {list(logits.shape)}: it must be [N, {shape.num_experts}]. "
            "Give the logits of all experts."
        )
    if shape.router is Router.SOFTMAX:
        if bias is not None:
            raise ConfigurationError("bias: a softmax router has none. Use Router.SIGMOID, or leave it out.")
        with np.errstate(invalid="ignore"):  # inf - inf: refused below
            unnormalised = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = unnormalised / unnormalised.sum(axis=1, keepdims=True)
        choice = scores
    else:
        scores = _sigmoid(logits)
        choice = scores if bias is None else scores + _vector_of_experts(bias, shape.num_experts)
    unusable = np.flatnonzero(np.isnan(choice).any(axis=1))
    if unusable.size:
        raise ConfigurationError(
            f"router_logits: row {unusable[0]} has a NaN, or infinities that give no probabilities. "
            "Give finite logits; -inf only beside finite ones."
        )
    expert_ids = np.argsort(-choice, axis=1, kind="stable")[:, : shape.top_k].astype(np.int64)
    weights = np.take_along_axis(scores, expert_ids, axis=1)
    if shape.renormalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return expert_ids, weights


def moe_layer_reference(
    hidden: Any,
    expert_ids: Any,
    weights: Any,
    gate_up: Any,
    down: Any = None,
    *,
    num_experts: int,
) -> Float64:
    """Sum over a row's k choices of weight * down(silu(gate x) * up x), in float64: [N, hidden].

    `hidden`: [N, hidden]. `expert_ids`, `weights`: [N, k]; an id of -1 contributes nothing, an id that occurs
    twice in a row counts twice. `gate_up`: [num_experts, 2 * intermediate, hidden], gate rows first, and
    `down`: [num_experts, hidden, intermediate]; or, in the place of `gate_up` and without `down`, a function
    from an expert id to its two matrices. One expert at a time is held in float64, and only the rows that
    chose it are computed.

    Raises: ConfigurationError for an id outside -1 to `num_experts` - 1, or shapes that do not match.
    """
    rows = _float64(hidden)
    ids = np.asarray(expert_ids).astype(np.int64)
    factors = _float64(weights)
    if rows.ndim != 2 or ids.ndim != 2 or ids.shape != factors.shape or len(ids) != len(rows):
        raise ConfigurationError(
            f"hidden {list(rows.shape)}, expert_ids {list(ids.shape)}, weights {list(factors.shape)}: "
            "they must be [N, hidden], [N, k] and [N, k]. Give one row per token."
        )
    outside = ids[(ids < -1) | (ids >= num_experts)]
    if outside.size:
        raise ConfigurationError(
            f"expert_ids holds {outside[0]}: it must be -1 to {num_experts - 1}. Give ids of this layer."
        )
    lookup: ExpertLookup = gate_up if callable(gate_up) else lambda expert: (gate_up[expert], down[expert])
    out = np.zeros_like(rows)
    for expert in np.unique(ids[ids >= 0]).tolist():
        chosen = ids == expert
        tokens = np.flatnonzero(chosen.any(axis=1))
        factor_of_token = np.where(chosen, factors, 0.0).sum(axis=1)[tokens]
        both, back = (_float64(matrix) for matrix in lookup(expert))
        gate, up = np.split(rows[tokens] @ both.T, 2, axis=1)
        out[tokens] += factor_of_token[:, None] * ((gate * _sigmoid(gate) * up) @ back.T)
    return out


def relative_error(out: Any, reference: Any) -> float:
    """||out - reference|| / ||reference||, Frobenius norms.

    0 where both are all zeros or empty; inf where `out` has a NaN or an infinity, or only the reference is
    all zeros. Raises: ConfigurationError when the shapes differ: a broadcast would compare the wrong rows.
    """
    difference, wanted = _difference(out, reference)
    error, norm = float(np.linalg.norm(difference)), float(np.linalg.norm(wanted))
    if not math.isfinite(error):
        return math.inf
    if norm == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / norm


def max_abs_error(out: Any, reference: Any) -> float:
    """The largest |out - reference|; 0 where both are empty, inf where `out` has a NaN.

    Raises: as `relative_error`.
    """
    difference, _ = _difference(out, reference)
    worst = float(np.abs(difference).max(initial=0.0))
    return worst if math.isfinite(worst) else math.inf


def bf16_bound(num_tokens: int, shape: LayerShape, *, sum_roundings: int = 1) -> float:
    """The `relative_error` that rounding to bfloat16 may give the pipeline; more is a mistake.

    `num_tokens`: rows that chose an expert. `sum_roundings`: how often the sum over ranks is rounded to
    bfloat16: 1 when it is summed in float32 and rounded once, num_ranks - 1 when pairs are added in bfloat16.

    Derivation, with u = 2^-8. Hidden states and weights are bfloat16 on both sides and cost nothing. Three
    things round, each by at most u of each element, to nearest, so that errors have mean 0 and their squares
    add:
      1. h = silu(gate x) * up x. Its error passes through `down` as h itself does, so it is to the expert's
         output what it is to h: u.
      2. the partial sum of each rank. The squared partials of a token sum to its squared output, up to the
         cross terms between experts, which have mean 0: u again.
      3. the sum of the partials: u for every rounding.
    Hence u * sqrt(2 + sum_roundings). Float32 adds its roundoff for each term of the two products and of the
    sum over k, in quadrature: 2^-24 * sqrt(hidden + intermediate + k), which is far below. The mean square of
    one rounding is (0.42 u)^2 (uniform over half a step, leading digits logarithmic), so a sound pipeline
    sits at 0.42 of the bound.

    1 and 2 compare norms that are equal in the mean. The output's squared norm is a sum of about
    n = num_tokens * min(hidden, k * intermediate) independent terms, and may fall short by chance as a
    chi-square of n degrees of freedom does. The bound is divided by the root of the share that is left at
    five standard deviations (Wilson and Hilferty's cubic): by 1.00 for 256 tokens of OLMoE, 0.79 for n = 256,
    and 0.05 for n = 8, below which it says nothing.

    For scale: a swapped gate and up, a weight applied twice, or an expert that no token gets gives above 0.1
    (the bound is 0.007); one token of 256 that gets nothing gives 0.06.
    """
    roundings = BFLOAT16_ROUNDOFF * math.sqrt(2 + sum_roundings)
    accumulation = FLOAT32_ROUNDOFF * math.sqrt(shape.hidden_size + shape.intermediate_size + shape.top_k)
    terms = max(1, num_tokens) * min(shape.hidden_size, shape.top_k * shape.intermediate_size)
    spread = 2.0 / (9.0 * terms)
    share = max(0.1, 1.0 - spread - 5.0 * math.sqrt(spread)) ** 3
    return (roundings + accumulation) / math.sqrt(share)


def _float64(values: Any) -> Float64:
    """`values` as a float64 numpy array. A torch tensor is told by its `detach`: no need to import torch."""
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values).astype(np.float64)


def _sigmoid(values: Float64) -> Float64:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return 1.0 / (1.0 + np.exp(-values))


def _vector_of_experts(bias: Any, num_experts: int) -> Float64:
    vector = _float64(bias)
    if vector.shape != (num_experts,):
        raise ConfigurationError(
            f"bias of shape {list(vector.shape)}: it must be [{num_experts}]. Give all experts."
        )
    return vector


def _difference(out: Any, reference: Any) -> tuple[Float64, Float64]:
    result, wanted = _float64(out), _float64(reference)
    if result.shape != wanted.shape:
        raise ConfigurationError(
            f"shapes {list(result.shape)} and {list(wanted.shape)} differ. "
            "Give an output for every reference row."
        )
    return result - wanted, wanted
