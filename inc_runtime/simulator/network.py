"""Ports, switches and uplinks of a simulated network: when the first and the last byte of a transfer arrive.

Every port direction is a first-come-first-served server. A *real* switch has a port for every rank, so a transfer occupies
the rank's side alone; an *emulated* one is a PE whose own port carries the rows of all ranks. Cut-through: a switch acts on
the first packet of a transfer (its head), and what it sends on ends no earlier than what it came from (its tail);
store-and-forward: it acts on the tail. Two levels: rows also cross the uplink between a leaf and the spine, once per leaf.
Control words do not queue behind rows, as packets of different flows interleave.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads

Action = Callable[[], None]
CONTROL_BYTES = 1024
"""Below this a put without rows is a control word."""


class Network:
    """`at(time, action)` schedules; `now()` is the clock; `loads(magic)` the routing of a microbatch."""

    def __init__(
        self,
        plan: LayerPlan,
        at: Callable[[float, Action], None],
        now: Callable[[], float],
        loads: Callable[[int], MicrobatchLoads],
    ) -> None:
        scenario = plan.scenario
        self.plan, self.at, self.now, self.loads = plan, at, now, loads
        self.num_ranks = scenario.num_ranks
        self.leaf_size, self.two_level = scenario.ranks_per_leaf, scenario.num_leaves > 1
        self.free: dict[tuple[str, int], float] = defaultdict(float)
        self.busy: dict[tuple[str, int], float] = defaultdict(float)
        self.tails: dict[tuple[int, int, int], float] = defaultdict(float)
        self.chunk_tails: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        self.leaf_inputs: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        self.leaf_outputs: dict[tuple[str, int, int], tuple[float, float]] = {}

    def _occupy(self, port: tuple[str, int], earliest: float, duration: float) -> float:
        """Book `duration` on a port. Returns the start."""
        start = max(earliest, self.free[port])
        self.free[port] = start + duration
        self.busy[port] += duration
        return start

    def port_of(self, switch: int) -> int:
        """The physical device of a switch PE: planes of both roles share it when roles are dual."""
        index = switch - self.num_ranks
        return index % self.plan.scenario.network.planes if self.plan.scenario.network.dual_role else index

    def push(self, rank: int, switch: int, num_bytes: float, magic: int, arrived: Action, relayed: bool) -> None:
        """A rank sends `num_bytes` into a switch; `arrived` runs when the switch may act on them."""
        plan = self.plan
        duration = num_bytes / plan.port
        start = self._occupy(("up", rank), self.now(), duration)
        head, tail = start + min(plan.packet_us, duration) + plan.leg_us, start + duration + plan.leg_us
        if not plan.real:
            self.at(head, lambda: self._into_emulated(rank, switch, num_bytes, magic, tail, arrived, relayed))
        elif self.two_level and not relayed:
            loads, at_leaf = self.loads(magic), head if plan.cut_through else tail
            crossing = num_bytes * loads.leaf_up[rank] / max(1, int(loads.tokens[rank]))
            self.at(at_leaf, lambda: self._up_to_spine(rank, switch, crossing, magic, tail, arrived))
        else:
            self._note(switch, rank, magic, tail, relayed)
            self.at(head if plan.cut_through or relayed else tail, arrived)

    def _note(self, switch: int, rank: int, magic: int, tail: float, relayed: bool) -> None:
        if relayed:
            self.chunk_tails[switch, rank].append(tail)
            return
        self.tails[switch, magic, rank] = tail
        self.tails[switch, magic, -1] = max(self.tails[switch, magic, -1], tail)

    def _into_emulated(
        self, rank: int, switch: int, num_bytes: float, magic: int, tail: float, arrived: Action, relayed: bool
    ) -> None:
        plan = self.plan
        duration = num_bytes / plan.switch_port
        start = self._occupy(("switch_in", self.port_of(switch)), self.now(), duration)
        tail = max(tail, start + duration)
        self._note(switch, rank, magic, tail, relayed)
        self.at(start + min(plan.packet_us, duration) if plan.cut_through and not relayed else tail, arrived)

    def _up_to_spine(self, rank: int, switch: int, num_bytes: float, magic: int, tail: float, arrived: Action) -> None:
        plan = self.plan
        duration = num_bytes / plan.uplink
        start = self._occupy(("leaf_up", rank // self.leaf_size), self.now(), duration)
        tail = max(tail, start + duration) + plan.uplink_us
        self._note(switch, rank, magic, tail, False)
        self.at(start + plan.uplink_us if plan.cut_through else tail, arrived)

    def deliver(
        self,
        switch: int,
        rank: int,
        num_bytes: float,
        input_tail: float,
        landed: Action,
        *,
        magic: int,
        tokens: bool,
        sender: int,
    ) -> float:
        """A switch sends `num_bytes` to a rank. `input_tail`: when the last byte that it is made of is in the switch.

        `tokens`: rows of a dispatch; else sums. `sender`: the rank whose chunk a relay forwards, or -1. Returns when the
        last byte has left a real switch.
        """
        plan = self.plan
        if not plan.real:
            return self._out_of_emulated(switch, rank, num_bytes, input_tail, landed)
        if not self.two_level:
            return self._down(rank, num_bytes, input_tail, landed)
        leaf = rank // self.leaf_size
        if sender >= 0:
            if sender // self.leaf_size == leaf:
                return self._down(rank, num_bytes, input_tail, landed)
            duration = num_bytes / plan.uplink
            up = self._occupy(("leaf_up", sender // self.leaf_size), self.now(), duration)
            start = self._occupy(("leaf_down", leaf), up + plan.uplink_us, duration)
            head, tail = start + plan.uplink_us, max(start + duration, input_tail + plan.uplink_us) + plan.uplink_us
        else:
            head, tail = self._down_to_leaf(leaf, magic, tokens, input_tail)

        def down() -> None:
            self._down(rank, num_bytes, tail, landed)

        self.at(head, down)
        return tail

    def _down_to_leaf(self, leaf: int, magic: int, tokens: bool, input_tail: float) -> tuple[float, float]:
        """Spine to leaf, once for all ranks of the leaf: head and tail at the leaf."""
        key = ("tokens" if tokens else "sums", leaf, magic)
        if key not in self.leaf_outputs:
            plan, loads = self.plan, self.loads(magic)
            if tokens:
                num_bytes = int(loads.leaf_down[leaf]) * (plan.dispatch_row_bytes + plan.record_bytes)
            else:
                num_bytes = int(loads.leaf_up[leaf * self.leaf_size : (leaf + 1) * self.leaf_size].sum()) * plan.combine_row_bytes
            duration = num_bytes / plan.uplink
            start = self._occupy(("leaf_down", leaf), self.now(), duration)
            tail = max(start + duration, input_tail) + plan.uplink_us
            self.leaf_outputs[key] = (start + plan.uplink_us if plan.cut_through else tail), tail
        return self.leaf_outputs[key]

    def _down(self, rank: int, num_bytes: float, input_tail: float, landed: Action) -> float:
        plan = self.plan
        duration = num_bytes / plan.port
        start = self._occupy(("down", rank), self.now(), duration)
        left = max(start + duration, input_tail + min(plan.packet_us, duration))
        self.at(left + plan.leg_us, landed)
        return left

    def _out_of_emulated(self, switch: int, rank: int, num_bytes: float, input_tail: float, landed: Action) -> float:
        plan = self.plan
        duration = num_bytes / plan.switch_port
        start = self._occupy(("switch_out", self.port_of(switch)), self.now(), duration)
        left = max(start + duration, input_tail)

        def reach_rank() -> None:
            ingress = num_bytes / plan.port
            begin = self._occupy(("down", rank), self.now(), ingress)
            self.at(max(begin + ingress, left + plan.leg_us), landed)

        self.at(start + plan.leg_us, reach_rank)
        return left

    def between_emulated(self, switch: int, peer: int, num_bytes: float, landed: Action) -> None:
        """The plan, from the PE that emulates the dispatch to that of the combine; on one device it stays there."""
        plan = self.plan
        if self.port_of(switch) == self.port_of(peer):
            self.at(self.now(), landed)
            return
        duration = num_bytes / plan.switch_port
        start = self._occupy(("switch_out", self.port_of(switch)), self.now(), duration)

        def reach_peer() -> None:
            begin = self._occupy(("switch_in", self.port_of(peer)), self.now(), duration)
            self.at(begin + duration, landed)

        self.at(start + plan.leg_us, reach_peer)

    def pull(self, switch: int, rank: int, num_bytes: float, magic: int, arriving: Callable[[float, float], None]) -> None:
        """A switch reads `num_bytes` of a rank. `arriving(head, tail)` is called once both times are known."""
        plan = self.plan

        def read() -> None:
            duration = num_bytes / plan.port
            start = self._occupy(("up", rank), self.now(), duration)
            head, tail = start + min(plan.packet_us, duration) + plan.leg_us, start + duration + plan.leg_us
            if not plan.real:
                self.at(head, lambda: self._pulled_into_emulated(switch, num_bytes, tail, arriving))
            elif self.two_level:
                self._reduce_in_leaf(rank // self.leaf_size, magic, head, tail, arriving)
            else:
                arriving(head, tail)

        self.at(self.now() + plan.leg_us + (plan.uplink_us if self.two_level else 0.0), read)

    def _pulled_into_emulated(self, switch: int, num_bytes: float, tail: float, arriving: Callable[[float, float], None]) -> None:
        duration = num_bytes / self.plan.switch_port
        start = self._occupy(("switch_in", self.port_of(switch)), self.now(), duration)
        arriving(start, max(tail, start + duration))

    def _reduce_in_leaf(
        self, leaf: int, magic: int, head: float, tail: float, arriving: Callable[[float, float], None]
    ) -> None:
        """A leaf adds what its ranks send; the sums cross to the spine once, when the last rank of the leaf has begun."""
        plan, loads = self.plan, self.loads(magic)
        own = slice(leaf * self.leaf_size, (leaf + 1) * self.leaf_size)
        inputs = self.leaf_inputs[leaf, magic]
        inputs.append((head, tail))
        if len(inputs) < int((loads.received[own] > 0).sum()):
            arriving(0.0, 0.0)
            return
        heads, tails = zip(*inputs, strict=True)
        duration = int(loads.leaf_down[leaf]) * plan.combine_row_bytes / plan.uplink
        start = self._occupy(("leaf_up", leaf), max(heads) if plan.cut_through else max(tails), duration)
        end = max(start + duration, max(tails)) + plan.uplink_us
        arriving(start + plan.uplink_us if plan.cut_through else end, end)
