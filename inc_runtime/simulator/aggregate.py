"""The plain collectives of the event mode over aggregated flows: rank programs with the four functions of `RankPrograms`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import greenlet
import numpy as np

from inc_runtime.collectives import RankPrograms
from inc_runtime.collectives.microbatch import Call, ReceivedRows, RoutedTokens
from inc_runtime.simulator.event_backend import EventSimulation, TimedPe
from inc_runtime.simulator.exchanges import Exchanges

if TYPE_CHECKING:
    from inc_runtime.simulator.network import Action


class _Arrivals:
    """What has reached which rank, and the threads that wait for it."""

    def __init__(self, simulation: EventSimulation) -> None:
        self.simulation = simulation
        self.landed: set[tuple[str, int, int]] = set()
        self.waiting: dict[tuple[str, int, int], Action] = {}

    def arrived(self, *key: object) -> None:
        if key in self.waiting:
            self.waiting.pop(key)()  # type: ignore[arg-type]
        else:
            self.landed.add(key)  # type: ignore[arg-type]

    def wait(self, kind: str, magic: int, rank: int) -> None:
        key = (kind, magic, rank)
        if key not in self.landed:
            self.waiting[key] = greenlet.getcurrent().switch
            self.simulation._hub.switch()
        self.landed.discard(key)

    def block(self, ask: Callable[[Action], None]) -> None:
        """Run `ask` with what resumes this thread, and wait for that."""
        ask(greenlet.getcurrent().switch)
        self.simulation._hub.switch()


def aggregated_programs(simulation: EventSimulation) -> RankPrograms:
    """Rank programs of the plain collectives over `Exchanges`."""
    plan, arrivals = simulation.plan, _Arrivals(simulation)
    flows = Exchanges(plan, simulation.network, arrivals.arrived)
    phased = plan.scenario.model.phased

    def push_microbatch(pe: TimedPe, call: Call, magic: int, routed: RoutedTokens) -> None:
        with pe.stage("pack", magic, rows=int(simulation.loads(magic).sent_copies[pe.pe])):
            pass
        if phased:
            arrivals.block(flows.ask)
        left = flows.send_all(pe.pe, "tokens", magic)
        if phased:
            flows.give_back_at(left + plan.leg_us)

    def wait_for_expert_rows(pe: TimedPe, call: Call, magic: int) -> ReceivedRows:
        arrivals.wait("tokens", magic, pe.pe)
        if phased and plan.scenario.pipeline.barrier_after_dispatch:
            arrivals.block(lambda resume: flows.join_barrier(magic, resume))
        return ReceivedRows(np.empty(0), np.empty(0), np.empty(0))

    def publish_partial_sums(pe: TimedPe, call: Call, magic: int) -> None:
        if phased:
            arrivals.block(lambda resume: flows.publish_in_phases(pe.pe, magic, resume))
        else:
            flows.send_all(pe.pe, "sums", magic)

    def wait_for_token_sums(pe: TimedPe, call: Call, magic: int, num_tokens: int) -> np.ndarray:
        arrivals.wait("sums", magic, pe.pe)
        with pe.stage("global_reduce", magic, rows=num_tokens):
            return np.empty(0)

    return RankPrograms(push_microbatch, wait_for_expert_rows, publish_partial_sums, wait_for_token_sums)  # type: ignore[arg-type]
