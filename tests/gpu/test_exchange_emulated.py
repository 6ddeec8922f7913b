"""The kernels of ranks and switches on a CPU: every region and every sum equal what the role programs leave.

What a GPU adds (its memory model, links, times) is checked by `exchange_program.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, SumOrder
from inc_runtime.protocol import World
from tests.gpu.emulated_exchange import check_case
from tests.gpu.emulated_kernels import compiler
from tests.gpu.expected import Case

pytestmark = pytest.mark.skipif(compiler() is None, reason="g++ is not installed: the kernels cannot be emulated here")
MODELS = [model for model in CommunicationModel if model.selective]
SHAPE = LayerShape(num_experts=9, top_k=4, hidden_size=64, intermediate_size=64)
ONE = Case("one microbatch a call", SHAPE, Pipeline(8, 8, depth=3), ((0, 3), (5, 8), (0, 0), (1, 0)))
SEVERAL = Case("eight a call, rank order", SHAPE, Pipeline(50, 7, 2, 2, sum_order=SumOrder.RANK), ((50, 13), (26, 50)))
TILES = Case("several tiles a block", SHAPE, Pipeline(300, 300, 2), ((300, 290), (300, 0)))
THREE = Case("three ranks, no barrier", SHAPE, Pipeline(20, 3, 3, 2, barrier_after_dispatch=False), ((20, 0, 11), (3, 20, 20)))
CASES = (ONE, SEVERAL, TILES, THREE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.parametrize("local_bypass", [False, True], ids=["", "local bypass"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.value)
def test_every_region_and_sum_is_that_of_the_role_programs(folder, model, case, local_bypass):
    case = replace(case, model=model, pipeline=replace(case.pipeline, local_bypass=local_bypass))
    check_case(folder, case, World(len(case.num_tokens[0])))


@pytest.mark.parametrize("local_bypass", [False, True], ids=["", "local bypass"])
@pytest.mark.parametrize(("case", "group"), [(ONE, 3), (ONE, 8), (SEVERAL, 2), (TILES, 20), (THREE, 1)], ids=str)
def test_a_dispatch_switch_that_cuts_through_leaves_what_its_role_program_does(folder, case, group, local_bypass):
    pipeline = replace(case.pipeline, ranks_per_phase=1, local_bypass=local_bypass, row_group_tokens=group)
    check_case(folder, replace(case, pipeline=pipeline), World(len(case.num_tokens[0])))


@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_several_switches_of_each_role_share_the_tokens(folder, case, planes):
    case = replace(case, pipeline=replace(case.pipeline, ranks_per_phase=1))
    check_case(folder, case, World(len(case.num_tokens[0]), planes, planes))


@pytest.mark.parametrize("local_bypass", [False, True], ids=["", "local bypass"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_that_reach_each_other_need_no_switch(folder, case, local_bypass):
    case = replace(case, model=CommunicationModel.ALL_TO_ALL, pipeline=replace(case.pipeline, local_bypass=local_bypass))
    check_case(folder, case, World(len(case.num_tokens[0]), 0, 0))
