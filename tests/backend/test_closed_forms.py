"""Counters of the trace equal the closed forms of the post: one side counted by the runtime, the other from the routing alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import ceil

import numpy as np
import pytest

from inc_runtime.backends.link_model import LinkModel
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.op_trace import Event, count
from inc_runtime.protocol import World
from megakernel.fused_layer import LayerInput
from tests.routings import draw_call, layer_of
from tests.simulate import simulate

Model = CommunicationModel
W, E, K, H, MB, M = 4, 8, 3, 16, 4, 5
SHAPE = LayerShape(E, K, H, 8)
PIPELINE = Pipeline(MB * M, MB, 2)
WORLD = World(W)
RECORD = 8 + 8 * K  # token and sender, then an id and a weight for each choice
HEADER = 9 * 8
WORD = 8
IN_NETWORK = [model for model in Model if model.in_network]
RELAYED = [model for model in Model if not model.in_network]
by_name = {"ids": lambda model: model.value}


@cache
def call_of(seed: int = 0) -> tuple[LayerInput, ...]:
    return tuple(draw_call(np.random.default_rng(seed), SHAPE, [MB * M] * W, "minus_one_anywhere", W))


@cache
def run(model: Model, pipeline: Pipeline = PIPELINE, world: World = WORLD) -> list[Event]:
    _, simulation = simulate(layer_of(SHAPE), model, pipeline, world, [list(call_of())])
    return simulation.events()


def ranks_of_token(model: Model, rank: int, token: int) -> set[int]:
    """Ranks that need one token of a rank: those of its experts, two to a rank; or all."""
    ids = call_of()[rank].expert_ids[token]
    return {int(i) // (E // W) for i in ids if i >= 0} if model.selective else set(range(W))


def tokens_of(microbatch: int, plane: int = 0, planes: int = 1) -> range:
    share = ceil(MB / planes)
    first = microbatch * MB
    return range(first + plane * share, first + min((plane + 1) * share, MB))


def ranks_of_microbatch(model: Model, rank: int, microbatch: int, plane: int = 0, planes: int = 1) -> set[int]:
    return set().union(*(ranks_of_token(model, rank, t) for t in tokens_of(microbatch, plane, planes)))


def copies(model: Model, rank: int) -> int:
    """Rows that a rank's tokens make when each goes once to every rank that needs it."""
    return sum(len(ranks_of_token(model, rank, token)) for token in range(MB * M))


@pytest.mark.parametrize("model", [m for m in IN_NETWORK if not m.phased], **by_name)
@pytest.mark.parametrize("planes", [1, 2])
def test_an_inc_collective_crosses_the_switch_with_w_packets_in_and_w_out_per_plane(model: Model, planes: int) -> None:
    """2W per collective; a rank that holds none of a microbatch's experts is not pulled from."""
    counters = count(run(model, PIPELINE, World(W, planes, planes)), World(W, planes, planes))
    assert counters.dispatch_packets == 2 * W * planes * M
    pulls = sum(
        len(set().union(*(ranks_of_microbatch(model, owner, m, p, planes) for owner in range(W))))
        for m in range(M)
        for p in range(planes)
    )
    assert counters.combine_packets == pulls + W * planes * M
    assert counters.combine_packets <= 2 * W * planes * M
    if planes == 1:
        assert pulls == W * M, "every rank holds experts of every microbatch here, so that the form is 2W"
    assert counters.chunks == 0


@pytest.mark.parametrize("model", RELAYED, **by_name)
@pytest.mark.parametrize("planes", [1, 2])
def test_a_relayed_collective_crosses_the_switch_with_w_squared_packets_in_and_out_per_plane(
    model: Model, planes: int
) -> None:
    counters = count(run(model, PIPELINE, World(W, planes, planes)), World(W, planes, planes))
    assert counters.dispatch_packets == 2 * W * W * planes * M
    assert counters.combine_packets == 2 * W * W * planes * M


def test_without_switches_every_rank_sends_one_message_to_every_rank_and_one_back() -> None:
    events = run(Model.ALL_TO_ALL, PIPELINE, World(W, 0, 0))
    rows = {name: sum(e.rows for e in events if e.name == name) for name in ("expert_chunk_arrived", "partial_chunk_arrived")}
    messages = Counter(event.name for event in events if event.name in rows)
    assert set(messages.values()) == {W * W * M}
    assert set(rows.values()) == {sum(copies(Model.ALL_TO_ALL, rank) for rank in range(W))}


@pytest.mark.parametrize("model", [m for m in IN_NETWORK if m.phased], **by_name)
def test_a_phased_inc_collective_relays_each_microbatch_of_a_rank_by_itself(model: Model) -> None:
    """Dispatch: W in, W out for each sender. Combine: W_x pulls for each owner at G = 1, one per rank at G = W; one back."""
    for ranks_per_phase in (1, W):
        counters = count(run(model, replace(PIPELINE, ranks_per_phase=ranks_per_phase)), World(W))
        assert counters.dispatch_packets == (W + W * W) * M
        selected = [[ranks_of_microbatch(model, owner, m) for owner in range(W)] for m in range(M)]
        pulls = sum(len(ranks) for owners in selected for ranks in owners)
        if ranks_per_phase == W:
            pulls = sum(len(set().union(*owners)) for owners in selected)
        assert counters.combine_packets == pulls + W * M


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_rows_sent_and_received_per_rank_are_those_of_the_post(model: Model) -> None:
    """m_b with in-network computing; the sum of distinct ranks for an all-to-all; W m_b for an all-gather."""
    counters = count(run(model), World(W))
    wanted = MB * M if model.in_network else max(copies(model, rank) for rank in range(W))
    assert counters.dispatch_rows_sent == wanted
    assert counters.combine_rows_received == wanted
    if not model.in_network:
        assert wanted <= (min(K, W) if model.selective else W) * MB * M
    if not model.selective and not model.in_network:
        assert wanted == W * MB * M


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_rows_of_each_rank_and_microbatch_are_those_of_its_tokens(model: Model) -> None:
    """The same forms for every rank and microbatch, counted from the events by hand."""
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for event in run(model):
        if event.pe < W and event.peer == W and event.name in ("tokens_arrived", "relay_arrived"):
            sent[event.pe, event.magic - 1] += event.rows
        if event.name in ("token_sums_arrived", "partial_chunk_arrived"):
            received[event.peer, event.magic - 1] += event.rows
    for rank in range(W):
        for microbatch in range(M):
            wanted = sum(len(ranks_of_token(model, rank, t)) for t in tokens_of(microbatch))
            wanted = MB if model.in_network else wanted
            assert (sent[rank, microbatch], received[rank, microbatch]) == (wanted, wanted), (rank, microbatch)


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_every_expert_rank_receives_each_of_its_tokens_once(model: Model) -> None:
    received: Counter[int] = Counter()
    for event in run(model):
        if event.name in ("expert_rows_arrived", "expert_chunk_arrived"):
            received[event.peer] += event.rows
    for expert_rank in range(W):
        wanted = sum(expert_rank in ranks_of_token(model, rank, t) for rank in range(W) for t in range(MB * M))
        assert received[expert_rank] == wanted


def wire_bytes_of(event: Event, model: Model) -> int:
    """What one event puts on the link, from its rows and its kind of message alone."""
    rows = event.rows * 2 * H
    records = event.rows * RECORD
    if event.name in ("tokens_arrived",):
        return HEADER + records + rows + WORD
    if event.name in ("expert_rows_arrived", "expert_chunk_arrived"):
        header = HEADER if event.rows and event.part == 0 else 0
        return header + records + rows + WORD
    if event.name == "relay_arrived":
        chunk = 7 * 8
        return chunk + rows + WORD + (HEADER + records if event.peer == W else 0)
    if event.name in ("token_sums_arrived", "partial_chunk_arrived"):
        return rows + WORD
    if event.name == "plan_arrived":
        return W * (HEADER + MB * RECORD) + WORD
    if event.name == "combine_requests":
        return (HEADER + MB * RECORD if model.in_network else 0) + WORD
    return rows if event.kind == "get" else WORD


@pytest.mark.parametrize("model", list(Model), **by_name)
def test_logical_bytes_are_rows_and_wire_bytes_are_explained_to_the_last(model: Model) -> None:
    transfers = [event for event in run(model) if event.kind in ("put_signal", "signal", "get")]
    for event in transfers:
        assert event.row_bytes == event.rows * H * 2, event
        assert event.wire_bytes == wire_bytes_of(event, model), event
    counters = count(transfers, World(W))
    assert counters.wire_bytes_sent > counters.row_bytes_sent == counters.rows_sent * H * 2
    assert counters.wire_bytes_received > counters.row_bytes_received == counters.rows_received * H * 2
    sent = [0] * W
    for event in transfers:
        source = event.peer if event.kind == "get" else event.pe
        if source < W:
            sent[source] += wire_bytes_of(event, model)
    assert counters.wire_bytes_sent == max(sent)


@pytest.mark.parametrize("model", RELAYED, **by_name)
def test_relayed_chunks_hold_at_most_32_kib_and_are_as_few_as_that_allows(model: Model) -> None:
    """H = 8,192: two rows of 16 KiB to a chunk; messages of up to nine rows."""
    shape, bound = LayerShape(4, 2, 8192, 1), 9 * 3
    call = draw_call(np.random.default_rng(0), shape, [bound, 5], "uniform", 2)
    _, simulation = simulate(layer_of(shape), model, Pipeline(bound, 9, 1), World(2), [call])
    chunks: dict[tuple, list[Event]] = {}
    for event in simulation.events():
        if event.name in ("expert_chunk_arrived", "partial_chunk_arrived"):
            assert event.row_bytes <= 32 * 1024
            chunks.setdefault((event.name, event.peer, event.magic), []).append(event)
    largest = 0
    for rank in range(2):
        for microbatch in range(3):
            expected = []
            for sender in range(2):
                ids = call[sender].expert_ids[microbatch * 9 : (microbatch + 1) * 9]
                rows = (ids // 2 == rank).any(axis=1).sum() if model.selective else len(ids)
                expected.append(max(1, ceil(int(rows) / 2)))
            largest = max(largest, *expected)
            assert len(chunks["expert_chunk_arrived", rank, microbatch + 1]) == sum(expected)
    assert largest == 5
    into = [e for e in simulation.events() if e.name == "relay_arrived"]
    assert len(into) == sum(map(len, chunks.values())), "every chunk goes in once and out once"
    assert max(e.wire_bytes for e in into) <= 32 * 1024 + 7 * 8 + HEADER + 2 * (8 + 8 * 2) + WORD


def steps(model: Model, ranks_per_phase: int = 1, barrier: bool = False) -> tuple[float, float]:
    """Steps on the critical path of the dispatch, and of the whole layer, of one microbatch: one microsecond each."""
    ids = np.array([[0, 2, 4, 6]] * MB)  # every token on every rank
    shape = replace(SHAPE, top_k=4)
    call = draw_call(np.random.default_rng(0), shape, [MB] * W, "uniform", W)
    for given in call:
        given.expert_ids[:] = ids
    link = LinkModel(latency_us=1.0, port_gbps=1e12)
    pipeline = Pipeline(MB, MB, 1, ranks_per_phase, barrier)
    _, simulation = simulate(layer_of(shape), model, pipeline, World(W), [call], link=link)
    waits = [event for event in simulation.events() if event.pe < W and event.kind == "wait"]
    dispatch = max(e.end_us for e in waits if e.name in ("expert_rows", "dispatch_barrier"))
    return dispatch, max(e.end_us for e in waits if e.name == "token_sums")


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-3)


def test_dispatch_and_combine_through_a_relay_take_two_steps_each() -> None:
    for model in (Model.ALL_TO_ALL, Model.ALL_GATHER_REDUCE_SCATTER):
        assert steps(model) == (close(2), close(4))


def test_an_inc_dispatch_takes_two_steps_and_a_combine_one_pull_per_rank_between_ready_and_return() -> None:
    """Each pull is a request and its answer, completed before the next, as the post has it: 1 + 2W + 1."""
    for model in (Model.INC_ALL_TO_ALL, Model.INC_ALL_GATHER_REDUCE_SCATTER):
        assert steps(model) == (close(2), close(2 + 1 + 2 * W + 1))


def test_phases_of_one_rank_take_request_then_grant_put_multicast_each_and_a_barrier_two_more() -> None:
    for model in (Model.INC_ALL_TO_ALL_PHASED, Model.INC_ALL_GATHER_REDUCE_SCATTER_PHASED):
        dispatch, whole = steps(model)
        assert dispatch == close(1 + 3 * W)
        assert whole == close(dispatch + 1 + W * 2 * W + 1)
        assert steps(model, barrier=True)[0] == close(1 + 3 * W + 2)


@pytest.mark.parametrize("model", [m for m in Model if m.phased], **by_name)
def test_fewer_phases_take_fewer_steps(model: Model) -> None:
    totals = [steps(model, ranks_per_phase)[1] for ranks_per_phase in (1, 2, W)]
    assert totals[0] > totals[1] > totals[2]
    plain = {m.value: m for m in Model}[model.value.removesuffix("_phased")]
    assert totals[2] > steps(plain)[1], "phases cost latency, also when one phase holds all ranks"


def test_at_least_three_microbatches_are_in_different_stages_at_once() -> None:
    """D = 3: at some instant a dispatch, an expert stage and a combine of three microbatches overlap in the trace."""
    call = draw_call(np.random.default_rng(0), SHAPE, [MB * 7] * W, "uniform", W)
    _, simulation = simulate(
        layer_of(SHAPE), Model.INC_ALL_TO_ALL, Pipeline(MB * 7, MB, 3), World(W), [call], stage_cost=lambda stage, rows: 5.0
    )
    spans: dict[str, dict[int, tuple[float, float]]] = {"dispatch": {}, "experts": {}, "combine": {}}
    for e in simulation.events():
        kind = {"tokens_arrived": "dispatch", "expert_rows_arrived": "dispatch", "token_sums_arrived": "combine"}.get(e.name)
        if e.kind == "get" or e.name == "accumulate":
            kind = "combine"
        if e.kind == "stage" and e.name in ("group", "matmul_gate_up", "swiglu", "matmul_down", "reduce"):
            kind = "experts"
        if kind:
            start, end = spans[kind].get(e.magic, (e.start_us, e.end_us))
            spans[kind][e.magic] = (min(start, e.start_us), max(end, e.end_us))
    instants = [start for by_magic in spans.values() for start, _ in by_magic.values()]

    def active(kind: str, at: float) -> set[int]:
        return {magic for magic, (start, end) in spans[kind].items() if start <= at < end}

    assert any(
        len({a, b, c}) == 3
        for at in instants
        for a in active("dispatch", at)
        for b in active("experts", at)
        for c in active("combine", at)
    )
