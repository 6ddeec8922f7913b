"""The stages as data, and the order in which a rank takes them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from inc_runtime.config import CommunicationModel, Implementation
from inc_runtime.errors import ConfigurationError
from megakernel.implementations import MODELS_OF, check_model
from megakernel.pipeline import StageGroup, schedule
from megakernel.stages import EIGHT_STAGES, STAGES_OF, TEN_STAGES, Unit, stored_tensors

SIZES = [(m, d) for m in (1, 2, 3, 4, 7, 12) for d in (1, 2, 3, 4, 5, 9)]


@pytest.mark.parametrize(
    ("implementation", "number"),
    [
        (Implementation.BASELINE, 10),
        (Implementation.MEGAKERNEL, 7),
        (Implementation.MEGAKERNEL_PHASED, 7),
        (Implementation.MEGAKERNEL_INC, 5),
        (Implementation.MEGAKERNEL_INC_PHASED, 5),
    ],
)
def test_an_implementation_stores_ten_seven_or_five_tensors(implementation: Implementation, number: int) -> None:
    assert len(set(stored_tensors(implementation))) == number


def test_the_eight_stages_are_numbered_in_order_and_the_other_two_are_pack_and_global_reduce() -> None:
    assert [stage.number for stage in EIGHT_STAGES] == list(range(1, 9))
    names = ["route", "dispatch", "group", "matmul_gate_up", "swiglu", "matmul_down", "reduce", "combine"]
    assert [stage.name for stage in EIGHT_STAGES] == names
    assert [stage.name for stage in TEN_STAGES if stage not in EIGHT_STAGES] == ["pack", "global_reduce"]
    assert len(TEN_STAGES) == 10
    assert STAGES_OF[Implementation.MEGAKERNEL_INC] == EIGHT_STAGES and STAGES_OF[Implementation.BASELINE] == TEN_STAGES


def test_the_chain_of_eight_stages_crosses_from_one_class_of_unit_to_another_seven_times() -> None:
    units = [stage.unit for stage in EIGHT_STAGES]
    assert all(a is not b for a, b in pairwise(units))
    assert Counter(units) == {Unit.VECTOR: 4, Unit.MATRIX: 2, Unit.NETWORK: 2}


def test_four_regions_are_visible_to_the_network_with_in_network_computing() -> None:
    assert [stage.name for stage in EIGHT_STAGES if stage.in_heap] == ["route", "dispatch", "reduce", "combine"]


def test_every_model_belongs_to_an_implementation_and_others_are_refused() -> None:
    assert {model for models in MODELS_OF.values() for model in models} == set(CommunicationModel)
    for implementation in Implementation:
        for model in CommunicationModel:
            if model in MODELS_OF[implementation]:
                check_model(implementation, model)
                continue
            with pytest.raises(ConfigurationError) as refusal:
                check_model(implementation, model)
            assert implementation.value in str(refusal.value) and model.value in str(refusal.value)


@pytest.mark.parametrize(("num_microbatches", "depth"), SIZES)
def test_every_group_runs_once_per_microbatch_and_in_order(num_microbatches: int, depth: int) -> None:
    steps = list(schedule(num_microbatches, depth))
    for group in StageGroup:
        assert [number for g, number in steps if g is group] == list(range(num_microbatches))
    for number in range(num_microbatches):
        order = [g for g, n in steps if n == number]
        assert order == [StageGroup.SEND, StageGroup.EXPERTS, StageGroup.FINISH]


@pytest.mark.parametrize(("num_microbatches", "depth"), SIZES)
def test_at_most_d_microbatches_are_in_flight_and_d_are_reached(num_microbatches: int, depth: int) -> None:
    in_flight: set[int] = set()
    most = 0
    for group, number in schedule(num_microbatches, depth):
        if group is StageGroup.SEND:
            assert number - depth not in in_flight, "the slot set of this microbatch is still in use"
            in_flight.add(number)
        elif group is StageGroup.FINISH:
            in_flight.remove(number)
        most = max(most, len(in_flight))
        assert len(in_flight) <= depth
    assert not in_flight and most == min(depth, num_microbatches)


@pytest.mark.parametrize("depth", [3, 4, 5, 9])
def test_from_depth_three_on_three_microbatches_are_in_different_stages(depth: int) -> None:
    """At some step one microbatch is sent but not computed, one computed in this step, one computed but not finished."""
    sent, computed, finished = set(), set(), set()
    seen = False
    for group, number in schedule(2 * depth + 1, depth):
        if group is StageGroup.EXPERTS:
            seen |= bool(sent - computed - {number}) and bool(computed - finished)
        {StageGroup.SEND: sent, StageGroup.EXPERTS: computed, StageGroup.FINISH: finished}[group].add(number)
    assert seen


def test_no_group_precedes_what_it_waits_for_on_any_rank() -> None:
    """All ranks run one order, so a rank never waits for a microbatch that another has not sent before the same point."""
    for num_microbatches, depth in SIZES:
        position = {step: i for i, step in enumerate(schedule(num_microbatches, depth))}
        for number in range(num_microbatches):
            assert position[StageGroup.SEND, number] < position[StageGroup.EXPERTS, number]
            assert position[StageGroup.EXPERTS, number] < position[StageGroup.FINISH, number]
