"""The plain collectives as aggregated flows, where W * W messages one by one are out of reach: both modes run on this.

A rank's messages leave its port one after another as the relay programs send them; once all ranks have begun, the arrivals
at every port follow from `flows.py`. Phased: the grants of the dispatch are events, one per rank; the phases of the combine
are solved when all ranks have published.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from inc_runtime.simulator.flows import Exchange, PortsIn, Uplinks, combine_phases, message_work
from inc_runtime.simulator.network import Action, Network
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads

FLOWS_FROM_RANKS, LEAVES_FROM_RANKS, PHASED_FROM_RANKS, MOST_CHUNKS = 129, 65, 17, 200_000
"""In fast mode plain collectives of real switches go message by message below the first many ranks, below the second over
uplinks; with phases below the third, or where all messages have no more chunks than the last; else as flows."""
GROUPS = 8
"""Ports in are resolved in so many groups, by when their last message comes: each too early by no more than its own spread."""


def flows_fit(plan: LayerPlan) -> bool:
    """Whether a plain scenario can run on aggregated flows: real switches, one plane, no phases over uplinks."""
    scenario = plan.scenario
    return plan.real and scenario.network.planes == 1 and not (scenario.model.phased and scenario.num_leaves > 1)


def fast_as_flows(plan: LayerPlan) -> bool:
    """Whether fast mode takes a plain scenario as aggregated flows."""
    scenario = plan.scenario
    if not flows_fit(plan):
        return False
    if scenario.model.phased:
        tokens, messages = scenario.pipeline.microbatch_tokens, 2 * plan.num_microbatches * scenario.num_ranks**2
        chunks = -(-tokens * plan.mean_copies / scenario.num_ranks // scenario.layout.dims.rows_per_chunk)
        return scenario.num_ranks >= PHASED_FROM_RANKS and messages * max(1.0, chunks) > MOST_CHUNKS
    return scenario.num_ranks >= (LEAVES_FROM_RANKS if scenario.num_leaves > 1 else FLOWS_FROM_RANKS)


def tested_error(plan: LayerPlan, mode: str) -> float:
    """How far from packets, one by one, a layer time of this mode has been where both can be run (W up to 24).

    0 for `event`, which runs them. The tests hold every mode to this (`tests/backend/test_simulator_fast.py`).
    """
    scenario = plan.scenario
    if mode == "event":
        return 0.0
    if scenario.model.in_network or (mode == "fast" and not fast_as_flows(plan)):
        # Phases of a relay with several planes: which of two chunks that come at one moment is first moves all that follows.
        return 0.02 if scenario.model.phased and not scenario.model.in_network and scenario.network.planes > 1 else 0.01
    return error_of_flows(plan)


def error_of_flows(plan: LayerPlan) -> float:
    """As `tested_error`, of aggregated flows."""
    if plan.scenario.model.phased:
        return 0.30
    return 0.35 if plan.scenario.num_leaves > 1 else 0.02


class Exchanges:
    """Ports of all ranks as arrays, and the exchanges in flight. `kind` is tokens or sums, `magic` counts from 1.

    `arrived(kind, magic, rank)` is called when the last message of an exchange has reached a rank.
    """

    def __init__(self, plan: LayerPlan, network: Network, arrived: Callable[[str, int, int], None]) -> None:
        self.plan, self.network, self.arrived = plan, network, arrived
        self.num_ranks = plan.scenario.num_ranks
        self.up, self.down = np.zeros(self.num_ranks), PortsIn(self.num_ranks)
        self.uplinks = Uplinks(plan) if plan.scenario.num_leaves > 1 else None
        self.pending: dict[tuple[str, int], Exchange] = {}
        self.places = [0.0] * plan.scenario.pipeline.ranks_per_phase
        self.free, self.queue = plan.scenario.pipeline.ranks_per_phase, deque[Action]()
        self.publishers: dict[int, list[Action]] = defaultdict(list)
        self.joined: dict[int, list[Action]] = defaultdict(list)

    def loads(self, magic: int) -> MicrobatchLoads:
        return self.network.loads(magic)

    def send_all(self, rank: int, kind: str, magic: int) -> float:
        """Send this rank's W messages, behind what it sends already. Returns when the last byte leaves."""
        plan, network = self.plan, self.network
        key = (kind, magic)
        if key not in self.pending:
            self.pending[key] = Exchange(message_work(plan, self.loads(magic), kind))
            if self.uplinks is None:
                self.down.open.append(self.pending[key])
        exchange = self.pending[key]
        total = float(exchange.work[rank].sum())
        start = max(network.now(), float(self.up[rank]))
        self.up[rank] = start + total
        network.busy["up", rank] += total
        exchange.send(rank, start, plan.row_leg_us + plan.packet_us)
        if exchange.complete:
            del self.pending[key]
            if self.uplinks is not None:
                self._cross_leaves(exchange)
            last = exchange.arrive.max(axis=0)
            for ports in np.array_split(np.argsort(last, kind="stable"), min(GROUPS, self.num_ranks)):
                network.at(float(last[ports[0]]), lambda p=ports: self._resolve(kind, magic, exchange, p))  # type: ignore[misc]
        return start + total

    def _resolve(self, kind: str, magic: int, exchange: Exchange, ports: np.ndarray) -> None:
        """The first of `ports` has its last message: serve what came until then, and finish the exchange there."""
        self.down.settle(self.network.now() - 1e-9)
        finish = np.maximum(self.down.finish(exchange, ports), exchange.tail[ports])
        self._deliver(kind, magic, exchange.work, ports, finish + self.plan.row_leg_us)

    def _cross_leaves(self, exchange: Exchange) -> None:
        assert self.uplinks is not None
        self.uplinks.cross(exchange)
        # What came before the exchange was complete could not be served with the others: it comes now.
        exchange.arrive = np.maximum(exchange.arrive, self.network.now())
        self.down.open.append(exchange)
        for leaf, (up, down) in enumerate(zip(self.uplinks.busy_up.tolist(), self.uplinks.busy_down.tolist(), strict=True)):
            self.network.busy["leaf_up", leaf], self.network.busy["leaf_down", leaf] = up, down

    def _deliver(self, kind: str, magic: int, work: np.ndarray, ports: np.ndarray, finish: np.ndarray) -> None:
        now = self.network.now()
        for rank, busy, time_us in zip(ports.tolist(), work[:, ports].sum(axis=0).tolist(), finish.tolist(), strict=True):
            self.network.busy["down", rank] += busy
            self.network.at(max(now, time_us), lambda rank=rank: self.arrived(kind, magic, rank))  # type: ignore[misc]

    def publish_in_phases(self, rank: int, magic: int, then: Action) -> None:
        """Return partial sums owner by owner; `then` when the phases of all owners are known."""
        key = ("sums", magic)
        if key not in self.pending:
            self.pending[key] = Exchange(message_work(self.plan, self.loads(magic), "sums"))
        exchange, now = self.pending[key], self.network.now()
        exchange.start[rank] = now
        exchange.joined += 1
        self.publishers[magic].append(then)
        if not exchange.complete:
            return
        del self.pending[key]
        self.down.settle(now)
        order = np.argsort(exchange.start, kind="stable")
        self.up, self.down.free, self.places, finish = combine_phases(
            self.plan, order, exchange.start, exchange.work, self.up, self.down.free, self.places
        )
        for sender, busy in enumerate(exchange.work.sum(axis=1).tolist()):
            self.network.busy["up", sender] += busy
        self._deliver("sums", magic, exchange.work, np.arange(self.num_ranks), finish)
        for action in self.publishers.pop(magic):
            self.network.at(now, action)

    def ask(self, granted: Action) -> None:
        """Ask for a place of a phased dispatch: `granted` once it is there, in order of request."""

        def request() -> None:
            self.queue.append(granted)
            self._grant()

        self.network.at(self.network.now() + self.plan.leg_us, request)

    def _grant(self) -> None:
        while self.free and self.queue:
            self.free -= 1
            self.network.at(self.network.now() + self.plan.leg_us, self.queue.popleft())

    def give_back_at(self, time_us: float) -> None:
        """The place of a rank is free again at that time."""

        def release() -> None:
            self.free += 1
            self._grant()

        self.network.at(max(time_us, self.network.now()), release)

    def join_barrier(self, magic: int, then: Action) -> None:
        """The INC barrier: all ranks leave two legs after the last has joined."""
        self.joined[magic].append(then)
        if len(self.joined[magic]) == self.num_ranks:
            for action in self.joined.pop(magic):
                self.network.at(self.network.now() + 2 * self.plan.leg_us, action)
