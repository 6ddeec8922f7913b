"""Routing: which experts a token chooses, which ranks need it, and what is refused. The float64 router is the other side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inc_runtime.config import LayerShape, Router
from inc_runtime.errors import ConfigurationError
from inc_runtime.routing import (
    check_expert_ids,
    check_router_logits,
    expert_rank_membership,
    rank_of_experts,
    route,
    rows_of_expert_ranks,
)
from megakernel.reference import route_reference

SHAPE = LayerShape(12, 3, 8, 8)


@pytest.mark.parametrize("router", list(Router), ids=lambda router: router.value)
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "as they are"])
def test_experts_and_weights_are_those_of_the_float64_router(router: Router, renormalize: bool) -> None:
    shape = replace(SHAPE, router=router, renormalize=renormalize)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((200, 12)).astype(np.float32) * 3
    bias = rng.standard_normal(12).astype(np.float32) if router is Router.SIGMOID else None
    ids, weights = route(logits, shape, bias)
    wanted_ids, wanted_weights = route_reference(logits, shape, bias)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    # A choice may differ only where two float64 scores are closer than float32 tells apart: these draws have none such.
    np.testing.assert_array_equal(ids, wanted_ids)
    # exp, the sum of E terms, the quotient and the renormalisation: (E + 4) roundings of float32 at most.
    np.testing.assert_allclose(weights, wanted_weights, rtol=(12 + 4) * 2.0**-23)
    if renormalize:
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=4 * 2.0**-23)


@pytest.mark.parametrize("router", list(Router), ids=lambda router: router.value)
def test_ties_go_to_the_lower_expert(router: Router) -> None:
    shape = replace(SHAPE, router=router)
    logits = np.zeros((2, 12), np.float32)
    logits[1, [2, 5, 7, 9]] = 1
    ids, _ = route(logits, shape)
    assert ids.tolist() == [[0, 1, 2], [2, 5, 7]]


def test_ties_among_many_experts_go_to_the_lower_ones() -> None:
    """64 experts with three different logits: a sort that is stable only for short rows would show."""
    shape = LayerShape(64, 20, 8, 8)
    logits = np.random.default_rng(0).integers(0, 3, (50, 64)).astype(np.float32)
    ids, _ = route(logits, shape)
    for row, chosen in zip(logits, ids, strict=True):
        assert chosen.tolist() == sorted(range(64), key=lambda expert: (-row[expert], expert))[:20]


def test_softmax_chooses_on_the_logits_where_probabilities_would_round_to_a_tie() -> None:
    """Far below the maximum both probabilities are 0 in float32; the larger logit still wins, also against a lower id."""
    logits = np.full((1, 4), -1000.0, np.float32)
    logits[0, 0] = 0
    logits[0, 3] = -900
    ids, weights = route(logits, LayerShape(4, 2, 8, 8))
    assert ids.tolist() == [[0, 3]] and weights.tolist() == [[1.0, 0.0]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    shape = LayerShape(3, 1, 8, 8, Router.SIGMOID)
    ids, weights = route(np.array([[2.0, 0.0, -1.0]], np.float32), shape, np.array([0, 0, 5], np.float32))
    assert ids.tolist() == [[2]]
    assert weights[0, 0] == pytest.approx(1 / (1 + np.e), rel=1e-6)


def test_huge_logits_and_no_tokens_route_without_a_warning() -> None:
    with np.errstate(all="raise", under="ignore"):
        ids, weights = route(np.array([[3e4, -3e4, 0.0]], np.float32), LayerShape(3, 2, 8, 8))
        assert ids.tolist() == [[0, 2]] and weights.tolist() == [[1.0, 0.0]]
        ids, weights = route(np.empty((0, 12), np.float32), SHAPE)
    assert ids.shape == weights.shape == (0, 3)


def test_sigmoid_of_very_negative_logits_gives_finite_weights_also_when_renormalized() -> None:
    shape = LayerShape(3, 2, 8, 8, Router.SIGMOID, renormalize=True)
    _, weights = route(np.full((1, 3), -200.0, np.float32), shape)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused_with_place_and_value(value: float) -> None:
    logits = np.zeros((4, 12), np.float32)
    logits[2, 7] = value
    with pytest.raises(ConfigurationError, match=rf"router_logits\[2, 7\] = {value}.*1 bad value"):
        check_router_logits(logits, SHAPE)


@pytest.mark.parametrize("shape", [(4, 11), (4,), (4, 12, 1)])
def test_logits_of_another_shape_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"expected \[num_tokens, 12\]"):
        check_router_logits(np.zeros(shape, np.float32), SHAPE)


def good_ids() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(-1, 12, (6, 3)), rng.random((6, 3)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int16])
def test_ids_of_any_integer_type_and_any_stride_pass(dtype: type) -> None:
    ids, weights = good_ids()
    check_expert_ids(ids.astype(dtype), weights, 6, SHAPE)
    check_expert_ids(np.asfortranarray(ids), weights[:, ::-1], 6, SHAPE)
    check_expert_ids(np.repeat(ids, 2, axis=0)[::2].astype(dtype), weights, 6, SHAPE)


@pytest.mark.parametrize("bad", [-2, 12, 2**31, 2**40])
def test_an_id_outside_the_layer_is_refused_with_place_value_and_range(bad: int) -> None:
    ids, weights = good_ids()
    ids[4, 1] = bad
    with pytest.raises(ConfigurationError, match=rf"expert_ids\[4, 1\] = {bad}, expected -1 to 11.*Use -1"):
        check_expert_ids(ids, weights, 6, SHAPE)


def test_ids_and_weights_of_another_shape_or_type_are_refused() -> None:
    ids, weights = good_ids()
    for given in ((ids[:5], weights), (ids, weights[:, :2])):
        with pytest.raises(ConfigurationError, match=r"expected \[6, 3\]"):
            check_expert_ids(*given, 6, SHAPE)
    with pytest.raises(ConfigurationError, match="dtype float64, expected int32 or int64"):
        check_expert_ids(ids.astype(float), weights, 6, SHAPE)


def test_a_weight_that_is_nan_is_refused_unless_its_choice_does_not_count() -> None:
    ids, weights = good_ids()
    ids[3] = [-1, 2, 2]
    weights[3, 0] = np.nan
    check_expert_ids(ids, weights, 6, SHAPE)
    weights[3, 2] = np.nan
    with pytest.raises(ConfigurationError, match=r"weights\[3, 2\] = nan"):
        check_expert_ids(ids, weights, 6, SHAPE)


@pytest.mark.parametrize("num_experts", [1, 3, 7, 8, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 9])
def test_experts_are_split_into_runs_whose_lengths_differ_by_one_at_most(num_experts: int, num_ranks: int) -> None:
    shape = LayerShape(num_experts, 1, 8, 8)
    runs = [shape.experts_of_rank(rank, num_ranks) for rank in range(num_ranks)]
    assert [expert for run in runs for expert in run] == list(range(num_experts))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    owners = rank_of_experts(num_experts, num_ranks)
    assert all(expert in runs[owners[expert]] for expert in range(num_experts))


def test_a_token_goes_once_to_each_rank_of_its_experts_and_to_none_for_minus_one() -> None:
    """Seven experts on three ranks: 0-2, 3-4, 5-6."""
    ids = np.array([[0, 2, 6], [-1, 4, 4], [-1, -1, -1], [5, 3, -1]])
    membership = expert_rank_membership(ids, 7, 3, selective=True)
    wanted = [[True, False, True], [False, True, False], [False] * 3, [False, True, True]]
    assert membership.tolist() == wanted
    assert [rows.tolist() for rows in rows_of_expert_ranks(membership)] == [[0], [1, 3], [0, 3]]
    assert expert_rank_membership(ids, 7, 3, selective=False).all()
    assert expert_rank_membership(ids[:0], 7, 3, selective=True).shape == (0, 3)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("choices", [1, 3, 8, 32])
def test_distinct_ranks_of_a_microbatch_follow_the_formula_of_the_post(num_ranks: int, choices: int) -> None:
    """W_x = W (1 - (1 - 1/W)^(k m_b)) for k m_b independent uniform choices.

    The mean over n draws of a count between 0 and W: by Hoeffding it is off by t with odds below 2 exp(-2 n t^2 / W^2), here
    1e-9 for each of the twelve cases; the draws are seeded besides.
    """
    draws, experts_per_rank = 4000, 4
    rng = np.random.default_rng(num_ranks * 100 + choices)
    num_experts = num_ranks * experts_per_rank
    ids = rng.integers(0, num_experts, (draws, choices))
    membership = expert_rank_membership(ids, num_experts, num_ranks, selective=True)
    measured = membership.sum(axis=1).mean()
    formula = num_ranks * (1 - (1 - 1 / num_ranks) ** choices)
    tolerance = num_ranks * np.sqrt(np.log(2 / 1e-9) / (2 * draws))
    assert abs(measured - formula) < tolerance
    assert tolerance < 0.06 * num_ranks


def test_one_token_of_olmoe_selects_3_6_of_4_ranks_as_the_post_says() -> None:
    assert pytest.approx(3.6, abs=0.01) == 4 * (1 - (3 / 4) ** 8)
