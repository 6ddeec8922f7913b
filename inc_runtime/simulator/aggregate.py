"""The plain collectives as aggregated flows: what replaces W * W messages where packet by packet is out of reach.

The programs have the four functions of `RankPrograms`. A rank's messages leave its port one after another as the relay
programs send them; when all ranks have begun, the arrivals at every port follow at once from `flows.py`. Phased: the grants of
the dispatch are events, one per rank; the phases of the combine are solved when all ranks have published.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

import greenlet
import numpy as np

from inc_runtime.collectives import RankPrograms
from inc_runtime.collectives.microbatch import Call, ReceivedRows, RoutedTokens
from inc_runtime.op_trace import Counters
from inc_runtime.protocol import MAX_CHUNK_BYTES
from inc_runtime.simulator.closed_forms import layer_counters
from inc_runtime.simulator.event_backend import EventSimulation, TimedPe
from inc_runtime.simulator.flows import fifo_finish, message_starts, uplink_finish
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads

Loads = Callable[[int], MicrobatchLoads]


class Exchange:
    """One collective of one microbatch: `start` [W] when each rank's first byte leaves, `finish` [W] once known."""

    def __init__(self, num_ranks: int, work: np.ndarray) -> None:
        self.work, self.start = work, np.full(num_ranks, np.nan)
        self.joined = 0
        self.finish: np.ndarray | None = None
        self.waiting: dict[int, greenlet.greenlet] = {}


class Flows:
    """Ports of all ranks as arrays, and the exchanges in flight."""

    def __init__(self, simulation: EventSimulation) -> None:
        plan = self.plan = simulation.plan
        self.simulation, self.num_ranks = simulation, plan.scenario.num_ranks
        self.up, self.down = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
        self.leaf_up, self.leaf_down = np.zeros(plan.scenario.num_leaves), np.zeros(plan.scenario.num_leaves)
        self.exchanges: dict[tuple[str, int], Exchange] = {}
        self.places = [0.0] * plan.scenario.pipeline.ranks_per_phase
        self.grants = _Grants(simulation, plan)
        self.barriers: dict[int, list[greenlet.greenlet]] = defaultdict(list)

    def exchange(self, kind: str, magic: int) -> Exchange:
        key = (kind, magic)
        if key not in self.exchanges:
            self.exchanges[key] = Exchange(self.num_ranks, message_work(self.plan, self.simulation.loads(magic), kind))
        return self.exchanges[key]

    def send_all(self, rank: int, kind: str, magic: int) -> None:
        """Send this rank's W messages, behind what it sends already; returns at once."""
        sim, exchange = self.simulation, self.exchange(kind, magic)
        total = float(exchange.work[rank].sum())
        start = max(sim.now, self.up[rank])
        self.up[rank] = start + total
        sim.network.busy["up", rank] += total
        exchange.start[rank] = start
        exchange.joined += 1
        if exchange.joined == self.num_ranks:
            self._resolve(exchange)

    def _resolve(self, exchange: Exchange) -> None:
        plan = self.plan
        begins = message_starts(exchange.start, exchange.work)
        tails = exchange.start + exchange.work.sum(axis=1)
        self.down = finish = fifo_finish(begins + plan.leg_us + plan.packet_us, exchange.work, self.down)
        if plan.scenario.num_leaves > 1:
            finish = self._cross_leaves(exchange, tails, finish)
        self.deliver(exchange, finish + plan.leg_us)

    def _cross_leaves(self, exchange: Exchange, tails: np.ndarray, finish: np.ndarray) -> np.ndarray:
        plan, size = self.plan, self.plan.scenario.ranks_per_leaf
        edges = np.arange(0, self.num_ranks, size)
        cross = np.add.reduceat(np.add.reduceat(exchange.work, edges, axis=0), edges, axis=1) * plan.port / plan.uplink
        np.fill_diagonal(cross, 0)
        crossed, self.leaf_up, self.leaf_down = uplink_finish(exchange.start, tails, cross, self.leaf_up, self.leaf_down, size)
        for leaf in range(len(edges)):
            self.simulation.network.busy["leaf_up", leaf] += cross[leaf].sum()
            self.simulation.network.busy["leaf_down", leaf] += cross[:, leaf].sum()
        return np.maximum(finish, crossed + plan.leg_us) + 2 * plan.uplink_us

    def deliver(self, exchange: Exchange, finish: np.ndarray) -> None:
        for rank, busy in enumerate(exchange.work.sum(axis=0)):
            self.simulation.network.busy["down", rank] += float(busy)
        exchange.finish = finish
        for rank, thread in exchange.waiting.items():
            self.simulation.at(max(self.simulation.now, float(finish[rank])), thread.switch)

    def wait(self, rank: int, kind: str, magic: int) -> None:
        """Return once every message of the exchange has reached this rank."""
        sim, exchange = self.simulation, self.exchange(kind, magic)
        if exchange.finish is None:
            exchange.waiting[rank] = greenlet.getcurrent()
            sim._hub.switch()
        elif exchange.finish[rank] > sim.now:
            sim.sleep(float(exchange.finish[rank]) - sim.now)

    def publish_in_phases(self, rank: int, magic: int) -> None:
        """Return partial sums owner by owner; returns when the phases of all owners are known."""
        sim, exchange = self.simulation, self.exchange("combine", magic)
        exchange.start[rank] = sim.now
        exchange.joined += 1
        if exchange.joined < self.num_ranks:
            exchange.waiting[rank + self.num_ranks] = greenlet.getcurrent()
            sim._hub.switch()
        else:
            order = np.argsort(exchange.start, kind="stable")
            self.up, self.down, self.places, finish = combine_phases(
                self.plan, order, exchange.start, exchange.work, self.up, self.down, self.places
            )
            for sender in range(self.num_ranks):
                sim.network.busy["up", sender] += float(exchange.work[sender].sum())
            publishers = [exchange.waiting.pop(key) for key in list(exchange.waiting) if key >= self.num_ranks]
            self.deliver(exchange, finish)
            for thread in publishers:
                sim.wake(thread)

    def join_barrier(self, magic: int) -> None:
        """The INC barrier: all ranks leave two legs after the last has joined."""
        sim = self.simulation
        self.barriers[magic].append(greenlet.getcurrent())
        if len(self.barriers[magic]) == self.num_ranks:
            for thread in self.barriers.pop(magic):
                sim.at(sim.now + 2 * self.plan.leg_us, thread.switch)
        sim._hub.switch()


def combine_phases(
    plan: LayerPlan,
    order: np.ndarray,
    ready: np.ndarray,
    work: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    places: list[float],
) -> tuple[np.ndarray, np.ndarray, list[float], np.ndarray]:
    """The phases of a plain combine: at most G owners at once, in `order` of request. `work` [sender, owner].

    Returns the new free times of ports out, of ports in and of the places, and the finish of every owner.
    """
    # Between the phases the ports are idle and serve other transfers: to those they appear busy for the work alone.
    after = np.maximum(up, ready.min()) + work.sum(axis=1), np.maximum(down, ready.min()) + work.sum(axis=0)
    up, down, places = up.copy(), down.copy(), list(places)
    heapq.heapify(places)
    finish = np.empty(len(order))
    for owner in order:
        opened = max(heapq.heappop(places), float(ready[owner]) + plan.leg_us)
        begin = np.maximum(np.maximum(opened + plan.leg_us, ready), up)
        mine = work[:, owner]
        up = np.where(mine > 0, begin + mine, up)
        arrive = begin + plan.leg_us + plan.packet_us
        down[owner] = fifo_finish(arrive[:, None], mine[:, None], down[owner : owner + 1])[0]
        finish[owner] = max(down[owner], float((begin + plan.leg_us).max())) + plan.leg_us
        heapq.heappush(places, float((arrive + np.maximum(mine - MAX_CHUNK_BYTES / plan.port, 0)).max()))
    return *after, places, finish


class _Grants:
    """Places of a phased dispatch: a rank asks, is granted in order of request, and gives the place back."""

    def __init__(self, simulation: EventSimulation, plan: LayerPlan) -> None:
        self.simulation, self.plan = simulation, plan
        self.free = plan.scenario.pipeline.ranks_per_phase
        self.queue: list[greenlet.greenlet] = []

    def acquire(self) -> None:
        sim, thread = self.simulation, greenlet.getcurrent()

        def request() -> None:
            self.queue.append(thread)
            self._grant()

        sim.at(sim.now + self.plan.leg_us, request)
        sim._hub.switch()

    def _grant(self) -> None:
        while self.free and self.queue:
            self.free -= 1
            self.simulation.at(self.simulation.now + self.plan.leg_us, self.queue.pop(0).switch)

    def release_at(self, time_us: float) -> None:
        def release() -> None:
            self.free += 1
            self._grant()

        self.simulation.at(max(time_us, self.simulation.now), release)


def message_work(plan: LayerPlan, loads: MicrobatchLoads, kind: str) -> np.ndarray:
    """Time of every message on a rank's port: [sender, destination]. The combine returns what the dispatch brought."""
    rows = loads.rows if kind == "dispatch" else loads.rows.T
    row_bytes = plan.dispatch_row_bytes + plan.record_bytes if kind == "dispatch" else plan.combine_row_bytes
    work = rows * (row_bytes / plan.port)
    if plan.scenario.network.local_bypass:
        np.fill_diagonal(work, 0.0)
    return work


def aggregated_programs(simulation: EventSimulation) -> RankPrograms:
    """Rank programs of the plain collectives over `Flows`."""
    flows, plan = Flows(simulation), simulation.plan
    phased = plan.scenario.model.phased

    def push_microbatch(pe: TimedPe, call: Call, magic: int, routed: RoutedTokens) -> None:
        with pe.stage("pack", magic, rows=int(simulation.loads(magic).sent_copies[pe.pe])):
            pass
        if phased:
            flows.grants.acquire()
        flows.send_all(pe.pe, "dispatch", magic)
        if phased:
            flows.grants.release_at(float(flows.up[pe.pe]) + plan.leg_us)

    def wait_for_expert_rows(pe: TimedPe, call: Call, magic: int) -> ReceivedRows:
        flows.wait(pe.pe, "dispatch", magic)
        if phased and plan.scenario.pipeline.barrier_after_dispatch:
            flows.join_barrier(magic)
        return ReceivedRows(np.empty(0), np.empty(0), np.empty(0))

    def publish_partial_sums(pe: TimedPe, call: Call, magic: int) -> None:
        if phased:
            flows.publish_in_phases(pe.pe, magic)
        else:
            flows.send_all(pe.pe, "combine", magic)

    def wait_for_token_sums(pe: TimedPe, call: Call, magic: int, num_tokens: int) -> np.ndarray:
        flows.wait(pe.pe, "combine", magic)
        with pe.stage("global_reduce", magic, rows=num_tokens):
            return np.empty(0)

    return RankPrograms(push_microbatch, wait_for_expert_rows, publish_partial_sums, wait_for_token_sums)  # type: ignore[arg-type]


def aggregated_counters(plan: LayerPlan, loads: Loads) -> Counters:
    """Counters of a layer whose packets were aggregated: the closed forms on the rows that it moved."""
    return layer_counters(plan, loads)
