"""The phased forms in fast mode, on a real switch: one task per sender or phase, all ranks at once in each."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from inc_runtime.protocol import MAX_CHUNK_BYTES
from inc_runtime.simulator.closed_forms import HEADER, WORD
from inc_runtime.simulator.fast_network import Collected, FastNetwork
from inc_runtime.simulator.flows import fifo_finish
from inc_runtime.simulator.network import CONTROL_BYTES

if TYPE_CHECKING:
    from inc_runtime.simulator.fast_mode import FastLayer


class FastPhases(FastNetwork):
    """G places for the senders of a dispatch, G owners per phase of a combine."""

    def __init__(self, layer: FastLayer) -> None:
        super().__init__(layer)
        self.group = self.plan.scenario.pipeline.ranks_per_phase
        self.free_places = self.group
        self.queue: deque[tuple[int, int]] = deque()
        self.landed: dict[int, np.ndarray] = {}
        self.sent: dict[int, int] = {}
        self.left_at = 0.0
        self.starts: dict[int, np.ndarray] = {}
        self.places = [0.0] * self.group

    def send(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        self.landed.setdefault(number, np.zeros(self.num_ranks))
        for rank, when in zip(ranks.tolist(), (ready + self.plan.leg_us).tolist(), strict=True):
            self.layer.at(when, lambda r=rank, w=when: self._request(number, r, w))  # type: ignore[misc]

    def _request(self, number: int, rank: int, now: float) -> None:
        self.queue.append((number, rank))
        self._grant(now)

    def _grant(self, now: float) -> None:
        while self.free_places and self.queue:
            self.free_places -= 1
            number, rank = self.queue.popleft()
            begin = max(now, self.left_at) + self.plan.leg_us
            self.layer.at(begin, lambda n=number, r=rank, b=begin: self._push_one(n, r, b))  # type: ignore[misc]

    def _push_one(self, number: int, rank: int, now: float) -> None:
        plan, inc = self.plan, self.plan.scenario.model.in_network
        own = self.layer.everyone[rank : rank + 1]
        self.layer.complete("send", number, own, np.array([now]))
        messages = self.message_work("tokens", number)[rank]
        work = self.token_bytes(number)[0][rank] / plan.port if inc else float(messages.sum())
        start = max(now, float(self.up[rank]))
        self.up[rank] = start + work
        self.busy["rank port out"][rank] += work
        head, tail = start + min(plan.packet_us, work) + plan.leg_us, start + work + plan.leg_us
        if inc:
            when = head if plan.cut_through else tail
            self.layer.at(when, lambda: self._multicast_one(number, rank, when, tail))
        else:
            self.layer.at(head, lambda: self._relay_one(number, rank, start, messages))
            # The place is free once the last chunk has been passed on.
            last = tail - min(float(messages[rank]), MAX_CHUNK_BYTES / plan.port) + plan.packet_us
            self.layer.at(last, lambda: self._release(last))

    def _release(self, now: float) -> None:
        self.free_places += 1
        self._grant(now)

    def _multicast_one(self, number: int, rank: int, when: float, input_tail: float) -> None:
        plan = self.plan
        rows = self.layer.loads[number].rows[rank].copy()
        if plan.scenario.network.local_bypass:
            rows[rank] = 0
        work = np.where(rows > 0, (rows * (plan.dispatch_row_bytes + plan.record_bytes) + HEADER + WORD) / plan.port, 0.0)
        start = np.where(work > 0, self.occupy_down(self.layer.everyone, when, work), when)
        left = np.where(work > 0, np.maximum(start + work, input_tail + np.minimum(plan.packet_us, work)), when)
        self.left_at = max(self.left_at, float(left.max()))
        self._landed(number, self.layer.everyone, left + plan.leg_us)
        # After the other senders that arrive at this moment: the program grants once it has served them all.
        self.layer.at(when, lambda: self._release(when))

    def _relay_one(self, number: int, rank: int, start: float, work: np.ndarray) -> None:
        plan = self.plan
        arrive = start + plan.leg_us + plan.packet_us
        for step in range(self.num_ranks):
            target = (rank + 1 + step) % self.num_ranks
            own = self.layer.everyone[target : target + 1]
            self.layer.at(arrive, lambda o=own, a=arrive: self._message(number, o, a, work[o]))  # type: ignore[misc]
            arrive += float(work[target])

    def _message(self, number: int, target: np.ndarray, arrive: float, work: np.ndarray) -> None:
        """One message reaches the port of its destination, after those that came before."""
        begin = self.occupy_down(target, arrive, work)
        self._landed(number, target, begin + work + self.plan.leg_us)

    def _landed(self, number: int, ranks: np.ndarray, when: np.ndarray) -> None:
        """Rows of one sender are on some ranks; after the last rows of the last sender comes the barrier."""
        self.landed[number][ranks] = np.maximum(self.landed[number][ranks], when)
        self.sent[number] = self.sent.get(number, 0) + len(ranks)
        if self.sent[number] < self.num_ranks**2:
            return
        arrived = self.landed[number]
        if self.plan.scenario.pipeline.barrier_after_dispatch:
            arrived = np.full(self.num_ranks, float(arrived.max()) + 2 * self.plan.leg_us)
        self.layer.arrive("tokens", number, self.layer.everyone, arrived)

    # Combine.

    def publish(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        plan = self.plan
        if not plan.scenario.model.in_network:
            self.words[number][ranks] = ready
            if not np.isnan(self.words[number]).any():
                self.layer.at(float(ready.max()), lambda: self._phases_of_relay(number, self.words.pop(number)))
            return
        self.layer.complete("publish", number, ranks, ready)
        num_bytes = self.layer.loads[number].tokens[ranks] * plan.record_bytes + HEADER + WORD
        work = np.where(num_bytes >= CONTROL_BYTES, num_bytes / plan.port, 0.0)
        start = np.where(work > 0, self.occupy_up(ranks, ready, work), ready)
        self.words[number][ranks] = start + plan.leg_us + (np.minimum(plan.packet_us, work) if plan.cut_through else work)
        self.next_pull()

    def next_pull(self) -> None:
        """Phases of a microbatch begin once every request has come: dense routing has experts of every owner on every rank."""
        number = self.summed + 1
        if number in self.words and not np.isnan(self.words[number]).any():
            requests = np.maximum(self.words.pop(number), self.combine_free)
            owners = list(np.argsort(requests, kind="stable"))
            first = float(requests[owners[: self.group]].max())
            self.layer.at(first, lambda: self._phase(number, requests, owners, first))

    def _phase(self, number: int, requests: np.ndarray, owners: list[int], now: float) -> None:
        """Pull for the next G owners, from every rank that holds experts of theirs."""
        plan, loads = self.plan, self.layer.loads[number]
        mine, rest = np.array(owners[: self.group]), owners[self.group :]
        rows = loads.rows[mine].copy()
        if plan.scenario.network.local_bypass:
            rows[np.arange(len(mine)), mine] = 0
        work = rows.sum(axis=0) * plan.combine_row_bytes / plan.port
        used = work > 0
        together = Collected(self.num_ranks)

        def read(ranks: np.ndarray, begin: np.ndarray) -> None:
            start = self.occupy_up(ranks, begin, work[ranks])
            own = np.minimum(plan.packet_us, work[ranks])
            if not together.add(ranks, start + own + plan.leg_us, start + work[ranks] + plan.leg_us):
                return
            head, tail = together.head, together.tail
            input_tail = float(tail[used].max()) if used.any() else now
            input_head = float(head[used].max()) if used.any() else now
            when = max(input_head if plan.cut_through else input_tail, self.release, now)
            self.layer.at(when, lambda: self._return_phase(number, requests, mine, rest, when, input_tail))

        self.layer.spread(self.layer.everyone, np.maximum(requests, now) + plan.leg_us, read)

    def _return_phase(
        self, number: int, requests: np.ndarray, mine: np.ndarray, rest: list[int], when: float, input_tail: float
    ) -> None:
        plan = self.plan
        work = self.returned_bytes(number)[mine] / plan.port
        start = np.maximum(self.down[mine], when)
        self.down[mine] = start + work
        self.busy["rank port in"][mine] += work
        left = np.maximum(start + work, input_tail + np.minimum(plan.packet_us, work))
        self.release = float(left.max())
        sums = self.starts.setdefault(number, np.zeros(self.num_ranks))
        sums[mine] = left + plan.leg_us
        if rest:
            self._phase(number, requests, rest, when)
            return
        self.combine_free, self.summed = when, number
        self.layer.arrive("sums", number, self.layer.everyone, self.starts.pop(number))
        self.next_pull()

    def _phases_of_relay(self, number: int, ready: np.ndarray) -> None:
        """The phases of a plain combine, one task per owner."""
        work = self.message_work("sums", number)
        owners = deque(np.argsort(ready, kind="stable"))
        finish = np.empty(self.num_ranks)
        heapq.heapify(self.places)
        self._relay_phase(number, ready, work, owners, finish)

    def _relay_phase(
        self, number: int, ready: np.ndarray, work: np.ndarray, owners: deque[int], finish: np.ndarray
    ) -> None:
        owner = owners.popleft()
        opened = max(heapq.heappop(self.places), float(ready[owner]) + self.plan.leg_us)
        self.layer.at(opened, lambda: self._open(number, ready, work, owners, finish, owner, opened))

    def _open(
        self,
        number: int,
        ready: np.ndarray,
        work: np.ndarray,
        owners: deque[int],
        finish: np.ndarray,
        owner: int,
        opened: float,
    ) -> None:
        plan, mine = self.plan, work[:, owner]
        begin = self.occupy_up(self.layer.everyone, np.maximum(opened + plan.leg_us, ready), mine)
        arrive = begin + plan.leg_us + plan.packet_us
        self.down[owner] = fifo_finish(arrive[:, None], mine[:, None], self.down[owner : owner + 1])[0]
        self.busy["rank port in"][owner] += mine.sum()
        finish[owner] = max(self.down[owner], float((begin + plan.leg_us).max())) + plan.leg_us
        closed = float((arrive + np.maximum(mine - MAX_CHUNK_BYTES / plan.port, 0)).max())
        heapq.heappush(self.places, closed)
        if owners:
            self._relay_phase(number, ready, work, owners, finish)
            return
        self.layer.complete("publish", number, self.layer.everyone, np.maximum(ready, closed))
        self.layer.arrive("sums", number, self.layer.everyone, finish)
