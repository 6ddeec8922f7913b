"""The discrete-event mode: counters against closed forms, timing that a hand can check, and deadlocks that name the culprit."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from inc_runtime.cli import simulated_programs
from inc_runtime.config import CommunicationModel, Implementation, LayerShape
from inc_runtime.errors import ConfigurationError, Deadlock
from inc_runtime.routing import rank_of_experts
from inc_runtime.simulator.calibration import load_calibration
from inc_runtime.simulator.closed_forms import layer_counters
from inc_runtime.simulator.event_mode import LayerResult, RolePrograms, simulate_layer
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import Forwarding, NetworkSpec, Scenario, SwitchKind, TopologyKind, Wire
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec

PROGRAMS = simulated_programs()
SHAPE = LayerShape(48, 4, 512, 256)
INC, PHASED, PLAIN = Implementation.MEGAKERNEL_INC, Implementation.MEGAKERNEL_INC_PHASED, Implementation.MEGAKERNEL


def plan_of(**changes) -> LayerPlan:
    scenario = Scenario(**({"shape": SHAPE, "tokens_per_rank": 40, "microbatch_tokens": 16} | changes))
    scenario.check()
    return LayerPlan(scenario, load_calibration())


def run(plan: LayerPlan, **more) -> LayerResult:
    return simulate_layer(plan, PROGRAMS, **more)


def implementation_of(model: CommunicationModel) -> Implementation:
    if model.in_network:
        return PHASED if model.phased else INC
    return Implementation.MEGAKERNEL_PHASED if model.phased else PLAIN


def counted_by_hand(plan: LayerPlan) -> dict[str, int]:
    """Rows and packets of the layer, token by token, from the definitions of the post."""
    scenario, model = plan.scenario, plan.scenario.model
    num, group = scenario.num_ranks, scenario.ranks_per_phase
    owner = rank_of_experts(plan.shape.num_experts, num)
    sent, received = [0] * num, [0] * num
    dispatch = combine = 0
    for number in range(plan.num_microbatches):
        ids = plan.experts_of(number)
        needs = [[set(owner[token]) if model.selective else set(range(num)) for token in ids[rank]] for rank in range(num)]
        arriving = [sum(r in ranks for tokens in needs for ranks in tokens) for r in range(num)]
        for rank in range(num):
            own = len(needs[rank])
            if model.in_network:
                sent[rank] += own + arriving[rank]
                received[rank] += arriving[rank] + own
            else:
                copies = sum(len(ranks) for ranks in needs[rank])
                sent[rank] += copies + arriving[rank]
                received[rank] += arriving[rank] + copies
        if not model.in_network:
            dispatch, combine = dispatch + 2 * num * num, combine + 2 * num * num
        elif not model.phased:
            dispatch, combine = dispatch + 2 * num, combine + sum(a > 0 for a in arriving) + num
        else:
            dispatch += num + num * num
            per_owner = [len(set().union(*tokens)) for tokens in needs]
            combine += num + (sum(per_owner) if group == 1 else -(-num // group) * num)
    totals = {"rows_sent": max(sent), "rows_received": max(received)}
    return totals | {"dispatch_packets": dispatch, "combine_packets": combine}


@pytest.mark.parametrize("model", list(CommunicationModel))
@pytest.mark.parametrize(("ranks", "group"), [(1, 1), (3, 1), (4, 4), (7, 1)])
@pytest.mark.parametrize("switch", list(SwitchKind))
def test_counters_equal_the_closed_forms(model, ranks, group, switch):
    plan = plan_of(
        num_ranks=ranks,
        implementation=implementation_of(model),
        communication_model=model,
        ranks_per_phase=group,
        network=NetworkSpec(switch),
    )
    counters = run(plan).counters
    assert counters is not None
    for name, value in counted_by_hand(plan).items():
        assert getattr(counters, name) == value, name
    assert counters == layer_counters(plan, lambda magic: plan.loads(magic - 1))


@pytest.mark.parametrize("ranks", [2, 5, 16, 33])
@pytest.mark.parametrize("model", list(CommunicationModel))
def test_counters_equal_the_closed_forms_at_any_world(ranks, model):
    """Packet by packet, every field, with edges that grow and shrink."""
    work = {"tokens_per_rank": 24, "microbatch_tokens": 8, "edge_tokens": 2, "num_ranks": ranks}
    plan = plan_of(implementation=implementation_of(model), communication_model=model, **work)
    counters = run(plan, aggregate=False).counters
    for name, value in counted_by_hand(plan).items():
        assert getattr(counters, name) == value, name
    assert counters == layer_counters(plan, lambda magic: plan.loads(magic - 1))


def test_a_lone_token_takes_the_time_of_its_steps():
    """One rank, one token: every stage and leg on the path, one after the other."""
    plan = plan_of(
        num_ranks=1, tokens_per_rank=1, microbatch_tokens=1, network=NetworkSpec(forwarding=Forwarding.STORE_AND_FORWARD)
    )
    costs, loads = plan.costs, plan.loads(0)
    stages = costs.route(1) + costs.group(4, 1) + sum(float(cost[0]) for cost in costs.products(loads).values())
    stages += costs.reduce(4, 1) + costs.copy_out(1)
    row = 1024 + plan.record_bytes + 64 + 8
    packet = min(plan.packet_us, row / plan.port)
    # Push and multicast; signal, request and pull; sums. The last leg of each starts when the rows are whole.
    wire = 2 * row / plan.port + 1024 / plan.port + (1024 + 8) / plan.port
    assert run(plan).layer_time_us == pytest.approx(stages + wire + 6 * plan.leg_us, abs=2 * packet)


def test_an_emulated_switch_is_slower_than_a_real_one_and_planes_help_it():
    real = run(plan_of(num_ranks=4)).layer_time_us
    emulated = NetworkSpec(SwitchKind.EMULATED, Forwarding.STORE_AND_FORWARD, port_gbps=5.0)
    one = run(plan_of(num_ranks=4, network=emulated)).layer_time_us
    dual = run(plan_of(num_ranks=4, network=replace(emulated, planes=2, dual_role=True))).layer_time_us
    dedicated = run(plan_of(num_ranks=4, network=replace(emulated, planes=2))).layer_time_us
    # Dual roles share a port, but the plan of a plane then stays on its device.
    assert real < min(dedicated, dual) and max(dedicated, dual) < one


@pytest.mark.parametrize("implementation", [INC, PHASED, PLAIN])
def test_bypass_and_fp8_take_bytes_off_the_wire(implementation):
    base = run(plan_of(num_ranks=4, implementation=implementation)).counters
    home = run(plan_of(num_ranks=4, implementation=implementation, network=NetworkSpec(local_bypass=True))).counters
    fp8 = run(plan_of(num_ranks=4, implementation=implementation, network=NetworkSpec(dispatch_wire=Wire.FP8))).counters
    assert home.rows_received < base.rows_received and home.dispatch_packets == base.dispatch_packets
    assert fp8.rows_sent == base.rows_sent and fp8.row_bytes_sent < base.row_bytes_sent


def test_matrix_and_vector_units_overlap_in_the_fused_form_alone():
    fused = run(plan_of(tokens_per_rank=512, microbatch_tokens=64, implementation=PLAIN), traced=True)
    stages = [e for e in fused.events if e.kind == "stage" and e.pe == 0]
    matrix = [e for e in stages if e.name.startswith("matmul")]
    vector = [e for e in stages if not e.name.startswith("matmul")]
    assert any(a.start_us < b.end_us and b.start_us < a.end_us for a in matrix for b in vector)
    assert fused.busy["matrix units"] <= 1 and fused.busy["vector units"] <= 1
    unfused = run(plan_of(tokens_per_rank=512, implementation=Implementation.BASELINE), traced=True)
    times = sorted((e.start_us, e.end_us) for e in unfused.events if e.kind == "stage" and e.pe == 0)
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(times))


def test_two_levels_cost_more_than_one_and_inc_less_than_plain():
    times = {}
    for name, implementation in (("inc", INC), ("plain", PLAIN)):
        for kind in TopologyKind:
            leaf = {} if kind is TopologyKind.ONE_SWITCH else {"ranks_per_leaf": 2, "uplink_gbps": 4.0}
            network = NetworkSpec(topology=kind, port_gbps=20.0, **leaf)
            times[name, kind] = run(plan_of(num_ranks=8, implementation=implementation, network=network)).layer_time_us
    for name in ("inc", "plain"):
        assert times[name, TopologyKind.ONE_SWITCH] < times[name, TopologyKind.RAILS] < times[name, TopologyKind.LEAF_SPINE]
    for kind in (TopologyKind.RAILS, TopologyKind.LEAF_SPINE):
        assert times["inc", kind] < times["plain", kind]


def test_a_lost_word_is_reported_with_roles_flags_and_magic():
    def silent(pe, plan, *parts):
        threads = PROGRAMS.rank_threads(pe, plan, *parts)
        return threads[:3] if pe.pe == 2 else threads

    with pytest.raises(Deadlock) as caught:
        simulate_layer(plan_of(num_ranks=3), RolePrograms(silent, PROGRAMS.switch))
    report = str(caught.value)
    assert "combine switch 0 at COMBINE_PARTIAL_SUMS: partial_sums_ready[1, 2] from rank 2, expected magic 1, seen 0" in report
    assert "rank 0 at TOKEN_SUMS" in report and "from combine switch 0" in report


def test_hot_rank_is_the_slowest():
    work = {"num_ranks": 4, "tokens_per_rank": 1024, "microbatch_tokens": 256, "shape": Scenario().shape}
    hot = run(plan_of(**work, routing=RoutingSpec(RoutingKind.HOT_RANK)), traced=True)
    assert hot.layer_time_us > 1.3 * run(plan_of(**work)).layer_time_us
    assert max(hot.events, key=lambda e: (e.name == "matmul_down", e.end_us)).pe == 0


def test_a_large_world_runs_without_the_memory_of_its_rows():
    """W = 256: rows of 8 GiB. W = 1,024 takes 32 s and 1.1 GiB in the same way (DECISIONS.md)."""
    shape = LayerShape(256, 8, 4096, 1536)
    plan = plan_of(shape=shape, num_ranks=256, tokens_per_rank=256, microbatch_tokens=128)
    start = time.process_time()
    result = run(plan)
    assert result.mode == "event" and np.isfinite(result.layer_time_us)
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20


def test_phases_of_a_large_world_take_seconds():
    """W = 128, G = 8. W = 1,024, G = 64 takes 47 s of one processor a microbatch (DECISIONS.md)."""
    plan = plan_of(shape=LayerShape(256, 8, 4096, 1536), num_ranks=128, implementation=PHASED, ranks_per_phase=8)
    start = time.process_time()
    counters = run(plan).counters
    assert time.process_time() - start < 20
    # The pulls of a phase depend on which owners it has, hence on time.
    expected = layer_counters(plan, lambda magic: plan.loads(magic - 1))
    assert replace(counters, combine_packets=0) == replace(expected, combine_packets=0)


@pytest.mark.parametrize("bypass", [False, True])
def test_phases_over_leaves_carry_every_token_over_an_uplink_once(bypass):
    """The uplinks work as long as without phases, for the same rows, but for the routing that phases send along."""
    leaves = {"topology": TopologyKind.LEAF_SPINE, "ranks_per_leaf": 4, "uplink_gbps": 20.0, "local_bypass": bypass}
    work = {"num_ranks": 8, "tokens_per_rank": 256, "microbatch_tokens": 64, "network": NetworkSpec(port_gbps=20.0, **leaves)}
    free, phased = run(plan_of(**work)), run(plan_of(**work, implementation=PHASED, ranks_per_phase=2))
    for uplink in ("uplink to spine", "uplink to leaf"):
        busy = [result.busy[uplink] * result.layer_time_us for result in (free, phased)]
        assert busy[1] == pytest.approx(busy[0], rel=0.05)
    assert phased.layer_time_us > free.layer_time_us


def test_flows_are_aggregated_for_real_switches_alone():
    plan = plan_of(num_ranks=40, implementation=PLAIN, tokens_per_rank=16, network=NetworkSpec(SwitchKind.EMULATED))
    with pytest.raises(ConfigurationError, match="fewer ranks"):
        run(plan)
    leaves = NetworkSpec(topology=TopologyKind.RAILS, ranks_per_leaf=8, uplink_gbps=9.0)
    phased = Implementation.MEGAKERNEL_PHASED
    with pytest.raises(ConfigurationError, match="one level where there are phases"):
        run(plan_of(num_ranks=40, implementation=phased, tokens_per_rank=16, network=leaves))
