"""Fast mode, transfer by transfer: the event mode's own `Network` under state machines in place of the role programs.

One event per stage, transfer and wait, in the order in which the programs take them, with the loads of a microbatch in place
of its tokens: no program, flag or header is executed. `fast_switches.py` and `fast_relay.py` have the switches.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from inc_runtime.errors import Deadlock
from inc_runtime.simulator.closed_forms import HEADER, WORD
from inc_runtime.simulator.event_backend import MATRIX, VECTOR
from inc_runtime.simulator.network import CONTROL_BYTES, Network
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads, stack_loads

Action = Callable[[], None]
STAGES = ("send", "receive", "multiply", "publish", "finish")


class TransferLayer:
    """The ranks of a layer: five stages each, in order of microbatch, that wait for one another, for rows and for sums.

    `done[stage][rank]`: microbatches that have left a stage. Numbers of microbatches count from 0; magic is the number + 1.
    `last_arrival[kind][number]`: when the last rows, tokens or sums, of a microbatch have reached their rank.
    """

    def __init__(
        self, plan: LayerPlan, loads: Sequence[MicrobatchLoads], switches: Callable[[TransferLayer], Switches]
    ) -> None:
        scenario = plan.scenario
        self.plan, self.loads = plan, loads
        self.num_ranks, self.planes = scenario.num_ranks, scenario.network.planes
        self.events: list[tuple[float, int, Action]] = []
        self.sequence, self.now, self.end = 0, 0.0, 0.0
        self.network = Network(plan, self.at, lambda: self.now, lambda magic: loads[magic - 1])
        self.signal_us = plan.leg_us + (plan.uplink_us if self.network.two_level else 0.0)
        self.unit_free = {unit: [0.0] * self.num_ranks for unit in (MATRIX, VECTOR)}
        self.unit_busy = {unit: [0.0] * self.num_ranks for unit in (MATRIX, VECTOR)}
        self.done = [[0] * self.num_ranks for _ in STAGES]
        self.active = [[False] * self.num_ranks for _ in STAGES]
        self.steps: list[Callable[[int, int], None]] = [getattr(self, f"_{stage}") for stage in STAGES]
        self.depth = scenario.pipeline.depth
        self.costs = self._costs()
        self.landed: dict[tuple[str, int, int], int] = defaultdict(int)
        self.last_arrival: dict[str, dict[int, float]] = {"tokens": {}, "sums": {}}
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.waiting: dict[tuple[str, int, int], Action] = {}
        self.switches = switches(self)

    def _costs(self) -> list[dict[str, list[float]]]:
        """Cost of every stage on every rank, for each microbatch; all of them computed at once, [M, W]."""
        costs, loads = self.plan.costs, stack_loads(self.loads)
        last = costs.copy_out if self.plan.scenario.model.in_network else costs.global_reduce
        products = costs.products(loads)
        found = {
            "route": costs.route(loads.tokens),
            "pack": costs.pack(loads.sent_copies),
            "group": costs.group(loads.pairs, loads.received),
            "gate_up": products["matmul_gate_up"],
            "swiglu": costs.swiglu(loads.pairs),
            "down": products["matmul_down"],
            "reduce": costs.reduce(loads.pairs, loads.received),
            "last": last(loads.tokens),
        }
        by_number = {name: cost.tolist() for name, cost in found.items()}
        return [{name: cost[number] for name, cost in by_number.items()} for number in range(len(self.loads))]

    def at(self, time_us: float, action: Action) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time_us, self.sequence, action))

    def signal(self, action: Action, earliest: float = 0.0) -> None:
        """A control word between a rank and a switch."""
        self.at(max(self.now, earliest) + self.signal_us, action)

    def signal_rank(self, action: Action, earliest: float = 0.0) -> None:
        """A control word for which a rank waits: it goes on after all that lands at the same moment."""
        self.signal(lambda: self.at(self.now, action), earliest)

    def use(self, unit: str, rank: int, cost_us: float, then: Action) -> None:
        """Occupy a unit after those who asked before."""
        free = self.unit_free[unit]
        free[rank] = max(self.now, free[rank]) + cost_us
        self.unit_busy[unit][rank] += cost_us
        self.at(free[rank], then)

    def run(self) -> float:
        """The layer time in us. Raises Deadlock."""
        for rank in range(self.num_ranks):
            self.at(0.0, lambda r=rank: self._start(0, r))  # type: ignore[misc]
        events, pop = self.events, heapq.heappop
        while events:
            self.now, _, action = pop(events)
            action()
        if min(self.done[-1]) < len(self.loads):
            stuck = {stage: done for stage, done in zip(STAGES, self.done, strict=True) if min(done) < len(self.loads)}
            raise Deadlock(f"fast mode: no event is left, but these stages did not end: {stuck}. Use --mode event.")
        return self.end

    def release(self) -> None:
        """Let go of all that refers to this layer, so that its memory is free at once, without a collector."""
        for part in (self.network, self.switches, self):
            vars(part).clear()

    def _start(self, position: int, rank: int) -> None:
        """Begin the next microbatch of a stage if the stage is free and all that it waits for on its rank is done."""
        number = self.done[position][rank]
        if self.active[position][rank] or number == len(self.loads):
            return
        before = self.done[position - 1][rank] + (0 if position else self.depth)
        if before > number:
            self.active[position][rank] = True
            self.steps[position](rank, number)

    def _complete(self, position: int, rank: int) -> None:
        self.done[position][rank] += 1
        self.active[position][rank] = False
        self.at(self.now, lambda: self._start((position + 1) % len(STAGES), rank))
        self._start(position, rank)

    def sent(self, rank: int) -> None:
        """The switches have taken over a microbatch of a rank."""
        self._complete(0, rank)

    def published(self, rank: int) -> None:
        self._complete(3, rank)

    def arrive(self, kind: str, number: int, rank: int) -> None:
        """One of the words that `kind`, tokens or sums, of a microbatch needs has reached a rank."""
        key = (kind, number, rank)
        self.landed[key] += 1
        self.last_arrival[kind][number] = self.now
        if self.landed[key] == self.expected[kind, number][rank] and (action := self.waiting.pop(key, None)):
            self.at(self.now, action)

    def _await(self, kind: str, number: int, rank: int, action: Action) -> None:
        key = (kind, number, rank)
        if (kind, number) not in self.expected:
            self.expected[kind, number] = self.switches.words_of(kind, number)
        if self.landed[key] == self.expected[kind, number][rank]:
            action()
        else:
            self.waiting[key] = action

    def _send(self, rank: int, number: int) -> None:
        costs = self.costs[number]
        for kind in ("tokens", "sums"):
            if (kind, number) not in self.expected:
                self.expected[kind, number] = self.switches.words_of(kind, number)

        def push() -> None:
            self.switches.send(rank, number)

        inc = self.plan.scenario.model.in_network
        self.use(VECTOR, rank, costs["route"][rank], push if inc else lambda: self.use(VECTOR, rank, costs["pack"][rank], push))

    def _receive(self, rank: int, number: int) -> None:
        def group() -> None:
            self.use(VECTOR, rank, self.costs[number]["group"][rank], lambda: self._complete(1, rank))

        self._await("tokens", number, rank, lambda: self.switches.received(rank, number, group))

    def _multiply(self, rank: int, number: int) -> None:
        costs = self.costs[number]

        def down() -> None:
            self.use(MATRIX, rank, costs["down"][rank], lambda: self._complete(2, rank))

        fused = self.plan.costs.fused
        after = down if fused else lambda: self.use(VECTOR, rank, costs["swiglu"][rank], down)
        self.use(MATRIX, rank, costs["gate_up"][rank], after)

    def _publish(self, rank: int, number: int) -> None:
        self.use(VECTOR, rank, self.costs[number]["reduce"][rank], lambda: self.switches.publish(rank, number))

    def _finish(self, rank: int, number: int) -> None:
        def end() -> None:
            self.end = max(self.end, self.now)
            self._complete(4, rank)

        self._await("sums", number, rank, lambda: self.use(VECTOR, rank, self.costs[number]["last"][rank], end))


class Switches:
    """What stands between the ranks. Subclasses are the INC switches, with and without phases, and the relays."""

    def __init__(self, layer: TransferLayer) -> None:
        self.layer, self.plan, self.network = layer, layer.plan, layer.network
        self.num_ranks, self.planes = layer.num_ranks, layer.planes
        self.bypass = layer.plan.scenario.network.local_bypass
        self.token_row = self.plan.dispatch_row_bytes + self.plan.record_bytes
        self._own_tokens: dict[tuple[int, int], list[float]] = {}

    def dispatch_pe(self, plane: int) -> int:
        return self.num_ranks + plane

    def combine_pe(self, plane: int) -> int:
        return self.num_ranks + self.planes + plane

    def words_of(self, kind: str, number: int) -> list[int]:
        """How many words each rank awaits for its tokens or sums of a microbatch: [W]."""
        return [self.planes] * self.num_ranks

    def send(self, rank: int, number: int) -> None:
        """A rank has routed a microbatch. Calls `layer.sent` once the rank may go on."""
        raise NotImplementedError

    def received(self, rank: int, number: int, then: Action) -> None:
        """A rank has all its rows; `then` once it may use them."""
        then()

    def publish(self, rank: int, number: int) -> None:
        """A rank has its partial sums. Calls `layer.published` once the rank may go on."""
        raise NotImplementedError

    def own_tokens(self, number: int, plane: int) -> list[float]:
        """Tokens of each rank that cross its port to, and back from, one plane: [W]."""
        key = (number, plane)
        if key not in self._own_tokens:
            tokens, loads = self.plan.plane_tokens(number)[plane], self.layer.loads[number]
            home = np.round(tokens * loads.at_home / loads.tokens) if self.bypass else np.zeros(self.num_ranks)
            self._own_tokens[key] = (tokens - home).tolist()
        return self._own_tokens[key]

    def push(self, rank: int, switch: int, rows: float, num_bytes: float, number: int, landed: Action) -> None:
        """Rows of a rank into a switch; without rows, a control word."""
        if rows == 0 and num_bytes < CONTROL_BYTES:
            self.layer.signal(landed)
        else:
            self.network.push(rank, switch, num_bytes, number + 1, landed, False)

    def push_tokens(self, rank: int, plane: int, number: int, landed: Action) -> None:
        """A rank's share of a microbatch into one dispatch switch."""
        rows = self.own_tokens(number, plane)[rank]
        self.push(rank, self.dispatch_pe(plane), rows, rows * self.token_row + HEADER + WORD, number, landed)

    def deliver(
        self, switch: int, rank: int, rows: float, num_bytes: float, tail: float, number: int, kind: str, sender: int = -1
    ) -> float:
        """Rows of a switch to a rank; without rows, a control word. Returns when the last byte has left the switch."""

        def landed() -> None:
            self.layer.arrive(kind, number, rank)

        if rows == 0 and num_bytes < CONTROL_BYTES:
            self.layer.signal(landed)
            return 0.0
        tokens = kind == "tokens"
        return self.network.deliver(switch, rank, num_bytes, tail, landed, magic=number + 1, tokens=tokens, sender=sender)
