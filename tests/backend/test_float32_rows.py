"""`RowFormat.FLOAT32`: rows travel unrounded, so a layer is as close to the float64 reference as float32 arithmetic is."""

from __future__ import annotations

import numpy as np
import pytest

from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, RowFormat
from inc_runtime.heap_layout import REGIONS, Dims, HeapLayout, Kind
from inc_runtime.protocol import Role, World
from megakernel.fused_layer import LayerInput
from megakernel.reference import moe_layer_reference, relative_error, route_reference
from tests.simulate import Layer, simulate

SHAPE = LayerShape(6, 3, 16, 8)
FLOAT32_ERROR = 1e-6
"""Relative error of float32 sums of H + I + k * W terms: about sqrt(27) * 2^-24 = 3e-7."""


def draw(rng: np.random.Generator, num_tokens: int) -> LayerInput:
    tokens = rng.standard_normal((num_tokens, SHAPE.hidden_size)).astype(np.float32)
    return LayerInput(SHAPE, tokens, logits=rng.standard_normal((num_tokens, SHAPE.num_experts)).astype(np.float32))


def reference(layer: Layer, given: LayerInput) -> np.ndarray:
    ids, weights = route_reference(given.logits, SHAPE, None)
    return moe_layer_reference(given.tokens, ids, weights, layer.gate_up, layer.down, num_experts=SHAPE.num_experts)


@pytest.mark.parametrize("model", list(CommunicationModel), ids=lambda model: model.value)
def test_float32_rows_reach_the_float64_reference_within_float32_error(model: CommunicationModel) -> None:
    rng = np.random.default_rng(0)
    layer, pipeline = Layer(SHAPE), Pipeline(17, 4, 2, row_format=RowFormat.FLOAT32)
    call = [draw(rng, count) for count in (17, 0, 5)]
    outputs, _ = simulate(layer, model, pipeline, World(3), [call], jitter_us=30.0)
    for given, output in zip(call, outputs[0], strict=True):
        assert output.dtype == np.float32
        if len(output):
            assert relative_error(output.astype(np.float64), reference(layer, given)) < FLOAT32_ERROR


def test_bfloat16_rows_are_a_thousand_times_further_away() -> None:
    """The measure above sees a single rounding to bfloat16 anywhere on the way."""
    rng = np.random.default_rng(0)
    layer, given = Layer(SHAPE), draw(rng, 8)
    rounded = LayerInput(SHAPE, given.tokens.astype("bfloat16"), logits=given.logits)
    outputs, _ = simulate(layer, CommunicationModel.INC_ALL_TO_ALL, Pipeline(8, 4, 2), World(1), [[rounded]])
    assert relative_error(outputs[0][0].astype(np.float64), reference(layer, rounded)) > 1000 * FLOAT32_ERROR


def test_every_region_of_rows_follows_the_row_format() -> None:
    for model in CommunicationModel:
        narrow, wide = (
            HeapLayout(Dims.of(model, World(2), SHAPE, Pipeline(8, 4, row_format=row_format))) for row_format in RowFormat
        )
        for role in REGIONS:
            for name, region in wide.regions(role).items():
                if region.kind is Kind.ROWS:
                    assert region.dtype(wide.dims) == np.float32, name
        assert wide.rank_buffer_units() == narrow.rank_buffer_units()
        assert wide.row_bytes(Role.COMPUTE_RANK) == 2 * narrow.row_bytes(Role.COMPUTE_RANK)
