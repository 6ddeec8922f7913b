"""The INC switches of the fast mode without phases: what `switch_emulator` does, as state machines over the network.

`fast_phases.py` has those with phases. Each class mirrors one role program, and takes what has come in the same order: words that
are there in order of rank, then those that came meanwhile. An emulated switch spends its overhead on every sender (regroup) and
on every pull (accumulate).
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from inc_runtime.simulator.closed_forms import HEADER, WORD
from inc_runtime.simulator.fast_transfers import Action, Switches, TransferLayer
from inc_runtime.simulator.network import CONTROL_BYTES, Phase


class InNetworkSwitches(Switches):
    """Without phases: one packet per rank each way, when all ranks are in."""

    def __init__(self, layer: TransferLayer) -> None:
        super().__init__(layer)
        self.dispatch = [Dispatch(self, plane) for plane in range(self.planes)]
        self.combine = [Combine(self, plane) for plane in range(self.planes)]

    def send(self, rank: int, number: int) -> None:
        for switch in self.dispatch:
            self.push_tokens(rank, switch.plane, number, lambda s=switch: s.landed(number, rank))  # type: ignore[misc]
        self.layer.sent(rank)

    def publish(self, rank: int, number: int) -> None:
        for switch in self.combine:
            self.layer.signal(lambda s=switch: s.word(number, rank))  # type: ignore[misc]
        self.layer.published(rank)


class Dispatch:
    """One dispatch switch: collects a microbatch of all ranks, multicasts it, hands the plan to the combine of its plane."""

    def __init__(self, switches: InNetworkSwitches, plane: int) -> None:
        self.switches, self.plane, self.pe = switches, plane, switches.dispatch_pe(plane)
        self.number, self.taken, self.busy = 0, 0, False
        self.here: dict[int, list[int]] = defaultdict(list)
        self.overhead_us = 0.0 if switches.plan.real else float(switches.plan.switch_costs.regroup(0))

    def landed(self, number: int, rank: int) -> None:
        self.here[number].append(rank)
        if number == self.number and not self.busy:
            self.busy = True
            self.switches.layer.at(self.switches.layer.now, self._take)

    def _take(self) -> None:
        """Read the routing of those that are there, then look again."""
        count = len(self.here.pop(self.number, ()))
        if not count:
            self.busy = False
            return
        self.taken += count
        layer = self.switches.layer
        layer.at(layer.now + count * self.overhead_us, self._multicast if self.taken == layer.num_ranks else self._take)

    def _multicast(self) -> None:
        switches, number = self.switches, self.number
        loads, network, layer = switches.layer.loads[number], switches.network, switches.layer
        tail = network.tails[self.pe, number + 1, -1]
        home = np.round(loads.rows.diagonal() / switches.planes) if switches.bypass else np.zeros(switches.num_ranks)
        received = loads.plane_rows[self.plane].sum(axis=0)
        for rank, (count, at_home) in enumerate(zip(received.tolist(), home.tolist(), strict=True)):
            rows = count - at_home
            num_bytes = rows * switches.token_row + HEADER * (count > 0) + WORD
            switches.deliver(self.pe, rank, rows, num_bytes, tail, number, "tokens")
        records = switches.plan.plane_tokens(number)[self.plane] * switches.plan.record_bytes
        plan_bytes = switches.num_ranks * (records + HEADER) + WORD
        combine = switches.combine[self.plane]
        if switches.plan.real:
            layer.at(layer.now, lambda: combine.planned(number))
        elif plan_bytes < CONTROL_BYTES:
            layer.signal(lambda: combine.planned(number))
        else:
            network.between_emulated(self.pe, combine.pe, plan_bytes, lambda: combine.planned(number))
        self.number, self.taken = number + 1, 0
        self._take()


class Puller:
    """What both combine switches share: pulls in flight, and sums that begin once all of them have."""

    def __init__(self, switches: Switches, plane: int) -> None:
        self.switches, self.plane, self.pe = switches, plane, switches.combine_pe(plane)
        self.here: dict[int, list[int]] = defaultdict(list)
        self.open, self.head, self.tail = 0, 0.0, 0.0
        self.left_at = 0.0
        self.returning: Action | None = None
        self.overhead_us = 0.0 if switches.plan.real else float(switches.plan.switch_costs.accumulate(0))

    def home(self, rank: int, rows: float, number: int) -> int:
        """Of `rows` to pull from a rank, those that a local bypass keeps there."""
        if not self.switches.bypass:
            return 0
        loads = self.switches.layer.loads[number]
        return round(rows * float(loads.rows[rank, rank] / loads.received[rank]))

    def pull(self, rank: int, rows: float, number: int, phase: Phase | None = None) -> None:
        self.open += 1

        def arriving(head: float, tail: float) -> None:
            self.head, self.tail, self.open = max(self.head, head), max(self.tail, tail), self.open - 1
            if self.returning and not self.open:
                action, self.returning = self.returning, None
                self.switches.layer.at(self.switches.layer.now, action)

        num_bytes = rows * self.switches.plan.combine_row_bytes
        self.switches.network.pull(self.pe, rank, num_bytes, number + 1, arriving, phase)

    def return_sums(self, number: int, owners: list[int], then: Action) -> None:
        """Send the owners their sums as soon as the pulls and the last sums allow it."""
        if self.open:
            self.returning = lambda: self.return_sums(number, owners, then)
            return
        layer = self.switches.layer
        begin = max(self.head if self.switches.plan.cut_through else self.tail, self.left_at)
        if begin > layer.now:
            layer.at(begin, lambda: self._deliver(number, owners, then))
        else:
            self._deliver(number, owners, then)

    def _deliver(self, number: int, owners: list[int], then: Action) -> None:
        switches = self.switches
        own_tokens = switches.own_tokens(number, self.plane)
        for owner in owners:
            rows = own_tokens[owner]
            num_bytes = rows * switches.plan.combine_row_bytes + WORD
            left = switches.deliver(self.pe, owner, rows, num_bytes, self.tail, number, "sums")
            self.left_at = max(self.left_at, left)
        self.head = self.tail = 0.0
        then()


class Combine(Puller):
    """One combine switch without phases: waits for the plan, pulls from ranks as they are ready, returns the sums."""

    def __init__(self, switches: InNetworkSwitches, plane: int) -> None:
        super().__init__(switches, plane)
        self.number, self.taken, self.busy = 0, 0, False
        self.plans: set[int] = set()
        self.received: list[float] = []

    def planned(self, number: int) -> None:
        self.plans.add(number)
        self._look(number)

    def word(self, number: int, rank: int) -> None:
        self.here[number].append(rank)
        self._look(number)

    def _look(self, number: int) -> None:
        if number == self.number and number in self.plans and not self.busy:
            self.busy = True
            self.switches.layer.at(self.switches.layer.now, self._take)

    def _take(self) -> None:
        batch = deque(sorted(self.here.pop(self.number, ())))
        if not self.taken:
            self.received = self.switches.layer.loads[self.number].plane_rows[self.plane].sum(axis=0).tolist()
        if not batch and self.taken < self.switches.num_ranks:
            self.busy = False
        else:
            self._serve(batch)

    def _serve(self, batch: deque[int]) -> None:
        """Pull from the ranks of a batch, one after another."""
        switches = self.switches
        while batch:
            rank = batch.popleft()
            self.taken += 1
            if not self.received[rank]:
                continue
            self.pull(rank, self.received[rank] - self.home(rank, self.received[rank], self.number), self.number)
            if self.overhead_us:
                switches.layer.at(switches.layer.now + self.overhead_us, lambda: self._serve(batch))
                return
        if self.taken == switches.num_ranks:
            self.return_sums(self.number, list(range(switches.num_ranks)), self._next)
        else:
            self._take()

    def _next(self) -> None:
        self.number, self.taken, self.busy = self.number + 1, 0, False
        self._look(self.number)
