"""What a layer must return, and how far bfloat16 lets it be: the float64 reference, and a bound for each element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megakernel.fused_layer import LayerInput
from megakernel.reference import bf16_bound, moe_layer_reference, relative_error, route_reference
from tests.simulate import Layer

U = 2.0**-8
"""Unit roundoff of bfloat16."""


def choices(given: LayerInput) -> tuple[np.ndarray, np.ndarray]:
    """Expert ids and float64 weights of a call."""
    if given.logits is not None:
        return route_reference(given.logits, given.shape, given.bias)
    assert given.expert_ids is not None and given.weights is not None
    return given.expert_ids, given.weights.astype(np.float64)


def reference_of(layer: Layer, given: LayerInput) -> np.ndarray:
    """[N, H] float64."""
    ids, weights = choices(given)
    return moe_layer_reference(given.tokens, ids, weights, layer.gate_up, layer.down, num_experts=layer.shape.num_experts)


def magnitude_of(layer: Layer, given: LayerInput) -> np.ndarray:
    """[N, H]: the sum over choices and over I of |weight * down * h|. Every rounding moves an element by u of this at most."""
    ids, weights = choices(given)
    tokens = given.tokens.astype(np.float64)
    total = np.zeros(tokens.shape)
    for expert in np.unique(ids[ids >= 0]):
        gate, up = np.split(tokens @ layer.gate_up[expert].numpy().astype(np.float64).T, 2, axis=1)
        activations = np.abs(gate * up / (1 + np.exp(-gate)))
        weight = np.where(ids == expert, np.abs(weights), 0).sum(axis=1)[:, None]
        total += weight * (activations @ np.abs(layer.down[expert].numpy().astype(np.float64)).T)
    return total


def check_outputs(
    layer: Layer, call: Sequence[LayerInput], outputs: Sequence[np.ndarray], where: object, *, sum_roundings: int = 1
) -> None:
    """Compare one call of all ranks with the reference. Raises AssertionError that begins with `where`.

    Each element by its own worst case: roundings of h, the expert's output, the partial sum, and `sum_roundings` of the sum over
    ranks, two where the rank adds its own to what a switch returns; each u of the magnitude at most, and 1e-5 for float32. All
    rows together by the statistical bound of `bf16_bound`. Rows that chose nothing are exactly zero.
    """
    wanted = np.concatenate([reference_of(layer, given) for given in call])
    scale = np.concatenate([magnitude_of(layer, given) for given in call])
    seen = np.concatenate(outputs).astype(np.float64)
    chosen = np.concatenate([(choices(given)[0] >= 0).any(axis=1) for given in call])
    assert np.isfinite(seen).all(), f"{where}: row {np.argwhere(~np.isfinite(seen))[0][0]} of all ranks' rows is not finite"
    assert not seen[~chosen].any(), f"{where}: a row that chose no expert is not zero"
    excess = np.abs(seen - wanted) - ((3 + sum_roundings) * U * (1 + 4 * U) * scale + 1e-5)
    worst = np.unravel_index(excess.argmax(), excess.shape) if excess.size else None
    assert worst is None or excess[worst] <= 0, f"{where}: element {worst} is {seen[worst]}, expected {wanted[worst]}"
    if chosen.any():
        error, bound = relative_error(seen, wanted), bf16_bound(int(chosen.sum()), layer.shape, sum_roundings=sum_roundings)
        assert error <= bound, f"{where}: relative error {error:.3g}, bound {bound:.3g}"
