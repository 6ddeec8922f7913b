"""Sums in rank order depend on nothing but the inputs: bitwise. Sums in order of arrival serve an early rank first."""

from __future__ import annotations

import numpy as np
import pytest

from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, SumOrder
from inc_runtime.protocol import World
from megakernel.fused_layer import LayerInput
from tests.expected import check_outputs
from tests.routings import draw_call, layer_of
from tests.simulate import Layer, given_experts, random_tokens, simulate

SHAPE = LayerShape(6, 4, 16, 8)
LAYER = layer_of(SHAPE)
IN_NETWORK = [model for model in CommunicationModel if model.in_network]
BOUND = 10
FOUR_RANKS = World(4)


def call_of_four_ranks() -> list[LayerInput]:
    return draw_call(np.random.default_rng(7), SHAPE, [BOUND, 4, 0, 9], "uniform", 4)


def bits(outputs: list[np.ndarray]) -> bytes:
    return b"".join(output.tobytes() for output in outputs)


def run(model: CommunicationModel, pipeline: Pipeline, world: World = FOUR_RANKS, **options) -> list[np.ndarray]:
    outputs, _ = simulate(LAYER, model, pipeline, world, [call_of_four_ranks()], **options)
    return outputs[0]


RANK_ORDER = Pipeline(BOUND, 2, 2, 2, sum_order=SumOrder.RANK)


@pytest.mark.parametrize("model", IN_NETWORK, ids=lambda model: model.value)
def test_sums_in_rank_order_are_bitwise_equal_over_fifty_schedules(model: CommunicationModel) -> None:
    wanted = bits(run(model, RANK_ORDER))
    for seed in range(50):
        assert bits(run(model, RANK_ORDER, seed=seed, jitter_us=50.0, traced=False)) == wanted, f"seed {seed}"


def test_sums_in_rank_order_do_not_depend_on_heap_depth_microbatch_phase_or_planes() -> None:
    model = CommunicationModel.INC_ALL_TO_ALL
    wanted = bits(run(model, RANK_ORDER))
    check_outputs(LAYER, call_of_four_ranks(), run(model, RANK_ORDER), model.value)
    for depth in (1, 3, 4):
        assert bits(run(model, Pipeline(BOUND, 2, depth, sum_order=SumOrder.RANK), jitter_us=50.0)) == wanted, f"depth {depth}"
    for microbatch_tokens in (1, 3, 10, 16):
        pipeline = Pipeline(BOUND, microbatch_tokens, 2, sum_order=SumOrder.RANK)
        assert bits(run(model, pipeline, jitter_us=50.0)) == wanted, f"microbatch_tokens {microbatch_tokens}"
    for bound in (11, 40):
        pipeline = Pipeline(bound, 2, 2, sum_order=SumOrder.RANK)
        assert bits(run(model, pipeline, jitter_us=50.0)) == wanted, f"bound {bound}"
    for ranks_per_phase in (1, 2, 3, 4):
        pipeline = Pipeline(BOUND, 2, 2, ranks_per_phase, sum_order=SumOrder.RANK)
        phased = CommunicationModel.INC_ALL_TO_ALL_PHASED
        assert bits(run(phased, pipeline, jitter_us=50.0)) == wanted, f"ranks_per_phase {ranks_per_phase}"
    for planes in ((2, 1), (1, 2), (2, 2)):
        assert bits(run(model, RANK_ORDER, World(4, *planes), jitter_us=50.0)) == wanted, f"planes {planes}"


def test_every_model_that_sums_in_rank_order_returns_the_same_bits() -> None:
    """The plain models add in rank order on the owner, the INC ones in the switch."""
    wanted = bits(run(CommunicationModel.INC_ALL_TO_ALL, RANK_ORDER))
    for model in CommunicationModel:
        assert bits(run(model, RANK_ORDER, seed=3, jitter_us=50.0)) == wanted, model.value


def test_sums_in_order_of_arrival_may_differ_where_sums_in_rank_order_do_not() -> None:
    """Otherwise the bitwise tests above would prove nothing. Ranks 0 and 1 cancel, and what rank 2 adds is lost between them."""
    layer = Layer(SHAPE, seed=1)
    layer.gate_up[2], layer.down[2] = layer.gate_up[0], layer.down[0]
    tokens = random_tokens(np.random.default_rng(0), 4, SHAPE.hidden_size)
    ids, weights = np.array([[0, 2, 4, -1]] * 4), np.array([[1, -1, 1e-9, 0]] * 4)
    call = [given_experts(SHAPE, tokens, ids, weights)] * 4
    for order, expected in ((SumOrder.RANK, 1), (SumOrder.ARRIVAL, 2)):
        seen = set()
        for seed in range(20):
            pipeline = Pipeline(4, 4, 1, sum_order=order)
            outputs, _ = simulate(
                layer, CommunicationModel.INC_ALL_TO_ALL, pipeline, World(4), [call], seed=seed, jitter_us=500.0
            )
            seen.add(bits(outputs[0]))
        assert min(len(seen), 2) == expected, order


def ranks_pulled(model: CommunicationModel, order: SumOrder) -> list[int]:
    """The ranks that the combine switch reads for its only microbatch, in its order, when the experts of rank 0 are late."""
    call = draw_call(np.random.default_rng(0), SHAPE, [2] * 4, "uniform", 4)
    for given in call:
        given.expert_ids[:] = [0, 2, 4, 5]  # one expert of every rank
    pipeline = Pipeline(2, 2, 1, 4, sum_order=order)
    outputs, simulation = simulate(LAYER, model, pipeline, World(4), [call], late_us={0: 1000.0})
    check_outputs(LAYER, call, outputs[0], f"{model.value} {order}")
    return [event.peer for event in simulation.events() if event.kind == "get"]


COLLECTIVE = [model for model in IN_NETWORK if not model.phased]


@pytest.mark.parametrize("model", COLLECTIVE, ids=lambda model: model.value)
def test_a_late_rank_does_not_stall_the_ranks_present_unless_sums_are_in_rank_order(model: CommunicationModel) -> None:
    arrival, rank = (ranks_pulled(model, order) for order in (SumOrder.ARRIVAL, SumOrder.RANK))
    assert sorted(arrival[:3]) == [1, 2, 3] and arrival[3] == 0
    assert rank == [0, 1, 2, 3]


def test_the_ranks_present_are_pulled_before_the_late_one_is_ready() -> None:
    call = draw_call(np.random.default_rng(0), SHAPE, [2] * 4, "uniform", 4)
    _, simulation = simulate(
        LAYER, CommunicationModel.INC_ALL_TO_ALL, Pipeline(2, 2, 1), World(4), [call], late_us={0: 1000.0}
    )
    ready = next(e.start_us for e in simulation.events() if e.pe == 0 and e.name == "partial_sums_ready")
    early = [e for e in simulation.events() if e.kind == "get" and e.peer != 0]
    assert len(early) == 3 and all(event.end_us < ready for event in early)


@pytest.mark.parametrize("model", [m for m in CommunicationModel if m.phased and m.in_network], ids=lambda m: m.value)
def test_a_phased_switch_serves_the_requests_in_their_order_of_arrival(model: CommunicationModel) -> None:
    """G = 1 and rank 0 late: the sums of the others leave first, and each phase holds one rank."""
    rng = np.random.default_rng(0)
    call = draw_call(rng, SHAPE, [2] * 4, "uniform", 4)
    for given in call[1:]:
        given.expert_ids[:] = [2, 3, 4, 5]  # no expert of rank 0
    pipeline = Pipeline(2, 2, 1, 1, barrier_after_dispatch=False)
    _, simulation = simulate(LAYER, model, pipeline, World(4), [call], late_us={0: 1000.0})
    returned = [event.peer for event in simulation.events() if event.name == "token_sums_arrived"]
    if model.selective:
        assert sorted(returned[:3]) == [1, 2, 3] and returned[3] == 0
    assert sorted(returned) == [0, 1, 2, 3]
