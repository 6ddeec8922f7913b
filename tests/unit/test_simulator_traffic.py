"""Routing of simulated layers, the loads that follow from it, and arrays that hold no elements."""

from __future__ import annotations

import numpy as np
import pytest

from inc_runtime.config import LayerShape
from inc_runtime.errors import ConfigurationError
from inc_runtime.routing import rank_of_experts
from inc_runtime.simulator.calibration import load_calibration
from inc_runtime.simulator.counted_rows import CountedRows
from inc_runtime.simulator.fast_mode import drawn_loads, expected_loads
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import NetworkSpec, Scenario, TopologyKind
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec, draw_experts, load_trace, loads_of, popularity
from megakernel.make_checkpoint import write_checkpoint
from results.record_routing import record

SHAPE = LayerShape(12, 3, 16, 8)


def plan_of(**changes) -> LayerPlan:
    return LayerPlan(Scenario(**({"tokens_per_rank": 256, "microbatch_tokens": 128} | changes)), load_calibration())


@pytest.mark.parametrize("weights", [np.ones(12), np.arange(1.0, 13.0)])
def test_experts_of_a_token_are_distinct(weights):
    ids = draw_experts(np.random.default_rng(0), weights, 500, 3)
    assert ids.shape == (500, 3) and all(len(set(row)) == 3 for row in ids)


def test_popular_experts_are_drawn_more_often():
    counts = np.bincount(draw_experts(np.random.default_rng(0), np.arange(1.0, 13.0), 20000, 3).ravel(), minlength=12)
    assert (np.diff(counts) > 0).all()


@pytest.mark.parametrize("kind", [RoutingKind.HOT_EXPERT, RoutingKind.HOT_RANK, RoutingKind.ZIPF])
def test_skew_makes_some_experts_hotter(kind):
    skewed, uniform = plan_of(routing=RoutingSpec(kind)), plan_of()
    hottest = [np.bincount(plan.experts_of(0).ravel()).max() for plan in (skewed, uniform)]
    assert hottest[0] > 1.5 * hottest[1]
    assert skewed.loads(0).pairs.sum() == uniform.loads(0).pairs.sum() == 4 * 128 * 8


def test_a_hot_rank_receives_more_than_the_others():
    pairs = plan_of(routing=RoutingSpec(RoutingKind.HOT_RANK)).loads(0).pairs
    assert pairs[0] > 2 * pairs[1:].max()


def test_loads_equal_a_count_token_by_token():
    rng = np.random.default_rng(1)
    ids = draw_experts(rng, np.arange(1.0, 13.0), 4 * 9, 3).reshape(4, 9, 3)
    ids[1, 2, 0] = ids[0, 0] = -1
    owner = rank_of_experts(12, 4)
    loads = loads_of(ids, SHAPE, 4, selective=True, tile_rows=8, ranks_per_leaf=2)
    rows, up, down, home = np.zeros((4, 4), int), np.zeros(4, int), np.zeros(2, int), np.zeros(4, int)
    for rank in range(4):
        for token in ids[rank]:
            ranks = {int(owner[e]) for e in token if e >= 0}
            for other in ranks:
                rows[rank, other] += 1
            leaves = {r // 2 for r in ranks} - {rank // 2}
            up[rank] += bool(leaves)
            home[rank] += ranks <= {rank}
            for leaf in leaves:
                down[leaf] += 1
    assert (loads.rows == rows).all() and (loads.leaf_up == up).all()
    assert (loads.leaf_down == down).all() and (loads.at_home == home).all()
    assert loads.leaf_cross[0, 1] == rows[:2, 2:].sum() and loads.leaf_cross[0, 0] == 0
    counts = np.array([(ids == e).sum() for e in range(12)])
    assert (loads.pairs == counts.reshape(4, 3).sum(axis=1)).all()
    assert (loads.padded == (-(-counts // 8) * 8).reshape(4, 3).sum(axis=1)).all()


def test_a_recorded_trace_is_replayed_in_order(tmp_path):
    trace = draw_experts(np.random.default_rng(0), np.ones(64), 1000, 8)
    np.save(tmp_path / "ids.npy", trace)
    plan = plan_of(routing=RoutingSpec(RoutingKind.RECORDED, trace=tmp_path / "ids.npy"))
    assert (plan.experts_of(1).reshape(-1, 8) == trace[(512 + np.arange(512)) % 1000]).all()


def test_a_bad_trace_is_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.full((4, 8), 99))
    with pytest.raises(ConfigurationError, match="-1 to 63"):
        load_trace(tmp_path / "ids.npy", Scenario().shape)
    np.save(tmp_path / "ids.npy", np.zeros((4, 3), int))
    with pytest.raises(ConfigurationError, match=r"\[num_tokens, 8\]"):
        load_trace(tmp_path / "ids.npy", Scenario().shape)


def test_replicas_share_the_tokens_of_an_expert():
    plan = plan_of(replicas=2, num_ranks=8)
    ids = plan.experts_of(0)
    assert ids.max() < 128 and abs((ids % 2).mean() - 0.5) < 0.05


@pytest.mark.parametrize("kind", list(RoutingKind)[:4])
@pytest.mark.parametrize("ranks", [4, 32])
def test_expected_loads_are_like_drawn_ones(kind, ranks):
    network = NetworkSpec(topology=TopologyKind.LEAF_SPINE, ranks_per_leaf=ranks // 2, uplink_gbps=100)
    plan = plan_of(routing=RoutingSpec(kind), num_ranks=ranks, tokens_per_rank=4096, microbatch_tokens=1024, network=network)
    drawn, expected = drawn_loads(plan), expected_loads(plan)
    for name in ("pairs", "padded", "received", "leaf_up", "leaf_down"):
        seen = np.mean([getattr(loads, name) for loads in expected], axis=0)
        wanted = np.mean([getattr(loads, name) for loads in drawn], axis=0)
        assert np.abs(seen.sum() / wanted.sum() - 1) < 0.02, name
        assert np.abs(seen.max() / wanted.max() - 1) < 0.08, name


def test_popularity_has_mean_one():
    for kind in list(RoutingKind)[:4]:
        assert popularity(RoutingSpec(kind), SHAPE, 4).mean() == pytest.approx(1)


@pytest.mark.parametrize(
    "index",
    [
        2,
        -1,
        slice(1, 3),
        (1, slice(4)),
        (slice(None), np.array([0, 2])),
        (1, np.array([[0, 1], [2, 3]])),
        (np.array([0, 1]), np.array([2, 3])),
        ...,
    ],
)
def test_counted_rows_have_the_shapes_of_numpy(index):
    real, counted = np.zeros((4, 6, 8), np.float32), CountedRows((4, 6, 8), np.dtype("f4"))
    assert counted[index].shape == real[index].shape and counted[index].nbytes == real[index].nbytes
    assert counted.reshape(-1, 8).shape == (24, 8) and counted.astype("f8").nbytes == 2 * real.nbytes


def test_a_trace_recorded_from_a_model_is_what_its_router_chooses(tmp_path):
    folder = tmp_path / "model"
    write_checkpoint(folder, LayerShape(16, 4, 64, 32), num_layers=2, num_attention_heads=1, seed=0)
    ids = record(folder, 1, "the quick brown fox jumps over the lazy dog " * 8, 40)
    assert ids.shape == (40, 4) and all(len(set(row)) == 4 for row in ids) and len(np.unique(ids)) > 4
    np.save(tmp_path / "ids.npy", ids)
    spec = RoutingSpec(RoutingKind.RECORDED, trace=tmp_path / "ids.npy")
    plan = plan_of(shape=LayerShape(16, 4, 64, 32), routing=spec, tokens_per_rank=10, microbatch_tokens=10)
    assert (plan.experts_of(0).reshape(-1, 4) == ids).all()
