"""The fast mode against the event mode, packet by packet: samples of small scenarios of every kind, and the bounds it states."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from inc_runtime.cli import simulated_programs
from inc_runtime.config import CommunicationModel, Implementation, LayerShape
from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.calibration import load_calibration
from inc_runtime.simulator.event_mode import LayerResult, simulate_layer
from inc_runtime.simulator.exchanges import error_of_flows, fast_as_flows, flows_fit
from inc_runtime.simulator.fast_mode import drawn_loads, simulate_fast, sweep
from inc_runtime.simulator.fast_plain import FlowSwitches
from inc_runtime.simulator.fast_relay import Relays
from inc_runtime.simulator.fast_transfers import TransferLayer
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import Forwarding, NetworkSpec, Scenario, SwitchKind, TopologyKind, Wire
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec

PROGRAMS = simulated_programs()
INC = (Implementation.MEGAKERNEL_INC, Implementation.MEGAKERNEL_INC_PHASED)
PLAIN = (Implementation.MEGAKERNEL, Implementation.MEGAKERNEL_PHASED, Implementation.BASELINE)
SHAPES = (Scenario().shape, LayerShape(48, 4, 1024, 512), LayerShape(24, 2, 4096, 1536))
CALIBRATIONS = (load_calibration(), load_calibration(Path("two_h200")))


def sample(draw: random.Random, implementations, ranks) -> LayerPlan:
    """A scenario that holds together, drawn from everything that a scenario file can say."""
    while True:
        port, num_ranks = draw.choice((362.0, 100.0, 50.0, 20.0)), draw.choice(ranks)
        two_level = draw.random() < 0.3
        network = NetworkSpec(
            switch=draw.choice(tuple(SwitchKind)),
            forwarding=draw.choice(tuple(Forwarding)),
            port_gbps=port,
            planes=1 if two_level else draw.choice((1, 1, 2, 3)),
            dual_role=draw.random() < 0.5,
            local_bypass=draw.random() < 0.4,
            dispatch_wire=draw.choice(tuple(Wire)),
            latency_us=draw.choice((None, 0.0, 5.0)),
        )
        if two_level:
            kind = draw.choice((TopologyKind.LEAF_SPINE, TopologyKind.RAILS))
            uplink = port * draw.choice((0.5, 1.0, 2.0))
            network = replace(network, switch=SwitchKind.REAL, topology=kind, ranks_per_leaf=2, uplink_gbps=uplink)
        scenario = Scenario(
            shape=draw.choice(SHAPES),
            num_ranks=num_ranks,
            implementation=draw.choice(implementations),
            tokens_per_rank=draw.choice((96, 300, 512)),
            microbatch_tokens=draw.choice((32, 64, 128, 512)),
            edge_tokens=draw.choice((0, 0, 16)),
            depth=draw.choice((1, 2, 5)),
            ranks_per_phase=draw.randint(1, num_ranks),
            barrier_after_dispatch=draw.random() < 0.7,
            network=network,
            routing=RoutingSpec(draw.choice(tuple(RoutingKind)[:4]), seed=draw.randrange(100)),
        )
        if scenario.implementation in INC and draw.random() < 0.1:
            scenario = replace(scenario, communication_model=CommunicationModel.INC_ALL_GATHER_REDUCE_SCATTER)
        try:
            scenario.check()
        except ConfigurationError:
            continue
        return LayerPlan(scenario, draw.choice(CALIBRATIONS))


def both(plan: LayerPlan) -> tuple[LayerResult, LayerResult]:
    return simulate_layer(plan, PROGRAMS, aggregate=False), simulate_fast(plan, drawn_loads(plan))


@pytest.mark.parametrize("seed", range(120))
def test_fast_mode_is_event_mode_for_every_inc_form(seed):
    event, fast = both(sample(random.Random(seed), INC, (1, 2, 3, 4, 6, 8)))
    assert fast.layer_time_us == pytest.approx(event.layer_time_us, rel=fast.tested_error), event.plan.scenario
    assert fast.tested_error == 0.01 and fast.busy == pytest.approx(event.busy, abs=0.01)


@pytest.mark.parametrize("seed", range(60))
def test_fast_mode_is_within_1_percent_for_every_plain_form(seed):
    event, fast = both(sample(random.Random(1000 + seed), PLAIN, (1, 2, 3, 4, 6)))
    assert fast.layer_time_us == pytest.approx(event.layer_time_us, rel=fast.tested_error), event.plan.scenario
    scenario = event.plan.scenario
    assert fast.tested_error == (0.02 if scenario.model.phased and scenario.network.planes > 1 else 0.01)
    assert fast.busy == pytest.approx(event.busy, abs=0.02)


class Chunks(Relays):
    """Chunk by chunk: what the event mode executes, without its programs."""

    def __init__(self, layer: TransferLayer) -> None:
        super().__init__(layer)
        self.most_parts = self.plan.scenario.layout.dims.dispatch_chunks


def plain_plan(seed: int) -> LayerPlan:
    """A plain form among 18 to 24 ranks that could also go as flows."""
    draw = random.Random(seed)
    while True:
        plan = sample(draw, PLAIN, (18, 20, 24))
        if flows_fit(plan):
            return plan


@pytest.mark.parametrize("seed", range(36))
def test_fast_mode_of_more_ranks_stays_within_1_percent_and_flows_within_what_they_state(seed):
    plan = plain_plan(2000 + seed)
    loads = drawn_loads(plan)
    chunks, flows = (TransferLayer(plan, loads, kind).run() for kind in (Chunks, FlowSwitches))
    fast = simulate_fast(plan, loads)
    assert fast.tested_error == 0.01 and fast.layer_time_us == pytest.approx(chunks, rel=0.01), plan.scenario
    assert flows == pytest.approx(chunks, rel=error_of_flows(plan)), plan.scenario


def test_chunks_are_what_event_mode_executes_with_as_many_ranks():
    plan = sample(random.Random(5), PLAIN[:1], (18,))
    event = simulate_layer(plan, PROGRAMS, aggregate=False)
    assert TransferLayer(plan, drawn_loads(plan), Chunks).run() == pytest.approx(event.layer_time_us, rel=0.001)


@pytest.mark.parametrize("seed", range(10))
def test_aggregated_event_mode_is_the_same_flows(seed):
    plan = plain_plan(3000 + seed)
    event = simulate_layer(plan, PROGRAMS, aggregate=True)
    assert event.mode == "event_aggregated" and event.tested_error == error_of_flows(plan)
    flows = TransferLayer(plan, drawn_loads(plan), FlowSwitches).run()
    assert flows == pytest.approx(event.layer_time_us, rel=1e-6)


def test_fast_mode_goes_as_flows_where_there_are_too_many_messages_and_says_so():
    shape = LayerShape(256, 8, 7168, 2048)
    for ranks, implementation, error in ((128, 0, 0.01), (256, 0, 0.02), (16, 1, 0.01), (64, 1, 0.30)):
        plan = LayerPlan(Scenario(shape=shape, num_ranks=ranks, implementation=PLAIN[implementation]), CALIBRATIONS[0])
        assert fast_as_flows(plan) is (error > 0.01) and simulate_fast(plan).tested_error == error


def scenarios(count: int) -> list[LayerPlan]:
    """The sweep of the issue: INC and plain, W from 2 to 16, links from 20 GB/s on."""
    plans = []
    for i in range(count):
        base = Scenario(num_ranks=(2, 4, 8, 16)[i // 2 % 4], implementation=(INC[0], PLAIN[0])[i % 2])
        plans.append(LayerPlan(base.with_network(port_gbps=20.0 + i), load_calibration()))
    return plans


def test_loads_drawn_around_their_rates_give_the_times_of_drawn_routing():
    for kind in tuple(RoutingKind)[:4]:
        for plan in scenarios(8):
            plan = LayerPlan(replace(plan.scenario, routing=RoutingSpec(kind)), plan.machine)
            drawn = simulate_fast(plan, drawn_loads(plan)).layer_time_us
            assert simulate_fast(plan).layer_time_us == pytest.approx(drawn, rel=0.03)


def test_a_sweep_takes_milliseconds_a_scenario():
    """10,000 scenarios in 60 s are 12 ms of processor time each on two cores; the measured time stands in DECISIONS.md."""
    plans = scenarios(160)
    start = time.process_time()
    times = sweep(plans, processes=1)
    assert len(times) == len(plans) and min(times) > 0
    assert (time.process_time() - start) / len(plans) < 0.025
