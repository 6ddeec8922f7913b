"""Pieces of the switch programs by themselves: who may go next, what is pulled, and which headers are refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from inc_runtime.collectives.microbatch import Call, check_header, first_row, write_header
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.errors import Mismatch
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.one_sided import Awaited, Flag
from inc_runtime.protocol import HEADER_FIELDS, Header, Role, Tag, World
from switch_emulator.combine_plan import CombinePlan
from switch_emulator.phases import PhaseQueue
from switch_emulator.serving import Stopped, in_order_of_arrival

Model = CommunicationModel
SHAPE = LayerShape(6, 2, 8, 8)


def test_places_are_given_in_order_of_request_and_never_more_than_there_are() -> None:
    queue = PhaseQueue(2)
    assert queue.open_next() is None and not (queue.places or queue.waiting)
    for rank in (3, 1, 0, 2):
        queue.request(rank, 7)
    assert queue.open_next() == (0, (3, 7)) and queue.open_next() == (1, (1, 7))
    assert queue.open_next() is None and (queue.places or queue.waiting)
    queue.close((1, 7))
    assert queue.open_next() == (1, (0, 7)), "the freed place goes to the oldest request"
    queue.close((3, 7))
    queue.close((0, 7))
    assert queue.open_next() == (0, (2, 7))
    queue.close((2, 7))
    assert not (queue.places or queue.waiting)


def test_requests_of_two_microbatches_of_one_rank_are_told_apart() -> None:
    queue = PhaseQueue(2)
    queue.request(0, 1)
    queue.request(0, 2)
    queue.open_next()
    queue.open_next()
    queue.close((0, 2))
    assert queue.places == {0: (0, 1)}


@pytest.mark.parametrize("num_places", [1, 2, 3])
def test_under_random_requests_every_request_is_served_once_in_order(num_places: int) -> None:
    rng = np.random.default_rng(num_places)
    queue, asked, served = PhaseQueue(num_places), [], []
    for number in range(300):
        if rng.random() < 0.5:
            asked.append((int(rng.integers(4)), number))
            queue.request(*asked[-1])
        while opened := queue.open_next():
            served.append(opened[1])
        assert len(queue.places) <= num_places
        if queue.places and rng.random() < 0.6:
            queue.close(queue.places[int(rng.choice(list(queue.places)))])
    while (queue.places or queue.waiting):
        queue.close(next(iter(queue.places.values())))
        while opened := queue.open_next():
            served.append(opened[1])
    assert served == asked


def combine_switch_with_plan(model: Model, world: World, ids: list[np.ndarray], plane: int = 0) -> CombinePlan:
    """A combine switch whose plan of magic 1 holds these choices: `ids[sender]` [n, k]."""
    pipeline = Pipeline(5, 5, 2)
    dims = Dims.of(model, world, SHAPE, pipeline)
    layout = HeapLayout(dims)
    memory = layout.carve(Role.COMBINE_SWITCH, np.zeros(layout.heap_bytes, np.uint8))
    call = Call(SHAPE, pipeline)
    for sender, choice in enumerate(ids):
        for p in range(world.num_dispatch_switches):
            own = choice[p * dims.dispatch_plane_tokens : (p + 1) * dims.dispatch_plane_tokens]
            write_header(memory["plan_header"][1, p, sender], call, 1, len(own))
            memory["plan_routing"][1, p, sender, : len(own)]["expert_ids"] = own
    pe = SimpleNamespace(layout=layout, memory=memory, pe=world.combine_switch(plane), world=world)
    return CombinePlan(pe, 1)  # type: ignore[arg-type]


CHOICES = [
    np.array([[0, 1], [2, 5], [-1, 4], [0, 3], [-1, -1]]),
    np.empty((0, 2), int),
    np.array([[5, 5], [0, 2], [1, -1]]),
]


def rows_where_they_landed(model: Model, world: World, expert_rank: int, owners: range | list[int]) -> dict:
    """(owner, token) -> row of the slot, by walking over the dispatch as it delivers: plane by plane, sender by sender."""
    dims = Dims.of(model, world, SHAPE, Pipeline(5, 5, 2))
    placed = {}
    for plane in range(world.num_dispatch_switches):
        packed = plane * 3 * dims.dispatch_plane_tokens
        for sender in range(3):
            own = (plane * 3 + sender) * dims.dispatch_plane_tokens
            start = plane * dims.dispatch_plane_tokens
            for token in range(start, min(start + dims.dispatch_plane_tokens, len(CHOICES[sender]))):
                ranks = {int(e) // 2 for e in CHOICES[sender][token] if e >= 0} if model.selective else {0, 1, 2}
                if expert_rank not in ranks:
                    continue
                row = own if model.phased else packed
                if sender in owners:
                    placed[sender, token] = row
                packed, own = packed + 1, own + 1
    return placed


@pytest.mark.parametrize("model", [m for m in Model if m.in_network], ids=lambda m: m.value)
@pytest.mark.parametrize("planes", [(1, 1), (2, 1), (1, 2), (2, 3)], ids=str)
def test_a_plan_names_the_row_of_every_token_on_its_expert_rank(model: Model, planes: tuple[int, int]) -> None:
    world = World(3, *planes)
    groups = [[0, 1, 2]] if not model.phased else [[0], [1], [2, 0]]
    for owners in groups:
        for expert_rank in range(3):
            seen = {}
            for plane in range(world.num_combine_switches):
                plan = combine_switch_with_plan(model, world, CHOICES, plane)
                for pull in plan.pulls(expert_rank, owners):
                    for position, (owner, token) in enumerate(zip(pull.owners, pull.tokens, strict=True)):
                        assert 0 <= token < len(plan.token_range)
                        seen[int(owner), int(token) + plan.token_range.start] = pull.start + position
            assert seen == rows_where_they_landed(model, world, expert_rank, owners), (owners, expert_rank)


def test_a_plan_counts_the_tokens_that_its_plane_sums_for_each_owner() -> None:
    for plane, wanted in ((0, [2, 0, 2]), (1, [2, 0, 1]), (2, [1, 0, 0])):
        plan = combine_switch_with_plan(Model.INC_ALL_TO_ALL, World(3, 2, 3), CHOICES, plane)
        assert [plan.num_tokens(owner) for owner in range(3)] == wanted


def test_first_rows_of_phased_and_relayed_senders_are_a_stride_apart_and_packed_ones_follow_each_other() -> None:
    for model in Model:
        dims = Dims.of(model, World(3, 2, 1), SHAPE, Pipeline(5, 5, 2))
        starts = [first_row(dims, plane, sender, 0) for plane in range(2) for sender in range(3)]
        if model.phased or not model.in_network:
            assert starts == [0, 3, 6, 9, 12, 15]
        else:
            assert starts == [0, 0, 0, 9, 9, 9] and first_row(dims, 1, 2, 4) == 13
        assert dims.expert_row_capacity == 18


@pytest.mark.parametrize(
    "field", [Header.STEP, Header.BOUND_TOKENS, Header.MICROBATCH_TOKENS, Header.NUM_EXPERTS, Header.TOP_K, Header.HIDDEN_SIZE]
)
def test_a_header_that_disagrees_is_refused_with_sender_field_and_both_values(field: Header) -> None:
    pipeline = Pipeline(40, 5, 2)
    dims = Dims.of(Model.INC_ALL_TO_ALL, World(3), SHAPE, pipeline)
    first, header = np.zeros((2, HEADER_FIELDS), np.int64)
    for each in (first, header):
        write_header(each, Call(SHAPE, pipeline), 9, 5)
    header[Header.NUM_ROWS] = 1
    check_header(header, first, 9, dims, "rank 2")
    expected = int(header[field])
    header[field] = 77
    with pytest.raises(Mismatch) as refusal:
        check_header(header, first, 9, dims, "rank 2")
    assert f"rank 2 brought {field.name.lower()} = 77 to magic 9, expected {expected}" in str(refusal.value)


class ScriptedPe:
    """A PE whose waits return what the script says, and that remembers how it was asked."""

    def __init__(self, *script: list[str]) -> None:
        self.world = World(3)
        self.script = list(script)
        self.asked: list[tuple[bool, list[str]]] = []

    def wait_until_some(self, awaited, tag, *, microbatch=-1, idle=False) -> list[int]:
        self.asked.append((idle, [f"{a.flag.region} of {a.sender}" for a in awaited]))
        arriving = self.script.pop(0)
        return [position for position, name in enumerate(self.asked[-1][1]) if name in arriving]


def serving(pe: ScriptedPe) -> list[int]:
    expected = [Awaited(Flag("tokens_arrived", (0, rank)), 4, f"rank {rank}") for rank in range(3)]
    return list(in_order_of_arrival(pe, expected, Tag.DISPATCH_TOKENS, 4))  # type: ignore[arg-type]


def test_a_switch_waits_without_limit_until_the_first_arrival_and_with_the_limit_after_it() -> None:
    pe = ScriptedPe(["tokens_arrived of rank 2"], ["tokens_arrived of rank 0"], ["tokens_arrived of rank 1"])
    assert serving(pe) == [2, 0, 1]
    assert [idle for idle, _ in pe.asked] == [True, False, False]
    assert len(pe.asked[0][1]) == 6, "while idle it listens for the stop words too"
    assert pe.asked[1][1] == ["tokens_arrived of rank 0", "tokens_arrived of rank 1"]


def test_a_switch_stops_only_once_every_rank_has_stopped() -> None:
    pe = ScriptedPe(["stop of rank 1"], ["stop of rank 0", "stop of rank 2"])
    with pytest.raises(Stopped):
        serving(pe)
    late = ScriptedPe(
        ["stop of rank 1"], ["tokens_arrived of rank 0"], ["tokens_arrived of rank 1", "tokens_arrived of rank 2"]
    )
    assert serving(late) == [0, 1, 2]
