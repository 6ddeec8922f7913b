"""Local bypass: rows of a rank's own experts cross nothing, nothing else changes, and no slot is written too early."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from inc_runtime.cli import simulated_programs
from inc_runtime.collectives import inc_all_to_all, local_bypass
from inc_runtime.config import CommunicationModel, Implementation, LayerShape, Pipeline, SumOrder, check
from inc_runtime.errors import ConfigurationError, IncError
from inc_runtime.heap_layout import Dims
from inc_runtime.op_trace import Event, count
from inc_runtime.protocol import World
from inc_runtime.simulator.calibration import load_calibration
from inc_runtime.simulator.event_mode import simulate_layer
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import NetworkSpec, Scenario
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec
from megakernel import fused_layer, pipeline
from tests.expected import check_outputs
from tests.mutants import LAYER, SHAPE, Setting, caught
from tests.routings import COUNTS, ROUTINGS, draw_call, layer_of
from tests.simulate import given_experts, random_tokens, simulate

Model = CommunicationModel
MODELS = [model for model in Model if model.selective]
W, MB, M = 3, 4, 5
PIPELINE = Pipeline(MB * M, MB, 2, 2, local_bypass=True)
by_name = {"ids": lambda value: getattr(value, "value", str(value))}


def run(model: Model, world: World, carried: Pipeline, call: list, **options) -> tuple[list[np.ndarray], list[Event]]:
    outputs, simulation = simulate(LAYER, model, carried, world, [call], **options)
    roundings = 2 if model.in_network else 1
    check_outputs(LAYER, call, outputs[0], f"{model.value} {world} {carried}", sum_roundings=roundings)
    return outputs[0], simulation.events()


def call_of(routing: str = "minus_one_anywhere", counts: str = "full", seed: int = 0, bound: int = MB * M) -> list:
    rng = np.random.default_rng(seed)
    return draw_call(rng, SHAPE, COUNTS[counts](rng, W, bound), routing, W)


@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize("model", MODELS, **by_name)
def test_every_routing_gives_the_reference(model: Model, routing: str) -> None:
    for seed, counts in enumerate(COUNTS):
        run(model, World(W), PIPELINE, call_of(routing, counts, seed), seed=seed, jitter_us=30.0)


@pytest.mark.parametrize("planes", [(2, 1), (1, 2), (2, 2), (2, 3), (0, 0)], **by_name)
@pytest.mark.parametrize("model", MODELS, **by_name)
def test_planes_and_worlds_without_switches_give_the_reference(model: Model, planes: tuple[int, int]) -> None:
    if planes == (0, 0) and model is not Model.ALL_TO_ALL:
        pytest.skip("only the plain all-to-all runs without switches")
    for microbatch_tokens in (5, 1):
        carried = replace(PIPELINE, microbatch_tokens=microbatch_tokens)
        run(model, World(W, *planes), carried, call_of(counts="ragged"), jitter_us=30.0)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS, **by_name)
def test_every_depth_with_and_without_the_barrier_gives_the_reference(model: Model, depth: int) -> None:
    for seed in range(4):
        carried = replace(PIPELINE, depth=depth, microbatch_tokens=1, barrier_after_dispatch=bool(seed % 2))
        run(model, World(W), carried, call_of(counts="ragged", seed=seed, bound=11), seed=seed, jitter_us=50.0)


def needs(call: list, rank: int, token: int) -> set[int]:
    """The ranks of a token's experts: two experts a rank."""
    return {int(expert) // 2 for expert in call[rank].expert_ids[token] if expert >= 0}


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("routing", ["minus_one_anywhere", "one_hot_rank"])
@pytest.mark.parametrize("model", MODELS, **by_name)
def test_rows_and_bytes_that_cross_are_those_that_another_rank_needs(model: Model, routing: str, planes: int) -> None:
    """Closed forms, by rank: n_other tokens out and sums in, rows of other ranks in and partial sums out."""
    world, call = World(W, planes, planes), call_of(routing)
    _, events = run(model, world, PIPELINE, call)
    tokens = [(rank, token) for rank in range(W) for token in range(len(call[rank].tokens))]
    copies = [[sum(e in needs(call, r, t) for r, t in tokens if r == rank) for e in range(W)] for rank in range(W)]
    others = [sum(bool(needs(call, r, t) - {r}) for r, t in tokens if r == rank) for rank in range(W)]
    sent, received = Counter(), Counter()
    for event in events:
        if event.kind in ("put_signal", "get"):
            assert event.peer != event.pe, "a rank puts nothing to itself"
            source, target = (event.peer, event.pe) if event.kind == "get" else (event.pe, event.peer)
            sent[source] += event.rows
            received[target] += event.rows
            assert event.row_bytes == event.rows * SHAPE.hidden_size * 2
    for rank in range(W):
        into = sum(copies[owner][rank] for owner in range(W) if owner != rank)
        out = sum(copies[rank][expert] for expert in range(W) if expert != rank)
        pushed, returned = (others[rank],) * 2 if model.in_network else (out, out)
        assert sent[rank] == pushed + into, rank
        assert received[rank] == into + returned, rank
    counters = count(events, world)
    assert counters.dispatch_rows_sent == max(others if model.in_network else [sum(c) - c[r] for r, c in enumerate(copies)])
    if not model.in_network:
        assert counters.dispatch_packets == counters.combine_packets == 2 * W * (W - 1) * planes * M


@pytest.mark.parametrize("model", MODELS, **by_name)
def test_all_words_are_raised_as_without_bypass(model: Model) -> None:
    """But for those of chunks, which carry what stays at home."""
    names = []
    for bypass in (False, True):
        _, events = run(model, World(W), replace(PIPELINE, local_bypass=bypass), call_of("one_hot_rank"))
        words = Counter((e.name, e.peer, e.magic) for e in events if e.kind in ("put_signal", "signal"))
        chunks = ("relay_arrived", "relay_credits", "partial_chunk_arrived")
        names.append({key: n for key, n in words.items() if key[0] not in chunks})
    assert names[0] == names[1]


@pytest.mark.parametrize("model", MODELS, **by_name)
def test_sums_in_rank_order_repeat_their_bits(model: Model) -> None:
    """The own partial sum comes last in the in-network models; the plain ones give the bits that they give without bypass."""
    carried, call = replace(PIPELINE, sum_order=SumOrder.RANK), call_of("uniform", "ragged")
    wanted = b"".join(out.tobytes() for out in run(model, World(W), carried, call)[0])
    for seed in range(20):
        changed = replace(carried, depth=1 + seed % 3, microbatch_tokens=1 + seed % 5)
        outputs, _ = run(model, World(W), changed, call, seed=seed, jitter_us=50.0, traced=False)
        assert b"".join(out.tobytes() for out in outputs) == wanted, seed
    if not model.in_network:
        outputs, _ = run(model, World(W), replace(carried, local_bypass=False), call)
        assert b"".join(out.tobytes() for out in outputs) == wanted


@pytest.mark.parametrize("model", [m for m in Model if not m.selective], **by_name)
def test_models_whose_rows_go_everywhere_are_refused(model: Model) -> None:
    with pytest.raises(ConfigurationError, match="local_bypass = True: it must be left out for"):
        Dims.of(model, World(W), SHAPE, PIPELINE)


def test_one_rank_alone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="local_bypass = True: it must be False with one rank"):
        check(SHAPE, replace(PIPELINE, ranks_per_phase=1), 1)


SETTINGS = [Setting(model, local_bypass=True) for model in MODELS]
of_model = {"ids": lambda setting: setting.model.value}


@pytest.mark.parametrize("setting", SETTINGS, **of_model)
def test_own_rows_that_are_written_before_the_last_sums_are_back_are_caught(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(fused_layer, "schedule", lambda num, depth: pipeline.schedule(num, depth + 1))

    caught(setting, monkeypatch, mutate)


@pytest.mark.parametrize("setting", SETTINGS[2:], **of_model)
def test_own_rows_in_the_run_of_another_sender_are_caught(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run is where the switch packs, or where the rows of sender 0 come."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(local_bypass, "places_of_own_tokens", lambda dims, rank, tokens: tokens)

    caught(setting, monkeypatch, mutate)


def test_a_rank_that_publishes_nothing_where_all_its_rows_stay_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bypass skips no word: the switch waits for every rank before it returns the sums that free the slots."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = inc_all_to_all.publish_partial_sums
        patch.setattr(inc_all_to_all, "publish_partial_sums", lambda pe, *more: None if pe.pe == 0 else original(pe, *more))

    error = caught(replace(SETTINGS[2], routing="one_hot_rank"), monkeypatch, mutate)
    assert isinstance(error, IncError) and "COMBINE_PARTIAL_SUMS" in str(error)


IMPLEMENTATION_OF = {
    Model.ALL_TO_ALL: Implementation.MEGAKERNEL,
    Model.ALL_TO_ALL_PHASED: Implementation.MEGAKERNEL_PHASED,
    Model.INC_ALL_TO_ALL: Implementation.MEGAKERNEL_INC,
    Model.INC_ALL_TO_ALL_PHASED: Implementation.MEGAKERNEL_INC_PHASED,
}


@pytest.mark.parametrize("kind", [RoutingKind.UNIFORM, RoutingKind.HOT_RANK], **by_name)
@pytest.mark.parametrize("model", MODELS, **by_name)
def test_the_rows_that_the_simulator_keeps_at_home_are_those_of_the_executed_programs(model: Model, kind: RoutingKind) -> None:
    """Event mode takes them off by formula; here the role programs move what they move, on the same routing."""
    shape = LayerShape(12, 3, 8, 8)
    scenario = Scenario(
        shape=shape, num_ranks=W, implementation=IMPLEMENTATION_OF[model], tokens_per_rank=40, microbatch_tokens=16, depth=2,
        network=NetworkSpec(local_bypass=True), routing=RoutingSpec(kind),
    )  # fmt: skip
    plan = LayerPlan(scenario, load_calibration())
    wanted = simulate_layer(plan, simulated_programs()).counters
    ids = np.concatenate([plan.experts_of(number) for number in range(plan.num_microbatches)], axis=1)
    rng = np.random.default_rng(0)
    call = [given_experts(shape, random_tokens(rng, 40, 8), ids[rank], np.ones(ids[rank].shape)) for rank in range(W)]
    _, simulation = simulate(layer_of(shape), model, replace(scenario.pipeline, local_bypass=True), World(W), [call])
    seen = count(simulation.events(), World(W))
    assert wanted is not None
    for name in ("rows_sent", "rows_received", "row_bytes_sent", "row_bytes_received"):
        assert getattr(seen, name) == getattr(wanted, name), name
    for name in ("dispatch_rows_sent", "combine_rows_received"):
        assert getattr(seen, name) == getattr(wanted, name), name
