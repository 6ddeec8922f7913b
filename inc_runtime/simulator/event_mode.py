"""Run one scenario in event mode: compose the programs of ranks and switches on the discrete-event backend.

`inc_runtime` imports neither megakernel nor switch_emulator, so the composing entry point brings both programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from inc_runtime.collectives import RankPrograms, rank_programs
from inc_runtime.collectives.all_to_all import wait_for_partial_sums
from inc_runtime.collectives.microbatch import Call, RoutedTokens
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import BF16
from inc_runtime.one_sided import OneSided
from inc_runtime.op_trace import Counters, Event, count
from inc_runtime.simulator.aggregate import aggregated_programs
from inc_runtime.simulator.closed_forms import layer_counters
from inc_runtime.simulator.counted_rows import CountedRows
from inc_runtime.simulator.event_backend import MATRIX, VECTOR, EventSimulation, TimedPe
from inc_runtime.simulator.exchanges import flows_fit, tested_error
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads

AGGREGATE_FROM_RANKS = 33
"""Plain collectives run packet by packet below this many ranks and as aggregated flows from it on: they have W * W messages."""


@dataclass(frozen=True)
class RolePrograms:
    """What the entry point composes. `rank_threads` makes the programs of one rank, `switch` is the program of a switch."""

    rank_threads: Callable[..., list[Callable[[TimedPe], None]]]
    switch: Callable[[TimedPe], None]


@dataclass(frozen=True)
class LayerResult:
    """One simulated layer. `layer_time_us`: from the first stage to the last output of the slowest rank.

    `busy`: share of the layer time that each kind of unit or port works, the busiest of its kind. `mode`: event,
    event_aggregated or fast. `counters` None: not counted (fast mode). Source: simulated.
    """

    plan: LayerPlan
    mode: str
    layer_time_us: float
    busy: dict[str, float]
    counters: Counters | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def tested_error(self) -> float:
        """How far from event mode, packet by packet, the tests have seen a result of this kind, relative; 0 for itself."""
        return tested_error(self.plan, self.mode)

    @property
    def busiest(self) -> str:
        return max(self.busy, key=lambda unit: self.busy[unit])


def simulate_layer(
    plan: LayerPlan,
    programs: RolePrograms,
    *,
    traced: bool = False,
    aggregate: bool | None = None,
    progress: Callable[[], None] = lambda: None,
) -> LayerResult:
    """Execute the role programs of one layer. Raises Deadlock, ProtocolViolation and what the programs raise.

    `aggregate`: flows instead of packets for the plain collectives; None decides by W. `progress` is called once per
    microbatch.
    """
    scenario = plan.scenario
    plain = not scenario.model.in_network
    if aggregate is None:
        aggregate = plain and scenario.num_ranks >= AGGREGATE_FROM_RANKS
    if aggregate and not (plain and flows_fit(plan)):
        raise ConfigurationError(
            f"num_ranks = {scenario.num_ranks}: from {AGGREGATE_FROM_RANKS} ranks on, packets of {scenario.model.value} are "
            "aggregated, which needs a plain model, real switches, one plane, and one level where there are phases. "
            "Use fewer ranks, or such a network."
        )
    routing = _Routing(plan)
    simulation = EventSimulation(plan, routing.loads, traced=traced)
    collectives = aggregated_programs(simulation) if aggregate else _timed_programs(plan)
    for pe in range(scenario.world.num_pes):
        if pe < scenario.num_ranks:
            for thread in programs.rank_threads(simulation.pes[pe], plan, collectives, routing.routed, routing.loads, progress):
                simulation.spawn(pe, thread)  # type: ignore[arg-type]
        elif not aggregate:
            simulation.spawn(pe, programs.switch)  # type: ignore[arg-type]
    simulation.run()
    end = simulation.layer_end
    # Credits are left out, as in the closed forms: their number depends on timing.
    counted = [event for pe in simulation.pes for event in pe.trace.events if event.name != "relay_credits"]
    # Of aggregated packets, the closed forms on the rows that they moved.
    counters = layer_counters(plan, routing.loads) if aggregate else count(counted, scenario.world)
    mode = "event_aggregated" if aggregate else "event"
    busy = busy_shares(simulation.unit_busy, simulation.network.busy, end)
    return LayerResult(plan, mode, end, busy, counters, simulation.events() if traced else [])


def _timed_programs(plan: LayerPlan) -> RankPrograms:
    """The rank programs; the global reduce of the plain forms takes its time and adds nothing, as there are no rows."""
    programs = rank_programs(plan.scenario.model)
    if plan.scenario.model.in_network:
        return programs

    def wait_for_token_sums(pe: OneSided, call: Call, magic: int, num_tokens: int) -> np.ndarray:
        wait_for_partial_sums(pe, call, magic)
        with pe.stage("global_reduce", magic, rows=num_tokens):
            return np.empty(0)

    return replace(programs, wait_for_token_sums=wait_for_token_sums)


class _Routing:
    """The routing of all microbatches, drawn once each and kept: magic is the number of the microbatch + 1."""

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self.experts: dict[int, np.ndarray] = {}
        self.drawn: dict[int, MicrobatchLoads] = {}

    def loads(self, magic: int) -> MicrobatchLoads:
        if magic not in self.drawn:
            self.drawn[magic] = self.plan.loads(magic - 1, self._experts(magic))
        return self.drawn[magic]

    def _experts(self, magic: int) -> np.ndarray:
        if magic not in self.experts:
            self.experts[magic] = self.plan.experts_of(magic - 1)
        return self.experts[magic]

    def routed(self, rank: int, number: int) -> RoutedTokens:
        ids = self._experts(number + 1)[rank]
        tokens: Any = CountedRows((len(ids), self.plan.shape.hidden_size), BF16)
        return RoutedTokens(tokens, ids, np.ones(ids.shape, np.float32))


def busy_shares(
    units: Mapping[tuple[str, int], float], ports: Mapping[tuple[str, int], float], end_us: float
) -> dict[str, float]:
    """Busy share of the busiest unit and port of each kind, from busy times by (kind, number) in us."""
    names = {"up": "rank port out", "down": "rank port in", "switch_in": "switch port in", "switch_out": "switch port out"}
    names |= {"leaf_up": "uplink to spine", "leaf_down": "uplink to leaf"}
    totals: dict[str, float] = {MATRIX: 0.0, VECTOR: 0.0}
    for (unit, _), busy in units.items():
        totals[unit] = max(totals[unit], busy)
    for (port, _), busy in ports.items():
        totals[names[port]] = max(totals.get(names[port], 0.0), busy)
    return {name: busy / end_us for name, busy in totals.items()}

