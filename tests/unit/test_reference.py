"""The float64 reference against sums written out by hand; the bound against a pipeline and its mistakes."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import megakernel.reference as reference_module
from inc_runtime.config import LayerShape, Router
from inc_runtime.errors import ConfigurationError
from megakernel.reference import (
    bf16_bound,
    max_abs_error,
    moe_layer_reference,
    relative_error,
    route_reference,
)

SHAPE = LayerShape(num_experts=16, top_k=4, hidden_size=64, intermediate_size=32)
NUM_RANKS = 4


def bfloat16(values: np.ndarray) -> np.ndarray:
    """`values` rounded to bfloat16, as float32."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


class Layer:
    """A random layer at scale 1, its reference, and a stand-in with the roundings of the pipeline."""

    def __init__(self, seed: int, num_tokens: int, shape: LayerShape = SHAPE) -> None:
        draw = np.random.default_rng(seed).standard_normal
        hidden, width = shape.hidden_size, shape.intermediate_size
        self.shape = shape
        self.hidden = bfloat16(draw((num_tokens, hidden)))
        self.gate_up = bfloat16(draw((shape.num_experts, 2 * width, hidden)) / math.sqrt(hidden))
        self.down = bfloat16(draw((shape.num_experts, hidden, width)) / (0.6 * math.sqrt(width)))
        self.ids, self.weights = route_reference(2 * draw((num_tokens, shape.num_experts)), shape)

    def reference(self) -> np.ndarray:
        return moe_layer_reference(
            self.hidden, self.ids, self.weights, self.gate_up, self.down, num_experts=self.shape.num_experts
        )

    def pipeline(self, *, swap: bool = False, skip_expert: int = -1, skip_token: int = -1) -> np.ndarray:
        """Float32 products; SwiGLU, the partial of a rank and the final sum rounded to bfloat16."""
        total = np.zeros_like(self.hidden)
        for rank in range(NUM_RANKS):
            partial = np.zeros_like(self.hidden)
            for expert in self.shape.experts_of_rank(rank, NUM_RANKS):
                tokens, slots = np.nonzero(self.ids == expert)
                if expert == skip_expert:
                    continue
                gate, up = np.split(self.hidden[tokens] @ self.gate_up[expert].T, 2, axis=1)
                gate, up = (up, gate) if swap else (gate, up)
                activated = bfloat16(gate / (1 + np.exp(-gate)) * up)
                factors = self.weights[tokens, slots].astype(np.float32)[:, None]
                partial[tokens] += factors * (activated @ self.down[expert].T)
            if rank == 0 and skip_token >= 0:
                partial[skip_token] = 0
            total += bfloat16(partial)
        return bfloat16(total)


def test_reference_imports_nothing_that_it_checks() -> None:
    tree = ast.parse(Path(reference_module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {
        name
        for name in imported
        if name and name.startswith(("inc_runtime", "megakernel", "switch_emulator"))
    }
    assert ours == {"inc_runtime.config", "inc_runtime.errors"}


def test_softmax_router_takes_the_best_probabilities_in_order() -> None:
    shape = LayerShape(num_experts=4, top_k=2, hidden_size=8, intermediate_size=8)
    ids, weights = route_reference([[math.log(1), math.log(4), math.log(2), math.log(3)]], shape)
    assert ids.tolist() == [[1, 3]] and ids.dtype == np.int64
    assert weights[0] == pytest.approx([0.4, 0.3], rel=1e-15) and weights.dtype == np.float64
    _, weights = route_reference(np.log([[1.0, 4.0, 2.0, 3.0]]), LayerShape(4, 2, 8, 8, renormalize=True))
    assert weights[0] == pytest.approx([4 / 7, 3 / 7], rel=1e-15)


@pytest.mark.parametrize("router", list(Router))
def test_ties_go_to_the_lower_expert(router: Router) -> None:
    shape = LayerShape(num_experts=6, top_k=3, hidden_size=8, intermediate_size=8, router=router)
    ids, _ = route_reference(
        [[0.0] * 6, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 5.0, 0.0]], shape
    )
    assert ids.tolist() == [[0, 1, 2], [1, 3, 5], [4, 0, 1]]


def test_sigmoid_router_chooses_with_the_bias_and_weighs_without() -> None:
    shape = LayerShape(num_experts=3, top_k=2, hidden_size=8, intermediate_size=8, router=Router.SIGMOID)
    logits = [[0.0, 3.0, -2.0]]
    sigmoid = [0.5, 1 / (1 + math.exp(-3)), 1 / (1 + math.exp(2))]
    ids, weights = route_reference(logits, shape, bias=[0.0, 0.0, 0.9])
    assert ids.tolist() == [[2, 1]]
    assert weights[0] == pytest.approx([sigmoid[2], sigmoid[1]], rel=1e-15)
    ids, weights = route_reference(logits, shape)
    assert ids.tolist() == [[1, 0]]
    _, weights = route_reference(logits, LayerShape(3, 2, 8, 8, Router.SIGMOID, True), bias=[0.0, 0.0, 0.9])
    assert weights.sum() == pytest.approx(1.0, rel=1e-15)


def test_huge_logits_route_and_unusable_ones_are_refused() -> None:
    shape = LayerShape(num_experts=3, top_k=2, hidden_size=8, intermediate_size=8)
    ids, weights = route_reference([[1e30, -1e30, -math.inf]], shape)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[1.0, 0.0]]
    for bad in ([0.0, math.nan, 1.0], [math.inf, math.inf, 0.0], [-math.inf] * 3):
        with pytest.raises(ConfigurationError, match="row 1"):
            route_reference([[0.0, 0.0, 0.0], bad], shape)
    with pytest.raises(ConfigurationError, match=r"\[N, 3\]"):
        route_reference([[0.0, 0.0]], shape)
    with pytest.raises(ConfigurationError, match="softmax router has none"):
        route_reference([[0.0, 0.0, 0.0]], shape, bias=[0.0, 0.0, 0.0])
    assert route_reference(np.zeros((0, 3)), shape)[0].shape == (0, 2)


def test_layer_equals_the_sum_written_out_one_number_at_a_time() -> None:
    layer = Layer(seed=3, num_tokens=5, shape=LayerShape(4, 3, 6, 5))
    layer.ids[1, 0], layer.ids[4] = -1, -1
    layer.ids[2] = [3, 3, 1]
    layer.weights[1, 0] = math.nan  # the weight of an absent choice is nobody's business
    expected = np.zeros((5, 6))
    for token in range(5):
        for expert, weight in zip(layer.ids[token].tolist(), layer.weights[token].tolist(), strict=True):
            if expert < 0:
                continue
            for i in range(5):
                gate = sum(
                    float(layer.gate_up[expert, i, h]) * float(layer.hidden[token, h]) for h in range(6)
                )
                up = sum(
                    float(layer.gate_up[expert, 5 + i, h]) * float(layer.hidden[token, h]) for h in range(6)
                )
                for h in range(6):
                    expected[token, h] += (
                        weight * float(layer.down[expert, h, i]) * gate / (1 + math.exp(-gate)) * up
                    )
    assert layer.reference() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert not layer.reference()[4].any()


def test_torch_bfloat16_and_numpy_bfloat16_give_the_same_bits() -> None:
    layer = Layer(seed=4, num_tokens=7)
    from_torch = moe_layer_reference(
        torch.from_numpy(layer.hidden).bfloat16(),
        torch.from_numpy(layer.ids).int(),
        torch.from_numpy(layer.weights),
        torch.from_numpy(layer.gate_up).bfloat16(),
        torch.from_numpy(layer.down).bfloat16(),
        num_experts=16,
    )
    layer.hidden = layer.hidden.astype(ml_dtypes.bfloat16)
    assert np.array_equal(from_torch, layer.reference())
    assert relative_error(torch.from_numpy(from_torch), from_torch) == 0.0


def test_only_chosen_experts_are_looked_up_and_each_once() -> None:
    layer = Layer(seed=5, num_tokens=6)
    layer.ids[:] = np.array([2, 9, -1, 2])
    asked: list[int] = []

    def lookup(expert: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(expert)
        return layer.gate_up[expert], layer.down[expert]

    out = moe_layer_reference(layer.hidden, layer.ids, layer.weights, lookup, num_experts=16)
    assert asked == [2, 9]
    assert np.array_equal(out, layer.reference())


@pytest.mark.parametrize("expert", [-2, 16])
def test_ids_outside_the_layer_are_refused(expert: int) -> None:
    layer = Layer(seed=6, num_tokens=2)
    layer.ids[1, 2] = expert
    with pytest.raises(ConfigurationError, match=f"holds {expert}: it must be -1 to 15"):
        layer.reference()


def test_errors_of_zero_empty_nan_and_mismatched_arrays() -> None:
    zero, one = np.zeros((2, 3)), np.ones((2, 3))
    assert relative_error(zero, zero) == 0.0 and relative_error(one, zero) == math.inf
    assert relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == max_abs_error(zero[:0], zero[:0]) == 0.0
    assert relative_error(1.5 * one, one) == pytest.approx(0.5) and max_abs_error(1.5 * one, one) == 0.5
    for poison in (math.nan, math.inf):
        bad = one.copy()
        bad[1, 2] = poison
        assert relative_error(bad, one) == max_abs_error(bad, one) == math.inf
    with pytest.raises(ConfigurationError, match="differ"):
        relative_error(one[:1], one)


@pytest.mark.parametrize(
    ("num_tokens", "shape"),
    [
        (1, LayerShape(8, 2, 8, 4)),
        (3, LayerShape(8, 8, 16, 8)),
        (9, LayerShape(7, 3, 32, 16)),
        (64, SHAPE),
        (16, LayerShape(16, 4, 256, 128)),
    ],
)
def test_sound_pipeline_stays_within_the_bound_whatever_the_size(num_tokens: int, shape: LayerShape) -> None:
    errors = []
    for seed in range(40):
        layer = Layer(seed, num_tokens, shape)
        errors.append(relative_error(layer.pipeline(), layer.reference()))
    assert max(errors) < bf16_bound(num_tokens, shape)
    assert np.median(errors) == pytest.approx(0.42 * 2**-8 * math.sqrt(3), rel=0.15)  # as the derivation says


def doubled_weight(layer: Layer) -> np.ndarray:
    right = layer.weights
    layer.weights = right**2
    out = layer.pipeline()
    layer.weights = right
    return out


@pytest.mark.parametrize(
    ("mistake", "least"),
    [
        (lambda layer: layer.pipeline(swap=True), 50),
        (lambda layer: layer.pipeline(skip_expert=5), 15),
        (lambda layer: layer.pipeline(skip_token=17), 4),
        (doubled_weight, 50),
        (lambda layer: layer.pipeline() * np.float32(1.02), 2),
        (lambda layer: np.roll(layer.pipeline(), 1, axis=0), 100),
    ],
    ids=[
        "gate_and_up_swapped",
        "expert_missing",
        "partial_missing",
        "weight_twice",
        "scaled",
        "rows_shifted",
    ],
)
def test_a_mistake_exceeds_the_bound_by_a_wide_margin(
    mistake: Callable[[Layer], np.ndarray], least: float
) -> None:
    layer = Layer(seed=7, num_tokens=128)
    out = mistake(layer)
    assert relative_error(out, layer.reference()) > least * bf16_bound(128, SHAPE)


def test_bound_of_the_real_shape_is_below_one_percent() -> None:
    real = LayerShape(64, 8, 2048, 1024)
    assert 0.0067 < bf16_bound(256, real) < 0.0070
    assert bf16_bound(256, real, sum_roundings=3) == pytest.approx(
        bf16_bound(256, real) * math.sqrt(5 / 3), rel=0.01
    )
    assert bf16_bound(0, real) < 0.01


@pytest.mark.parametrize("num_tokens", [4, 16, 64])
def test_bound_of_few_tokens_allows_for_outputs_that_are_small_by_chance(num_tokens: int) -> None:
    shape = LayerShape(num_experts=8, top_k=2, hidden_size=8, intermediate_size=8)
    share = (bf16_bound(10**9, shape) / bf16_bound(num_tokens, shape)) ** 2
    terms = num_tokens * 8
    worst = np.random.default_rng(0).chisquare(terms, 200_000).min() / terms
    assert 0.5 * worst < share < worst
