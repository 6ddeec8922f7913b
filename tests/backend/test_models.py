"""Every communication model over the listed routings and worlds, on the simulator, against the float64 reference.

The cases are fixed, so that each named situation is sure to run; `test_random_schedules.py` draws their combinations.
"""

from __future__ import annotations

import numpy as np
import pytest

from inc_runtime import heap_layout
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, SumOrder
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import Dims
from inc_runtime.protocol import World
from tests.expected import check_outputs
from tests.routings import COUNTS, ROUTINGS, draw_call, layer_of
from tests.simulate import simulate

MODELS = list(CommunicationModel)
PHASED = [model for model in MODELS if model.phased]
IN_NETWORK = [model for model in MODELS if model.in_network]
SHAPE = LayerShape(5, 3, 8, 8)
THREE_RANKS = World(3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of H = 8 to a relayed chunk."""
    monkeypatch.setattr(heap_layout, "MAX_CHUNK_BYTES", 32)


def run(
    model: CommunicationModel,
    *,
    shape: LayerShape = SHAPE,
    world: World = THREE_RANKS,
    routing: str = "uniform",
    counts: str = "full",
    depth: int = 2,
    microbatch_tokens: int = 2,
    bound: int | None = None,
    ranks_per_phase: int = 2,
    barrier: bool = True,
    order: SumOrder = SumOrder.ARRIVAL,
    edge_tokens: int | None = None,
    seeds: int = 2,
) -> None:
    """Run seeds of one case with jitter and check each. The last microbatch is not full, where m_b > 1."""
    bound = bound or (2 * depth + 1) * microbatch_tokens - (microbatch_tokens > 1)
    group = min(ranks_per_phase, world.num_ranks)
    pipeline = Pipeline(bound, microbatch_tokens, depth, group, barrier, order, edge_tokens=edge_tokens)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        call = draw_call(rng, shape, COUNTS[counts](rng, world.num_ranks, bound), routing, world.num_ranks)
        where = f"{model.value} {world} {pipeline} {routing} {counts} seed {seed}"
        try:
            outputs, _ = simulate(layer_of(shape), model, pipeline, world, [call], seed=seed, jitter_us=30.0, traced=False)
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        check_outputs(layer_of(shape), call, outputs[0], where)


def named(values):
    return {"argvalues": values, "ids": lambda value: getattr(value, "value", str(value))}


@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize("model", **named(MODELS))
def test_every_routing_gives_the_reference(model: CommunicationModel, routing: str) -> None:
    for counts in COUNTS:
        run(model, routing=routing, counts=counts, seeds=1)


@pytest.mark.parametrize("model", **named(MODELS))
def test_microbatches_that_grow_and_shrink_give_the_reference(model: CommunicationModel) -> None:
    for counts in COUNTS:
        run(model, counts=counts, microbatch_tokens=5, bound=23, depth=3, edge_tokens=1, seeds=1)


@pytest.mark.parametrize("experts_and_k", [(4, 1), (4, 4), (1, 1), (2, 2), (7, 3)])
@pytest.mark.parametrize("model", **named(MODELS))
def test_k_of_1_and_of_e_and_uneven_or_missing_experts_give_the_reference(
    model: CommunicationModel, experts_and_k: tuple[int, int]
) -> None:
    """W = 3: (1, 1) and (2, 2) leave ranks without experts, (7, 3) splits 3, 2, 2."""
    run(model, shape=LayerShape(*experts_and_k, 8, 8), counts="ragged")


@pytest.mark.parametrize("planes", [(2, 1), (1, 2), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("model", **named(MODELS))
def test_several_switches_per_role_share_the_tokens_of_a_microbatch(
    model: CommunicationModel, planes: tuple[int, int]
) -> None:
    """m_b = 5 is no multiple of the planes; at m_b = 1 all but the first plane have no tokens at all."""
    for microbatch_tokens in (5, 1):
        run(model, world=World(2, *planes), microbatch_tokens=microbatch_tokens, depth=1, counts="ragged")


@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize("model", **named([m for m in MODELS if not m.in_network and not m.phased]))
def test_without_switches_the_ranks_of_a_plain_model_reach_each_other(model: CommunicationModel, routing: str) -> None:
    for counts in COUNTS:
        for num_ranks in (1, 3):
            run(model, routing=routing, counts=counts, seeds=1, world=World(num_ranks, 0, 0), microbatch_tokens=3, depth=2)


@pytest.mark.parametrize("model", **named([m for m in MODELS if m.in_network or m.phased]))
def test_other_models_are_refused_without_switches(model: CommunicationModel) -> None:
    with pytest.raises(ConfigurationError, match="needs a switch of each role"):
        Dims.of(model, World(3, 0, 0), SHAPE, Pipeline(2, 2))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("model", **named(MODELS))
def test_every_depth_gives_the_reference(model: CommunicationModel, depth: int) -> None:
    run(model, depth=depth, world=World(2), microbatch_tokens=1, counts="ragged")


@pytest.mark.parametrize("barrier", [True, False], ids=["barrier", "no barrier"])
@pytest.mark.parametrize("ranks_per_phase", [1, 2, 3, 4])
@pytest.mark.parametrize("model", **named(PHASED))
def test_every_number_of_ranks_per_phase_gives_the_reference(
    model: CommunicationModel, ranks_per_phase: int, barrier: bool
) -> None:
    world = World(4)
    run(model, world=world, ranks_per_phase=ranks_per_phase, barrier=barrier, microbatch_tokens=1, counts="ragged", seeds=1)


@pytest.mark.parametrize("order", **named(list(SumOrder)))
@pytest.mark.parametrize("model", **named(IN_NETWORK))
def test_both_orders_of_sums_give_the_reference(model: CommunicationModel, order: SumOrder) -> None:
    run(model, order=order, world=World(4), microbatch_tokens=1)


@pytest.mark.parametrize("model", **named(MODELS))
def test_one_rank_alone_gives_the_reference(model: CommunicationModel) -> None:
    run(model, world=World(1), counts="full")


@pytest.mark.parametrize("model", **named(MODELS))
def test_two_layers_of_other_shape_and_size_share_one_heap(model: CommunicationModel) -> None:
    """Same H, other E and k, batches that shrink and grow again: nothing of one call shows in the next."""
    shapes = [LayerShape(5, 4, 8, 8), LayerShape(2, 1, 8, 16), LayerShape(5, 4, 8, 8)]
    bounds = [10, 3, 7]
    layers = [layer_of(shape) for shape in shapes]
    pipelines = [Pipeline(bound, 2, 2) for bound in bounds]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        calls = [
            draw_call(rng, shape, [bound, bound // 2, 0], "minus_one_anywhere", 3)
            for shape, bound in zip(shapes, bounds, strict=True)
        ]
        outputs, _ = simulate(
            layers[0], model, pipelines[0], World(3), calls, layers=layers, pipelines=pipelines, seed=seed, jitter_us=30.0
        )
        for layer, call, output in zip(layers, calls, outputs, strict=True):
            check_outputs(layer, call, output, f"{model.value} seed {seed} E={layer.shape.num_experts}")


@pytest.mark.parametrize("model", **named(PHASED))
def test_layers_with_and_without_the_barrier_share_one_heap(model: CommunicationModel) -> None:
    pipelines = [Pipeline(5, 1, 2, barrier_after_dispatch=barrier) for barrier in (True, False, True)]
    rng = np.random.default_rng(0)
    calls = [draw_call(rng, SHAPE, [5, 3], "uniform", 2) for _ in pipelines]
    outputs, _ = simulate(layer_of(SHAPE), model, pipelines[0], World(2), calls, pipelines=pipelines, jitter_us=30.0)
    for call, output in zip(calls, outputs, strict=True):
        check_outputs(layer_of(SHAPE), call, output, model.value)


@pytest.mark.parametrize("model", **named(MODELS))
def test_the_output_is_the_callers_memory_and_not_a_slot(model: CommunicationModel) -> None:
    """A later call that reuses every slot leaves the output of the first untouched."""
    rng = np.random.default_rng(0)
    first, second = (draw_call(rng, SHAPE, [10, 10], "uniform", 2) for _ in range(2))
    alone, _ = simulate(layer_of(SHAPE), model, Pipeline(10, 2, 2), World(2), [first])
    both, simulation = simulate(layer_of(SHAPE), model, Pipeline(10, 2, 2), World(2), [first, second])
    for rank in range(2):
        assert both[0][rank].tobytes() == alone[0][rank].tobytes()
        assert not any(np.shares_memory(both[0][rank], region) for region in simulation.pes[rank].memory.values())
