"""Aggregated flows against packets, and the fast mode against the event mode, on grids of small cases."""

from __future__ import annotations

import time

import pytest

from inc_runtime.cli import simulated_programs
from inc_runtime.config import Implementation
from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.calibration import load_calibration
from inc_runtime.simulator.event_mode import simulate_layer
from inc_runtime.simulator.fast_mode import drawn_loads, simulate_fast, sweep
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import Forwarding, NetworkSpec, Scenario, SwitchKind, TopologyKind
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec

PROGRAMS = simulated_programs()
PLAIN, PLAIN_PHASED, BASELINE = Implementation.MEGAKERNEL, Implementation.MEGAKERNEL_PHASED, Implementation.BASELINE
INC, INC_PHASED = Implementation.MEGAKERNEL_INC, Implementation.MEGAKERNEL_INC_PHASED
KINDS = (RoutingKind.UNIFORM, RoutingKind.ZIPF)


def plan_of(implementation: Implementation, ranks: int, kind: RoutingKind, port: float, **more) -> LayerPlan:
    network = more.pop("network", NetworkSpec())
    scenario = Scenario(
        num_ranks=ranks,
        implementation=implementation,
        tokens_per_rank=more.pop("tokens", 1024),
        microbatch_tokens=more.pop("microbatch", 256),
        routing=RoutingSpec(kind),
        **more,
    ).with_network(**{**vars(network), "port_gbps": port})
    scenario.check()
    return LayerPlan(scenario, load_calibration())


def fast_error(plan: LayerPlan) -> float:
    event = simulate_layer(plan, PROGRAMS, aggregate=False).layer_time_us
    return simulate_fast(plan, drawn_loads(plan)).layer_time_us / event - 1


@pytest.mark.parametrize("port", [362.0, 50.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("implementation", "bound"), [(PLAIN, 0.005), (BASELINE, 0.005), (PLAIN_PHASED, 0.05)])
def test_aggregated_flows_take_the_time_of_the_packets(implementation, bound, kind, port):
    for ranks in (4, 8):
        plan = plan_of(implementation, ranks, kind, port, tokens=512)
        packets, flows = (simulate_layer(plan, PROGRAMS, aggregate=aggregate) for aggregate in (False, True))
        assert flows.mode == "event_aggregated" and flows.counters == packets.counters
        assert flows.layer_time_us == pytest.approx(packets.layer_time_us, rel=bound)


@pytest.mark.parametrize("forwarding", list(Forwarding))
@pytest.mark.parametrize("port", [362.0, 50.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fast_mode_is_within_1_percent_for_inc(ranks, kind, port, forwarding):
    for microbatch in (256, 1024):
        for bypass in (False, True):
            network = NetworkSpec(forwarding=forwarding, local_bypass=bypass)
            plan = plan_of(INC, ranks, kind, port, network=network, microbatch=microbatch)
            assert abs(fast_error(plan)) < 0.01, (microbatch, bypass)


@pytest.mark.parametrize("implementation", [PLAIN, BASELINE])
@pytest.mark.parametrize("port", [362.0, 100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_mode_is_within_1_percent_for_the_plain_forms(implementation, kind, port):
    for ranks in (2, 4):
        assert abs(fast_error(plan_of(implementation, ranks, kind, port))) < 0.01, ranks


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_mode_is_within_1_percent_for_phases_on_free_links(group, kind):
    for forwarding in Forwarding:
        plan = plan_of(INC_PHASED, 4, kind, 362.0, ranks_per_phase=group, network=NetworkSpec(forwarding=forwarding))
        assert abs(fast_error(plan)) < 0.01, forwarding


@pytest.mark.parametrize("kind", KINDS)
def test_fast_mode_is_within_10_percent_where_flows_share_a_full_link(kind):
    """Phases, uplinks, emulated ports, small microbatches: the order of transfers decides, which fast mode follows loosely."""
    two_level = NetworkSpec(topology=TopologyKind.LEAF_SPINE, ranks_per_leaf=2, uplink_gbps=50.0)
    emulated = NetworkSpec(SwitchKind.EMULATED, Forwarding.STORE_AND_FORWARD, planes=2, dual_role=True)
    for plan in (
        plan_of(INC, 4, kind, 50.0, microbatch=128),
        plan_of(INC_PHASED, 4, kind, 50.0),
        plan_of(PLAIN_PHASED, 4, kind, 50.0),
        plan_of(INC, 4, kind, 50.0, network=two_level),
        plan_of(PLAIN, 4, kind, 50.0, network=two_level),
        plan_of(INC, 4, kind, 100.0, network=emulated),
        plan_of(INC, 4, kind, 362.0, network=emulated),
    ):
        assert abs(fast_error(plan)) < 0.10, plan.scenario


def test_fast_mode_refuses_what_it_does_not_model():
    for plan in (
        plan_of(PLAIN, 4, RoutingKind.UNIFORM, 362.0, network=NetworkSpec(SwitchKind.EMULATED)),
        plan_of(INC_PHASED, 4, RoutingKind.UNIFORM, 362.0, network=NetworkSpec(SwitchKind.EMULATED)),
        plan_of(INC, 4, RoutingKind.UNIFORM, 362.0, network=NetworkSpec(planes=2)),
    ):
        with pytest.raises(ConfigurationError, match="--mode event"):
            simulate_fast(plan)


def test_loads_drawn_around_their_rates_give_the_times_of_drawn_routing():
    for kind in list(RoutingKind)[:4]:
        plan = plan_of(INC, 8, kind, 100.0, tokens=4096, microbatch=512)
        assert simulate_fast(plan).layer_time_us == pytest.approx(simulate_fast(plan, drawn_loads(plan)).layer_time_us, rel=0.03)


def test_a_sweep_takes_milliseconds_a_scenario():
    """10,000 scenarios in 60 s are 6 ms each on two cores; measured figures stand in DECISIONS.md."""
    implementations = (INC, PLAIN)
    plans = [
        plan_of(implementations[i % 2], (2, 4, 8, 16)[i % 4], RoutingKind.UNIFORM, 20.0 + i, tokens=4096, microbatch=512)
        for i in range(200)
    ]
    start = time.process_time()
    times = sweep(plans, processes=1)
    assert len(times) == len(plans) and min(times) > 0
    assert (time.process_time() - start) / len(plans) < 0.025
