"""The INC switches of the fast mode with phases: places and grants of the dispatch, phases of the combine, the barrier."""

from __future__ import annotations

from collections import defaultdict, deque

from inc_runtime.simulator.closed_forms import HEADER, WORD
from inc_runtime.simulator.fast_switches import Puller
from inc_runtime.simulator.fast_transfers import Action, Switches, TransferLayer
from inc_runtime.simulator.network import Phase


class PhasedSwitches(Switches):
    """With phases: G places for the senders of a dispatch, G owners per phase of a combine."""

    def __init__(self, layer: TransferLayer) -> None:
        super().__init__(layer)
        self.dispatch = [PhasedDispatch(self, plane) for plane in range(self.planes)]
        self.combine = [PhasedCombine(self, plane) for plane in range(self.planes)]
        self.barrier = Barrier(self)

    def words_of(self, kind: str, number: int) -> list[int]:
        return [self.planes * (self.num_ranks if kind == "tokens" else 1)] * self.num_ranks

    def send(self, rank: int, number: int, plane: int = 0) -> None:
        """Ask every plane in turn for a place, and push once it is granted."""
        if plane == self.planes:
            self.layer.sent(rank)
            return

        def granted() -> None:
            self.push_tokens(rank, plane, number, lambda: self.dispatch[plane].landed(number, rank))
            self.send(rank, number, plane + 1)

        self.layer.signal(lambda: self.dispatch[plane].request(number, rank, granted))

    def received(self, rank: int, number: int, then: Action) -> None:
        if self.plan.scenario.pipeline.barrier_after_dispatch:
            self.layer.signal(lambda: self.dispatch[0].join(number, then))
        else:
            then()

    def publish(self, rank: int, number: int) -> None:
        loads, num_bytes = self.layer.loads[number], self.planes * HEADER + WORD
        num_bytes += int(loads.tokens[rank]) * self.plan.record_bytes
        for switch in self.combine:
            self.push(rank, switch.pe, 0, num_bytes, number, lambda s=switch: s.request(number, rank))  # type: ignore[misc]
        self.layer.published(rank)


class Barrier:
    """The INC barrier after a phased dispatch: releases all ranks once the last has joined."""

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self.waiting: dict[int, list[Action]] = defaultdict(list)

    def joined(self, number: int, then: Action) -> None:
        """The word of one rank is in the switch."""
        self.waiting[number].append(then)
        if len(self.waiting[number]) == self.switches.num_ranks:
            for action in self.waiting.pop(number):
                self.switches.layer.signal_rank(action)


class PhasedDispatch:
    """One phased dispatch switch: grants places in order of request, multicasts each microbatch as it arrives."""

    def __init__(self, switches: PhasedSwitches, plane: int) -> None:
        self.switches, self.plane, self.pe = switches, plane, switches.dispatch_pe(plane)
        self.free, self.left_at, self.release_at, self.busy = switches.plan.scenario.ranks_per_phase, 0.0, 0.0, False
        self.asked: list[tuple[int, int, Action]] = []
        self.joins: list[tuple[int, Action]] = []
        self.queue: deque[Action] = deque()
        self.held: list[tuple[int, int]] = []
        self.here: set[tuple[int, int]] = set()
        self.overhead_us = 0.0 if switches.plan.real else float(switches.plan.switch_costs.regroup(0))

    def request(self, number: int, rank: int, granted: Action) -> None:
        self.asked.append((rank, number, granted))
        self._wake()

    def landed(self, number: int, rank: int) -> None:
        self.here.add((rank, number))
        self._wake()

    def join(self, number: int, then: Action) -> None:
        self.joins.append((number, then))
        self._wake()

    def _wake(self) -> None:
        if not self.busy:
            self.busy = True
            self.switches.layer.at(self.switches.layer.now, self._take)

    def _take(self) -> None:
        """Serve what is there: arrivals in order of their grants, requests in order of rank, the barrier; then grant."""
        if not (self.here or self.asked or self.joins):
            self.busy = False
            return
        arrived = deque(request for request in self.held if request in self.here)
        self.here -= set(arrived)
        asked, self.asked = sorted(self.asked, key=lambda entry: entry[0]), []
        joins, self.joins = self.joins, []
        self._multicast(arrived, lambda: self._grant(asked, joins))

    def _multicast(self, arrived: deque[tuple[int, int]], then: Action) -> None:
        if arrived:
            layer = self.switches.layer
            layer.at(layer.now + self.overhead_us, lambda: self._multicast_one(arrived, then))
        else:
            then()

    def _grant(self, asked: list[tuple[int, int, Action]], joins: list[tuple[int, Action]]) -> None:
        for number, action in joins:
            self.switches.barrier.joined(number, action)
        self.held += [(rank, number) for rank, number, _ in asked]
        self.queue += [granted for _, _, granted in asked]
        while self.free and self.queue:
            self.free -= 1
            self.switches.layer.signal_rank(self.queue.popleft(), self.release_at)
        self._take()

    def _multicast_one(self, arrived: deque[tuple[int, int]], then: Action) -> None:
        sender, number = request = arrived.popleft()
        switches = self.switches
        tail = switches.network.tails[self.pe, number + 1, sender]
        for rank, count in enumerate(switches.layer.loads[number].plane_rows[self.plane, sender].tolist()):
            rows = 0.0 if switches.bypass and rank == sender else count
            num_bytes = rows * switches.token_row + HEADER * (count > 0) + WORD
            left = switches.deliver(self.pe, rank, rows, num_bytes, tail, number, "tokens", sender)
            self.left_at = max(self.left_at, left)
        self.release_at = self.left_at
        self.held.remove(request)
        self.free += 1
        self._multicast(arrived, then)


class PhasedCombine(Puller):
    """One phased combine switch: a phase for every G requests, in their order. `pending`: ranks that the phase has not read."""

    def __init__(self, switches: PhasedSwitches, plane: int) -> None:
        super().__init__(switches, plane)
        self.group, self.number, self.served = switches.plan.scenario.ranks_per_phase, 0, 0
        self.words: dict[int, set[int]] = defaultdict(set)
        self.batch: deque[int] = deque()
        self.phase: list[int] = []
        self.rows: list[float] = []
        self.pending: list[int] = []
        self.busy = self.waiting = False

    def request(self, number: int, rank: int) -> None:
        """The request of an owner, which says that its own partial sums are ready as well."""
        self.here[number].append(rank)
        self.words[number].add(rank)
        layer = self.switches.layer
        if number != self.number:
            return
        if not self.busy:
            self.busy = True
            layer.at(layer.now, self._advance)
        elif self.waiting and rank in self.pending:
            self.waiting = False
            layer.at(layer.now, self._pull)

    def _advance(self) -> None:
        """Fill the next phase from the requests that are there, in order of rank, then from those that came meanwhile."""
        num_ranks = self.switches.num_ranks
        while True:
            while self.batch:
                self.phase.append(self.batch.popleft())
                if len(self.phase) == min(self.group, num_ranks - self.served):
                    pulled = self.switches.layer.loads[self.number].plane_rows[self.plane, self.phase].sum(axis=0)
                    self.rows, self.pending = pulled.tolist(), pulled.nonzero()[0].tolist()
                    self._pull()
                    return
            if self.served == num_ranks:
                del self.words[self.number]
                self.number, self.served = self.number + 1, 0
            self.batch = deque(sorted(self.here.pop(self.number, ())))
            if not self.batch:
                self.busy = False
                return

    def _pull(self) -> None:
        if not self.pending:
            self.return_sums(self.number, self.phase, self._phase_done)
            return
        ready = deque(rank for rank in self.pending if rank in self.words[self.number])
        self.waiting = not ready
        if ready:
            self._pull_batch(ready)

    def _pull_batch(self, ready: deque[int]) -> None:
        switches, phase = self.switches, Phase(self.served, list(self.phase))
        while ready:
            rank = ready.popleft()
            self.pending.remove(rank)
            own = self.switches.bypass and rank in phase.owners
            home = self.switches.layer.loads[self.number].plane_rows[self.plane, rank, rank] if own else 0
            self.pull(rank, self.rows[rank] - home, self.number, phase)
            if self.overhead_us:
                switches.layer.at(switches.layer.now + self.overhead_us, lambda: self._pull_batch(ready))
                return
        self._pull()

    def _phase_done(self) -> None:
        self.served += len(self.phase)
        self.phase = []
        self._advance()
