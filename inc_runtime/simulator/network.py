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
from dataclasses import dataclass

from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads

Action = Callable[[], None]
CONTROL_BYTES = 1024
"""Below this a put without rows is a control word."""


@dataclass(frozen=True)
class Phase:
    """A phase of a combine: the owners that it serves together, and how many were served before them."""

    served: int
    owners: list[int]


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
        self.num_ranks, self.in_network, self.phased = scenario.num_ranks, scenario.model.in_network, scenario.model.phased
        self.leaf_size, self.two_level = scenario.ranks_per_leaf, scenario.num_leaves > 1
        self.free: dict[tuple[str, int], float] = defaultdict(float)
        self.busy: dict[tuple[str, int], float] = defaultdict(float)
        self.tails: dict[tuple[int, int, int], float] = defaultdict(float)
        self.chunk_tails: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        self.leaf_inputs: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
        self.leaf_outputs: dict[tuple[str | int, ...], tuple[float, float]] = {}

    def occupy(self, port: tuple[str, int], earliest: float, duration: float) -> float:
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
        start = self.occupy(("up", rank), self.now(), duration)
        head, tail = start + min(plan.packet_us, duration) + plan.row_leg_us, start + duration + plan.row_leg_us
        if not plan.real:
            self.at(head, lambda: self._into_emulated(rank, switch, num_bytes, magic, tail, arrived, relayed))
        elif self.two_level and not relayed:
            at_leaf = head if plan.cut_through else tail
            loads = self.loads(magic)
            pushed = int(loads.tokens[rank]) - (int(loads.at_home[rank]) if plan.scenario.network.local_bypass else 0)
            crossing = num_bytes * int(loads.leaf_up[rank]) / max(1, pushed)
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
        start = self.occupy(("switch_in", self.port_of(switch)), self.now(), duration)
        tail = max(tail, start + duration)
        self._note(switch, rank, magic, tail, relayed)
        self.at(start + min(plan.packet_us, duration) if plan.cut_through and not relayed else tail, arrived)

    def _up_to_spine(self, rank: int, switch: int, num_bytes: float, magic: int, tail: float, arrived: Action) -> None:
        plan = self.plan
        duration = num_bytes / plan.uplink
        start = self.occupy(("leaf_up", rank // self.leaf_size), self.now(), duration)
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

        `tokens`: rows of a dispatch; else sums. `sender`: the rank whose chunk a relay forwards, or whose rows a phased
        dispatch does, or -1. Returns when the last byte has left a real switch.
        """
        plan = self.plan
        if not plan.real:
            return self._out_of_emulated(switch, rank, num_bytes, input_tail, landed)
        if not self.two_level:
            return self._down(rank, num_bytes, input_tail, landed)
        leaf = rank // self.leaf_size
        if sender >= 0 and not self.in_network:
            if sender // self.leaf_size == leaf:
                return self._down(rank, num_bytes, input_tail, landed)
            return self._between_leaves(sender // self.leaf_size, rank, num_bytes, input_tail, landed)
        part = (sender if tokens else rank) if self.phased else -1
        head, tail = self._down_to_leaf(leaf, magic, tokens, input_tail, part)
        self._down_at(head, rank, num_bytes, tail, landed)
        return tail

    def _between_leaves(self, source: int, rank: int, num_bytes: float, input_tail: float, landed: Action) -> float:
        """A relayed chunk over both uplinks, to a rank of another leaf."""
        plan, leaf, duration = self.plan, rank // self.leaf_size, num_bytes / self.plan.uplink
        up = self.occupy(("leaf_up", source), self.now(), duration)
        left = max(up + duration, input_tail)

        def reach_leaf() -> None:
            start = self.occupy(("leaf_down", leaf), self.now(), duration)
            tail = max(start + duration, left + plan.uplink_us) + plan.uplink_us
            self._down_at(start + plan.uplink_us, rank, num_bytes, tail, landed)

        self.at(up + plan.uplink_us, reach_leaf)
        return left

    def _down_to_leaf(self, leaf: int, magic: int, tokens: bool, input_tail: float, part: int) -> tuple[float, float]:
        """Spine to leaf, once for all ranks of the leaf: head and tail at the leaf.

        `part`: with phases, the sender of the tokens, or the owner of the sums; else -1, for all of them at once.
        """
        key = ("tokens" if tokens else "sums", leaf, magic, part)
        if key not in self.leaf_outputs:
            plan, loads = self.plan, self.loads(magic)
            if tokens:
                rows = int(loads.leaf_down[leaf] if part < 0 else loads.leaf_rows[part, leaf])
                num_bytes = rows * (plan.dispatch_row_bytes + plan.record_bytes)
            else:
                owners = slice(leaf * self.leaf_size, (leaf + 1) * self.leaf_size) if part < 0 else slice(part, part + 1)
                num_bytes = int(loads.leaf_up[owners].sum()) * plan.combine_row_bytes
            duration = num_bytes / plan.uplink
            start = self.occupy(("leaf_down", leaf), self.now(), duration)
            tail = max(start + duration, input_tail) + plan.uplink_us
            self.leaf_outputs[key] = (start + plan.uplink_us if plan.cut_through else tail), tail
        return self.leaf_outputs[key]

    def _down_at(self, time_us: float, rank: int, num_bytes: float, input_tail: float, landed: Action) -> None:
        def down() -> None:
            self._down(rank, num_bytes, input_tail, landed)

        self.at(time_us, down)

    def _down(self, rank: int, num_bytes: float, input_tail: float, landed: Action) -> float:
        plan = self.plan
        duration = num_bytes / plan.port
        start = self.occupy(("down", rank), self.now(), duration)
        left = max(start + duration, input_tail + min(plan.packet_us, duration))
        self.at(left + plan.row_leg_us, landed)
        return left

    def _out_of_emulated(self, switch: int, rank: int, num_bytes: float, input_tail: float, landed: Action) -> float:
        plan = self.plan
        duration = num_bytes / plan.switch_port
        start = self.occupy(("switch_out", self.port_of(switch)), self.now(), duration)
        left = max(start + duration, input_tail)

        def reach_rank() -> None:
            ingress = num_bytes / plan.port
            begin = self.occupy(("down", rank), self.now(), ingress)
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
        start = self.occupy(("switch_out", self.port_of(switch)), self.now(), duration)

        def reach_peer() -> None:
            begin = self.occupy(("switch_in", self.port_of(peer)), self.now(), duration)
            self.at(begin + duration, landed)

        self.at(start + plan.leg_us, reach_peer)

    def pull(
        self,
        switch: int,
        rank: int,
        num_bytes: float,
        magic: int,
        arriving: Callable[[float, float], None],
        phase: Phase | None = None,
    ) -> None:
        """A switch reads `num_bytes` of a rank. `arriving(head, tail)` is called once both times are known.

        `phase`: what is pulled together, which two levels need to know where there are phases.
        """
        plan = self.plan

        def read() -> None:
            duration = num_bytes / plan.port
            start = self.occupy(("up", rank), self.now(), duration)
            head, tail = start + min(plan.packet_us, duration) + plan.row_leg_us, start + duration + plan.row_leg_us
            if not plan.real:
                self.at(head, lambda: self._pulled_into_emulated(switch, num_bytes, tail, arriving))
            elif self.two_level:
                self._reduce_in_leaf(rank // self.leaf_size, magic, head, tail, arriving, phase)
            else:
                arriving(head, tail)

        self.at(self.now() + plan.leg_us + (plan.uplink_us if self.two_level else 0.0), read)

    def _pulled_into_emulated(self, switch: int, num_bytes: float, tail: float, arriving: Callable[[float, float], None]) -> None:
        duration = num_bytes / self.plan.switch_port
        start = self.occupy(("switch_in", self.port_of(switch)), self.now(), duration)
        arriving(start, max(tail, start + duration))

    def _reduce_in_leaf(
        self,
        leaf: int,
        magic: int,
        head: float,
        tail: float,
        arriving: Callable[[float, float], None],
        phase: Phase | None,
    ) -> None:
        """A leaf adds what its ranks send; the sums cross to the spine once, when the last rank of the leaf has begun."""
        plan, loads = self.plan, self.loads(magic)
        own = slice(leaf * self.leaf_size, (leaf + 1) * self.leaf_size)
        inputs = self.leaf_inputs[leaf, magic, phase.served if phase else -1]
        inputs.append((head, tail))
        pulled = loads.received if phase is None else loads.rows[phase.owners].sum(axis=0)
        if len(inputs) < int((pulled[own] > 0).sum()):
            arriving(0.0, 0.0)
            return
        heads, tails = zip(*self.leaf_inputs.pop((leaf, magic, phase.served if phase else -1)), strict=True)
        crossing = loads.leaf_down[leaf] if phase is None else loads.leaf_rows[phase.owners, leaf].sum()
        duration = int(crossing) * plan.combine_row_bytes / plan.uplink
        start = self.occupy(("leaf_up", leaf), max(heads) if plan.cut_through else max(tails), duration)
        end = max(start + duration, max(tails)) + plan.uplink_us
        arriving(start + plan.uplink_us if plan.cut_through else end, end)
