"""The network of the fast mode, without phases: what `network.py` does transfer by transfer, for all ranks at once."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from inc_runtime.simulator.closed_forms import HEADER, WORD
from inc_runtime.simulator.fast_emulated import EmulatedPorts
from inc_runtime.simulator.flows import fifo_finish, message_starts, uplink_finish

if TYPE_CHECKING:
    from inc_runtime.simulator.fast_mode import FastLayer

EXACT_FLOW_RANKS = 16
"""Above, the order of messages at a port is not followed one by one: with W messages to each, their sum decides."""


class Collected:
    """What all ranks bring to one step of a microbatch, filled as they come."""

    def __init__(self, num_ranks: int) -> None:
        self.head, self.tail, self.count = np.zeros(num_ranks), np.zeros(num_ranks), 0

    def add(self, ranks: np.ndarray, head: np.ndarray, tail: np.ndarray) -> bool:
        """True once every rank has come."""
        self.head[ranks], self.tail[ranks] = head, tail
        self.count += len(ranks)
        return self.count == len(self.head)


class FastNetwork:
    """`send(m, ranks, ready)` and `publish(m, ranks, ready)`: when those ranks hand their rows to the network."""

    def __init__(self, layer: FastLayer) -> None:
        plan = self.plan = layer.plan
        self.layer, self.num_ranks = layer, plan.scenario.num_ranks
        self.up, self.down = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
        self.leaf_up, self.leaf_down = np.zeros(plan.scenario.num_leaves), np.zeros(plan.scenario.num_leaves)
        self.two_level, self.size = plan.scenario.num_leaves > 1, plan.scenario.ranks_per_leaf
        self.edges = np.arange(0, self.num_ranks, self.size)
        self.spine_us = plan.uplink_us if self.two_level else 0.0
        self.combine_free = self.release = 0.0
        self.summed = -1
        self.words: dict[int, np.ndarray] = defaultdict(lambda: np.full(self.num_ranks, np.nan))
        self.taken: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(self.num_ranks, bool))
        self.collected: dict[tuple[str, int], Collected] = defaultdict(lambda: Collected(self.num_ranks))
        self.busy: dict[str, np.ndarray] = {"rank port out": np.zeros(self.num_ranks), "rank port in": np.zeros(self.num_ranks)}
        if self.two_level:
            self.busy |= {"uplink to spine": np.zeros_like(self.leaf_up), "uplink to leaf": np.zeros_like(self.leaf_up)}
        self.emulated = EmulatedPorts(self) if not plan.real else None

    def occupy_up(self, ranks: np.ndarray, ready: np.ndarray | float, work: np.ndarray) -> np.ndarray:
        """Book `work` us, one per rank of `ranks`, on their ports out. Returns the starts."""
        start = np.maximum(self.up[ranks], ready)
        self.up[ranks] = np.where(work > 0, start + work, self.up[ranks])
        self.busy["rank port out"][ranks] += work
        return start

    def occupy_down(self, ranks: np.ndarray, ready: np.ndarray | float, work: np.ndarray) -> np.ndarray:
        start = np.maximum(self.down[ranks], ready)
        self.down[ranks] = np.where(work > 0, start + work, self.down[ranks])
        self.busy["rank port in"][ranks] += work
        return start

    def occupy_leaf(self, direction: str, ready: np.ndarray | float, work: np.ndarray) -> np.ndarray:
        free = getattr(self, direction)
        start = np.maximum(free, ready)
        setattr(self, direction, start + work)
        self.busy["uplink to spine" if direction == "leaf_up" else "uplink to leaf"] += work
        return start

    # Dispatch.

    def token_bytes(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that each rank pushes and receives, INC forms: [W], [W]."""
        loads, plan = self.layer.loads[number], self.plan
        row = plan.dispatch_row_bytes + plan.record_bytes
        sent, received = loads.tokens, loads.received
        if plan.scenario.network.local_bypass:
            sent, received = sent - loads.at_home, received - np.diag(loads.rows)
        return sent * row + HEADER + WORD, received * row + HEADER + WORD

    def send(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        self.layer.complete("send", number, ranks, ready)
        if not self.plan.scenario.model.in_network:
            self._exchange("tokens", number, ranks, ready)
        elif self.emulated is not None:
            self.emulated.push(number, ranks, ready)
        else:
            self._push(number, ranks, ready)

    def _push(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        plan = self.plan
        work = self.token_bytes(number)[0][ranks] / plan.port
        start = self.occupy_up(ranks, ready, work)
        head, tail = start + np.minimum(plan.packet_us, work) + plan.leg_us, start + work + plan.leg_us
        together = self.collected["push", number]
        if not together.add(ranks, head, tail):
            return
        head, tail = together.head, together.tail
        at_leaf = head if plan.cut_through else tail
        if self.two_level:
            self.layer.at(float(at_leaf.mean()), lambda: self._leaf_push(number, at_leaf, tail))
            return
        when = float(at_leaf.max())
        self.layer.at(when, lambda: self._multicast(number, when, float(tail.max())))

    def _leaf_push(self, number: int, head: np.ndarray, tail: np.ndarray) -> None:
        plan, loads = self.plan, self.layer.loads[number]
        work = loads.leaf_up * (plan.dispatch_row_bytes + plan.record_bytes) / plan.uplink
        total = np.add.reduceat(work, self.edges)
        start = self.occupy_leaf("leaf_up", np.minimum.reduceat(head, self.edges), total)
        # The last rank of a leaf begins behind the others' rows.
        last = np.repeat(start + total, self.size) - work.reshape(-1, self.size)[:, -1].repeat(self.size)
        end = np.maximum(tail, np.repeat(start + total, self.size)) + plan.uplink_us
        begin = np.maximum(head, last) + plan.uplink_us
        when = float((begin if plan.cut_through else end).max())
        self.layer.at(when, lambda: self._multicast(number, when, float(end.max())))

    def _multicast(self, number: int, when: float, input_tail: float) -> None:
        plan, loads = self.plan, self.layer.loads[number]
        work = self.token_bytes(number)[1] / plan.port
        ready: np.ndarray | float = when
        if self.two_level:
            num_bytes = loads.leaf_down * (plan.dispatch_row_bytes + plan.record_bytes)
            ready, input_tails = self._to_leaves(when, input_tail, num_bytes)
        else:
            input_tails = np.full(self.num_ranks, input_tail)
        everyone = self.layer.everyone
        start = self.occupy_down(everyone, ready, work)
        left = np.maximum(start + work, input_tails + np.minimum(plan.packet_us, work))
        self.layer.arrive("tokens", number, everyone, left + plan.leg_us)

    def _to_leaves(self, when: float, input_tail: float, num_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Spine to leaves: when rows begin and end at every rank's leaf."""
        plan = self.plan
        work = num_bytes / plan.uplink
        start = self.occupy_leaf("leaf_down", when, work)
        tail = np.maximum(start + work, input_tail) + plan.uplink_us
        head = start + plan.uplink_us if plan.cut_through else tail
        return np.repeat(head, self.size), np.repeat(tail, self.size)

    # Combine.

    def publish(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        self.layer.complete("publish", number, ranks, ready)
        if not self.plan.scenario.model.in_network:
            self._exchange("sums", number, ranks, ready)
            return
        words = ready + self.plan.leg_us + self.spine_us
        self.words[number][ranks] = words
        if self.summed == number - 1 and (self.emulated is None or number in self.emulated.pulls):
            self._words_came(number, ranks)

    def next_pull(self) -> None:
        """The combine switch turns to the next microbatch, and to the words that are there."""
        number = self.summed + 1
        if number >= len(self.layer.loads) or (self.emulated is not None and not self.emulated.ready_to_pull(number)):
            return
        here = np.flatnonzero((self.words[number] >= 0) & ~self.taken[number])
        if len(here):
            self._words_came(number, here)

    def _words_came(self, number: int, ranks: np.ndarray) -> None:
        self.taken[number][ranks] = True
        if self.emulated is not None:
            self.emulated.words_came(number, ranks, self.words[number][ranks])
            return
        request = np.maximum(self.words[number][ranks], self.combine_free) + self.plan.leg_us + self.spine_us
        self.layer.spread(ranks, request, lambda r, w: self._read(number, r, w))

    def pulled_bytes(self, number: int) -> np.ndarray:
        loads = self.layer.loads[number]
        home = np.diag(loads.rows) if self.plan.scenario.network.local_bypass else 0
        return (loads.received - home) * self.plan.combine_row_bytes

    def returned_bytes(self, number: int) -> np.ndarray:
        loads = self.layer.loads[number]
        home = loads.at_home if self.plan.scenario.network.local_bypass else 0
        return (loads.tokens - home) * self.plan.combine_row_bytes + WORD

    def _read(self, number: int, ranks: np.ndarray, request: np.ndarray) -> None:
        plan = self.plan
        work = self.pulled_bytes(number)[ranks] / plan.port
        start = self.occupy_up(ranks, request, work)
        head, tail = start + np.minimum(plan.packet_us, work) + plan.leg_us, start + work + plan.leg_us
        # Ranks without rows are waited for as well, but not read: their word is all that comes.
        word = request - plan.leg_us - self.spine_us
        together = self.collected["pull", number]
        if not together.add(ranks, np.where(work > 0, head, word), np.where(work > 0, tail, word)):
            return
        head, tail = together.head, together.tail
        if self.two_level:
            heads, tails = np.maximum.reduceat(head, self.edges), np.maximum.reduceat(tail, self.edges)
            crossing = self.layer.loads[number].leaf_down * plan.combine_row_bytes / plan.uplink
            begin = self.occupy_leaf("leaf_up", heads if plan.cut_through else tails, crossing)
            tail = np.maximum(begin + crossing, tails) + plan.uplink_us
            head = begin + plan.uplink_us
        last_tail = float(tail.max())
        when = max(float(head.max()) if plan.cut_through else last_tail, self.release)
        self.layer.at(when, lambda: self._return_sums(number, when, last_tail))

    def _return_sums(self, number: int, when: float, input_tail: float) -> None:
        plan, loads = self.plan, self.layer.loads[number]
        work = self.returned_bytes(number) / plan.port
        ready: np.ndarray | float = when
        tails = np.full(self.num_ranks, input_tail)
        if self.two_level:
            outside = np.add.reduceat(loads.leaf_up, self.edges)
            ready, tails = self._to_leaves(when, input_tail, outside * plan.combine_row_bytes)
        everyone = self.layer.everyone
        start = self.occupy_down(everyone, ready, work)
        left = np.maximum(start + work, tails + np.minimum(plan.packet_us, work))
        self.combine_free, self.release = when, float((tails if self.two_level else left).max())
        self.summed = number
        self.layer.arrive("sums", number, everyone, left + plan.leg_us)
        self.next_pull()

    # Plain forms.

    def message_work(self, kind: str, number: int) -> np.ndarray:
        plan, loads = self.plan, self.layer.loads[number]
        rows = loads.rows if kind == "tokens" else loads.rows.T
        row_bytes = plan.dispatch_row_bytes + plan.record_bytes if kind == "tokens" else plan.combine_row_bytes
        work = rows * (row_bytes / plan.port)
        if plan.scenario.network.local_bypass:
            np.fill_diagonal(work, 0.0)
        return work

    def _exchange(self, kind: str, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        work = self.message_work(kind, number)
        total = work.sum(axis=1)[ranks]
        start = self.occupy_up(ranks, ready, total)
        together = self.collected[kind, number]
        if together.add(ranks, start, start + total):
            arrive = float(together.head.max()) + self.plan.leg_us + self.plan.packet_us
            self.layer.at(arrive, lambda: self._land(kind, number, together.head, work))

    def _land(self, kind: str, number: int, start: np.ndarray, work: np.ndarray) -> None:
        plan = self.plan
        tails = start + work.sum(axis=1)
        delay = plan.leg_us + plan.packet_us
        if self.num_ranks <= EXACT_FLOW_RANKS:
            finish = fifo_finish(message_starts(start, work) + delay, work, self.down)
        else:
            finish = np.maximum(np.maximum(self.down, start.min() + delay) + work.sum(axis=0), tails + delay)
        self.busy["rank port in"] += work.sum(axis=0)
        self.down = finish
        if self.two_level:
            cross = np.add.reduceat(np.add.reduceat(work, self.edges, axis=0), self.edges, axis=1) * plan.port / plan.uplink
            np.fill_diagonal(cross, 0)
            crossed, self.leaf_up, self.leaf_down = uplink_finish(start, tails, cross, self.leaf_up, self.leaf_down, self.size)
            self.busy["uplink to spine"] += cross.sum(axis=1)
            self.busy["uplink to leaf"] += cross.sum(axis=0)
            finish = np.maximum(finish, crossed + plan.leg_us) + 2 * plan.uplink_us
        self.layer.arrive(kind, number, self.layer.everyone, finish + plan.leg_us)
