"""Cut-through dispatch: groups of tokens go on as they arrive; the sums are the same, and no group meets another in a slot."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from inc_runtime.collectives import cut_through, inc_all_to_all
from inc_runtime.config import CommunicationModel, Pipeline, SumOrder, check
from inc_runtime.errors import ConfigurationError, Mismatch
from inc_runtime.heap_layout import Dims
from inc_runtime.one_sided import Flag
from inc_runtime.op_trace import Event, count
from inc_runtime.protocol import World, signal_word
from megakernel import fused_layer, pipeline
from tests.expected import check_outputs
from tests.mutants import LAYER, SHAPE, Setting, caught
from tests.routings import COUNTS, ROUTINGS, draw_call
from tests.simulate import simulate

MODEL = CommunicationModel.INC_ALL_TO_ALL
W, MB, M = 3, 4, 5
PIPELINE = Pipeline(MB * M, MB, 2, row_group_tokens=2)
GROUPS = 2
WORLD = World(W)


def call_of(routing: str = "minus_one_anywhere", counts: str = "full", seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return draw_call(rng, SHAPE, COUNTS[counts](rng, W, MB * M), routing, W)


def run(carried: Pipeline, call: list, world: World = WORLD, **options) -> tuple[list[np.ndarray], list[Event]]:
    outputs, simulation = simulate(LAYER, MODEL, carried, world, [call], **options)
    check_outputs(LAYER, call, outputs[0], f"{world} {carried}", sum_roundings=1 + carried.local_bypass)
    return outputs[0], simulation.events()


@pytest.mark.parametrize("local_bypass", [False, True], ids=["", "local bypass"])
@pytest.mark.parametrize("routing", list(ROUTINGS))
def test_every_routing_depth_and_group_gives_the_reference(routing: str, local_bypass: bool) -> None:
    for seed, counts in enumerate(COUNTS):
        for group in (1, 3, 4):
            carried = replace(PIPELINE, depth=1 + seed, row_group_tokens=group, local_bypass=local_bypass)
            run(carried, call_of(routing, counts, seed), seed=seed, jitter_us=50.0)


@pytest.mark.parametrize("planes", [(2, 1), (1, 2), (2, 2), (2, 3)], ids=str)
def test_planes_give_the_reference(planes: tuple[int, int]) -> None:
    for seed in range(4):
        carried = replace(PIPELINE, microbatch_tokens=5, local_bypass=bool(seed % 2))
        run(carried, call_of(counts="ragged", seed=seed), World(W, *planes), seed=seed, jitter_us=30.0)


def test_sums_in_rank_order_are_those_of_store_and_forward_bit_for_bit() -> None:
    call = call_of("uniform", "ragged")
    for local_bypass in (False, True):
        whole = replace(PIPELINE, sum_order=SumOrder.RANK, local_bypass=local_bypass, row_group_tokens=None)
        wanted = b"".join(out.tobytes() for out in run(whole, call)[0])
        for seed in range(10):
            cut = replace(whole, row_group_tokens=1 + seed % 4)
            assert b"".join(out.tobytes() for out in run(cut, call, seed=seed, jitter_us=50.0, traced=False)[0]) == wanted


def test_rows_are_those_of_store_and_forward_and_every_group_has_its_words() -> None:
    call = call_of(counts="ragged")
    (_, whole), (_, cut) = (run(replace(PIPELINE, row_group_tokens=group), call) for group in (None, 2))
    for name in ("rows_sent", "rows_received", "dispatch_rows_sent", "combine_rows_received"):
        assert getattr(count(cut, World(W)), name) == getattr(count(whole, World(W)), name), name
    words = Counter(event.name for event in cut)
    assert words["group_arrived"] == W * GROUPS * M and words["expert_group_arrived"] == W * W * GROUPS * M
    assert not words["tokens_arrived"] and not words["expert_rows_arrived"]


@pytest.mark.parametrize("group", [None, 2])
def test_a_late_rank_holds_up_its_own_rows_alone(group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the other ranks go on before the late one has pushed; store-and-forward waits for it."""
    late_us = 1000.0
    original = inc_all_to_all.stage_tokens

    def stage_tokens(pe, call, magic, routed):
        original(pe, call, magic, routed)
        if pe.pe == 0:
            pe.simulation.sleep(late_us)

    monkeypatch.setattr(inc_all_to_all, "stage_tokens", stage_tokens)
    _, events = run(replace(PIPELINE, row_group_tokens=group), call_of("uniform"))
    words = [e for e in events if e.magic == 1 and e.name in ("expert_rows_arrived", "expert_group_arrived")]
    early = [e for e in words if e.start_us < late_us]
    assert len(words) == (W * W * GROUPS if group else W)
    assert len(early) == ((W - 1) * W * GROUPS if group else 0)


@pytest.mark.parametrize("model", [m for m in CommunicationModel if m is not MODEL], ids=lambda m: m.value)
def test_other_models_are_refused(model: CommunicationModel) -> None:
    with pytest.raises(ConfigurationError, match="row_group_tokens = 2: it must be left out for"):
        Dims.of(model, World(W), SHAPE, PIPELINE)


@pytest.mark.parametrize("group", [0, 5])
def test_groups_that_are_no_part_of_a_microbatch_are_refused(group: int) -> None:
    with pytest.raises(ConfigurationError, match=f"row_group_tokens = {group}: it must be between 1 and"):
        check(SHAPE, replace(PIPELINE, row_group_tokens=group), W)


CUT = Setting(MODEL, row_group_tokens=1)


def test_a_group_without_tokens_that_has_no_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(cut_through, "signal_word", lambda magic, payload: signal_word(magic if payload else 0, payload))

    caught(replace(CUT, tokens=(10, 0, 3)), monkeypatch, mutate)


def test_slots_that_are_used_before_their_sums_are_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(fused_layer, "schedule", lambda num, depth: pipeline.schedule(num, depth + 1))

    caught(CUT, monkeypatch, mutate)


def test_a_rank_that_waits_for_the_first_group_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        def first_group(region: str, index: tuple[int, ...]) -> Flag:
            return Flag(region, (*index[:-1], 0) if region == "expert_group_arrived" else index)

        patch.setattr(cut_through, "Flag", first_group)

    caught(CUT, monkeypatch, mutate)


def test_a_rank_of_another_bound_is_refused_by_the_others() -> None:
    setting = replace(CUT, tokens=(8, 8, 8), num_microbatches=4)
    call = draw_call(np.random.default_rng(0), SHAPE, setting.tokens, "uniform", W)
    other = replace(setting.pipeline, bound_tokens=14)
    with pytest.raises(Mismatch, match="bound_tokens = "):
        simulate(LAYER, MODEL, setting.pipeline, World(W), [call], jitter_us=20.0, rank_pipelines={1: other})
