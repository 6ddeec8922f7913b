"""Flows of a plain all-to-all: W * W messages through ports that serve first come, first served, as arrays.

What `exchanges.py` computes with; proved against the packets of the relay programs at small W
(`tests/backend/test_simulator_aggregate.py`). Times in us; `work[s, d]` is the time of the message from s to d on a port.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from inc_runtime.protocol import MAX_CHUNK_BYTES
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads

LEAF_PARTS = 4
"""Into how many parts a message is cut where it crosses uplinks, which serve the messages of several ranks in turn."""


@lru_cache(maxsize=16)
def send_order(num_ranks: int) -> np.ndarray:
    """Destinations of every sender in the order in which it sends, the next rank first: [W, W] int64."""
    return (np.arange(num_ranks)[:, None] + 1 + np.arange(num_ranks)) % num_ranks


def message_work(plan: LayerPlan, loads: MicrobatchLoads, kind: str) -> np.ndarray:
    """Time of every message on a rank's port: [sender, destination]. `kind`: tokens, or sums, which go back the same way."""
    rows = loads.rows if kind == "tokens" else loads.rows.T
    row_bytes = plan.dispatch_row_bytes + plan.record_bytes if kind == "tokens" else plan.combine_row_bytes
    work = rows * (row_bytes / plan.port)
    if plan.scenario.network.local_bypass:
        np.fill_diagonal(work, 0.0)
    return work


@dataclass(eq=False)
class Exchange:
    """One collective of one microbatch. `start` [W]: when the first byte of each rank leaves, inf until it does.

    `arrive`, `work` [W, W]: when each message reaches the port of its destination, inf until its sender has started, and its
    time there; in two levels those of its parts, [parts * W, W], once all have started. `tail` [W]: when the uplinks are done.
    """

    work: np.ndarray
    start: np.ndarray = field(init=False)
    arrive: np.ndarray = field(init=False)
    tail: np.ndarray = field(init=False)
    joined: int = 0

    def __post_init__(self) -> None:
        self.start, self.arrive = np.full(len(self.work), np.inf), np.full(self.work.shape, np.inf)
        self.tail = np.zeros(len(self.work))

    @property
    def complete(self) -> bool:
        return self.joined == len(self.start)

    def send(self, rank: int, start: float, delay: float) -> None:
        """A rank's messages leave one after another from `start` on, and each arrives `delay` later."""
        self.start[rank] = start
        self.joined += 1
        order = send_order(len(self.start))[rank]
        work = self.work[rank, order]
        self.arrive[rank, order] = start + delay + np.cumsum(work) - work


class PortsIn:
    """The ports in of all ranks: messages of several exchanges at once, first come, first served.

    `free` [W]: when each port has served all that arrived until `since`; what arrives later is kept in `open`.
    """

    def __init__(self, num_ranks: int) -> None:
        self.free, self.since = np.zeros(num_ranks), -1.0
        self.open: list[Exchange] = []

    def settle(self, now: float) -> None:
        """Serve what has arrived until now: nothing that starts later can come before it."""
        if self.open:
            arrive, work = self._messages(now)
            self.free = _serve(arrive, work, self.free)
        self.since = now
        self.open = [x for x in self.open if not (x.complete and float(x.arrive.max()) <= now)]

    def finish(self, exchange: Exchange, ports: np.ndarray) -> np.ndarray:
        """When each of `ports` has served all messages of a complete exchange, and what came before its last: [len(ports)].

        Exact for a port at the time of that last arrival; before, what starts until then is not known.
        """
        arrive, work = self._messages(exchange.arrive[:, ports].max(axis=0), ports)
        return _serve(arrive, work, self.free[ports])

    def _messages(self, until: np.ndarray | float, ports: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Arrival and work of the messages to `ports` since `since`; work is 0 for those outside."""
        arrive = np.concatenate([x.arrive[:, ports] for x in self.open])
        work = np.concatenate([x.work[:, ports] for x in self.open])
        return arrive, np.where((arrive > self.since) & (arrive <= until), work, 0.0)


def _serve(arrive: np.ndarray, work: np.ndarray, free: np.ndarray) -> np.ndarray:
    """When each column's messages have been served in order of arrival by a server that is free from `free` on: [W].

    Lindley: the last of the busy period that begins with message i ends at its arrival plus all work from it on.
    """
    order = np.argsort(arrive, axis=0)
    ordered = np.take_along_axis(work, order, axis=0)
    remaining = np.cumsum(ordered[::-1], axis=0)[::-1]
    busy = np.where(ordered > 0, np.take_along_axis(arrive, order, axis=0) + remaining, 0.0)
    return np.maximum(busy.max(axis=0), free + work.sum(axis=0))


@dataclass
class Uplinks:
    """Uplinks of all leaves: `free_up`, `free_down` [leaves], and how long each has worked."""

    plan: LayerPlan

    def __post_init__(self) -> None:
        self.free_up, self.free_down, self.busy_up, self.busy_down = np.zeros((4, self.plan.scenario.num_leaves))

    def cross(self, exchange: Exchange) -> None:
        """Send the messages of a complete exchange from leaf to leaf, and set when they reach the ports in, in parts.

        Exchanges take turns: one does not use what another leaves idle. `exchange.tail` [W]: no port ends before that.
        """
        plan, num = self.plan, len(exchange.work)
        size, leaves = plan.scenario.ranks_per_leaf, plan.scenario.num_leaves
        leaf = np.arange(num) // size
        part = np.broadcast_to(exchange.work / LEAF_PARTS, (LEAF_PARTS, num, num))
        at_leaf = exchange.arrive + np.arange(LEAF_PARTS)[:, None, None] * part
        crossing = np.where(leaf[:, None] != leaf, part * (plan.port / plan.uplink), 0.0)

        def by_sender(x: np.ndarray) -> np.ndarray:
            return x.reshape(LEAF_PARTS, leaves, size, num).transpose(1, 0, 2, 3).reshape(leaves, -1)

        up, self.free_up = _starts(by_sender(at_leaf), by_sender(crossing), self.free_up)
        up = up.reshape(leaves, LEAF_PARTS, size, num).transpose(1, 0, 2, 3).reshape(LEAF_PARTS, num, num) + plan.uplink_us

        def by_target(x: np.ndarray) -> np.ndarray:
            return x.reshape(LEAF_PARTS, num, leaves, size).transpose(2, 0, 1, 3).reshape(leaves, -1)

        down, self.free_down = _starts(by_target(up), by_target(crossing), self.free_down)
        down = down.reshape(leaves, LEAF_PARTS, num, size).transpose(1, 2, 0, 3).reshape(LEAF_PARTS, num, num) + plan.uplink_us
        self.busy_up += by_sender(crossing).sum(axis=1)
        self.busy_down += by_target(crossing).sum(axis=1)
        exchange.arrive = np.where(crossing > 0, down, at_leaf).reshape(-1, num)
        exchange.work = part.reshape(-1, num)
        exchange.tail = np.where(crossing > 0, down + crossing, 0.0).max(axis=(0, 1))


def _starts(arrive: np.ndarray, work: np.ndarray, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When each message of a row begins, served in order of arrival by a server that is free from `free`; and the new free."""
    order = np.argsort(arrive, axis=1, kind="stable")
    ordered = np.take_along_axis(work, order, axis=1)
    before = np.cumsum(ordered, axis=1) - ordered
    idle = np.take_along_axis(arrive, order, axis=1) - before
    begins = before + np.maximum(np.maximum.accumulate(idle, axis=1), free[:, None])
    starts = np.empty_like(arrive)
    np.put_along_axis(starts, order, begins, axis=1)
    return starts, np.where(ordered > 0, begins + ordered, free[:, None]).max(axis=1)


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
        arrive = begin + plan.row_leg_us + plan.packet_us
        down[owner] = _serve(arrive[:, None], mine[:, None], down[owner : owner + 1])[0]
        finish[owner] = max(down[owner], float((begin + plan.row_leg_us).max())) + plan.row_leg_us
        heapq.heappush(places, float((arrive + np.maximum(mine - MAX_CHUNK_BYTES / plan.port, 0)).max()))
    return *after, places, finish
