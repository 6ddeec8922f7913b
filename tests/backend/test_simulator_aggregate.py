"""Aggregated flows of the event mode against its packets, on a grid of small cases."""

from __future__ import annotations

import pytest

from inc_runtime.cli import simulated_programs
from inc_runtime.config import Implementation
from inc_runtime.simulator.calibration import load_calibration
from inc_runtime.simulator.event_mode import simulate_layer
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import Scenario, TopologyKind
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec

PROGRAMS = simulated_programs()
PLAIN, PLAIN_PHASED, BASELINE = Implementation.MEGAKERNEL, Implementation.MEGAKERNEL_PHASED, Implementation.BASELINE


def errors(plan: LayerPlan) -> float:
    """Relative error of the flows. Their counters are those of the packets."""
    packets, flows = (simulate_layer(plan, PROGRAMS, aggregate=aggregate) for aggregate in (False, True))
    assert flows.mode == "event_aggregated" and flows.counters == packets.counters
    return flows.layer_time_us / packets.layer_time_us - 1


def plan_of(implementation: Implementation, ranks: int, kind: RoutingKind, port: float, **more) -> LayerPlan:
    network = more.pop("network", {})
    base = Scenario(num_ranks=ranks, implementation=implementation, routing=RoutingSpec(kind), **more)
    scenario = base.with_network(port_gbps=port, **network)
    scenario.check()
    return LayerPlan(scenario, load_calibration())


@pytest.mark.parametrize("kind", [RoutingKind.UNIFORM, RoutingKind.ZIPF])
@pytest.mark.parametrize("port", [362.0, 50.0])
@pytest.mark.parametrize(("implementation", "bound"), [(PLAIN, 0.005), (BASELINE, 0.005), (PLAIN_PHASED, 0.05)])
def test_aggregated_flows_take_the_time_of_the_packets(implementation, bound, kind, port):
    for ranks in (4, 8):
        plan = plan_of(implementation, ranks, kind, port, tokens_per_rank=512, microbatch_tokens=256)
        assert abs(errors(plan)) < bound


@pytest.mark.parametrize("kind", [RoutingKind.ZIPF, RoutingKind.HOT_RANK])
def test_exchanges_that_overlap_share_the_ports_in_as_their_packets_do(kind):
    """Eight microbatches, five in flight: served exchange by exchange, the flows were 14 % too fast here."""
    assert abs(errors(plan_of(PLAIN, 16, kind, 50.0, tokens_per_rank=1024, microbatch_tokens=128))) < 0.01


def test_uplinks_serve_the_messages_of_a_leaf_in_turn():
    leaves = {"topology": TopologyKind.LEAF_SPINE, "ranks_per_leaf": 4, "uplink_gbps": 50.0}
    plan = plan_of(BASELINE, 8, RoutingKind.UNIFORM, 100.0, tokens_per_rank=512, network=leaves)
    assert abs(errors(plan)) < 0.01
