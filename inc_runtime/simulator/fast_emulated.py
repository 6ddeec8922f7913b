"""The PEs that emulate the INC switches, in fast mode: one port each way per plane, shared by all ranks' rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from inc_runtime.simulator.closed_forms import HEADER

if TYPE_CHECKING:
    from inc_runtime.simulator.fast_network import FastNetwork


@dataclass
class _PlanePulls:
    """One combine PE at one microbatch: words that wait for their turn, ranks not served yet, its own clock."""

    number: int
    plane: int
    now: float
    left: int
    words: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    pulling: bool = False
    tail: float = 0.0


class EmulatedPorts:
    """Ports of the switch PEs; the planes of both roles may share a device. `into`, `out`: free times of its directions."""

    def __init__(self, network: FastNetwork) -> None:
        self.network, self.plan = network, network.plan
        self.planes = network.plan.scenario.network.planes
        shared = network.plan.scenario.network.dual_role
        self.num_ports = self.planes * (1 if shared else 2)
        self.combine_port = 0 if shared else self.planes
        self.into, self.out = np.zeros(self.num_ports), np.zeros(self.num_ports)
        self.planned: dict[int, list[float]] = defaultdict(list)
        self.tokens: dict[int, list[int]] = defaultdict(lambda: [0] * network.num_ranks)
        self.token_times: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros(network.num_ranks))
        self.pulls: dict[int, list[_PlanePulls]] = {}
        self.pushed: dict[tuple[int, int], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        self.landed = np.zeros(self.planes)
        network.busy |= {"switch port in": np.zeros(self.num_ports), "switch port out": np.zeros(self.num_ports)}

    def _take_in(self, port: int, ready: float, work: float) -> float:
        begin = max(ready, float(self.into[port]))
        self.into[port] = begin + work
        self.network.busy["switch port in"][port] += work
        return begin

    def push(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        plan, net = self.plan, self.network
        for plane in range(self.planes):
            num_bytes = net.token_bytes(number)[0][ranks] / self.planes
            work = num_bytes / plan.port
            start = net.occupy_up(ranks, ready, work)
            head, tail = start + np.minimum(plan.packet_us, work) + plan.leg_us, start + work + plan.leg_us
            inward = num_bytes / plan.switch_port
            for h, t, w in zip(head.tolist(), tail.tolist(), inward.tolist(), strict=True):
                net.layer.at(h, partial(self._collect, number, plane, h, t, w))

    def _collect(self, number: int, plane: int, head: float, tail: float, inward: float) -> None:
        plan = self.plan
        begin = self._take_in(plane, head, inward)
        heads, tails = self.pushed[number, plane]
        heads.append(begin + min(plan.packet_us, inward))
        tails.append(max(tail, begin + inward))
        if len(heads) == self.network.num_ranks:
            when = max(heads if plan.cut_through else tails)
            self.network.layer.at(when, lambda: self._multicast(number, plane, when, max(tails)))

    def _send_out(self, kind: str, number: int, port: int, when: float, num_bytes: np.ndarray, input_tail: float) -> None:
        """One packet per rank through a port out, in rank order."""
        net, outward = self.network, num_bytes / self.plan.switch_port
        ends = max(when, float(self.out[port])) + np.cumsum(outward)
        self.out[port] = float(ends[-1])
        net.busy["switch port out"][port] += outward.sum()
        if kind == "sums":
            # Until then the quiet of the next pull waits.
            plane = port - self.combine_port
            last = float(ends[-1] + self.plan.leg_us + num_bytes[-1] / self.plan.port)
            self.landed[plane] = max(float(self.landed[plane]), last)

        def reach(ranks: np.ndarray, when: np.ndarray) -> None:
            inward = num_bytes[ranks] / self.plan.port
            begin = net.occupy_down(ranks, when, inward)
            left = np.maximum(ends[ranks], input_tail)
            self._reached(kind, number, port, ranks, np.maximum(begin + inward, left + self.plan.leg_us))

        net.layer.spread(net.layer.everyone, ends - outward + self.plan.leg_us, reach)

    def _reached(self, kind: str, number: int, port: int, ranks: np.ndarray, landed: np.ndarray) -> None:
        """Rows have landed; a rank goes on once those of every plane have."""
        times, counts = self.token_times[kind, number], self.tokens[number if kind == "tokens" else -1 - number]
        times[ranks] = np.maximum(times[ranks], landed)
        if kind == "sums":
            plane = port - self.combine_port
            self.landed[plane] = max(float(self.landed[plane]), float(landed.max()))
        complete = []
        for rank in ranks:
            counts[rank] += 1
            if counts[rank] == self.planes:
                complete.append(rank)
        if complete:
            done = np.array(complete)
            self.network.layer.arrive(kind, number, done, times[done])

    def _multicast(self, number: int, plane: int, when: float, input_tail: float) -> None:
        plan, net, loads = self.plan, self.network, self.network.layer.loads[number]
        self._send_out("tokens", number, plane, when, net.token_bytes(number)[1] / self.planes, input_tail)
        num_bytes = (loads.tokens.sum() / self.planes * plan.record_bytes + net.num_ranks * HEADER) / plan.switch_port
        for combine_plane in range(self.planes):
            target = self.combine_port + combine_plane
            if target == plane:
                self._plan_known(number, when)
                continue
            start = max(when, float(self.out[plane]))
            self.out[plane] = start + num_bytes
            net.busy["switch port out"][plane] += num_bytes
            reached = start + plan.leg_us
            net.layer.at(reached, lambda t=target, r=reached: self._plan_comes(number, t, r, num_bytes))  # type: ignore[misc]

    def _plan_comes(self, number: int, port: int, when: float, work: float) -> None:
        self._plan_known(number, self._take_in(port, when, work) + work)

    def _plan_known(self, number: int, when: float) -> None:
        self.planned[number].append(when)
        if len(self.planned[number]) == self.planes**2:
            known = max(self.planned[number])
            self.network.layer.at(known, self.network.next_pull)

    def ready_to_pull(self, number: int) -> bool:
        """True once every combine PE has the plan of the microbatch; then it begins."""
        if len(self.planned[number]) < self.planes**2:
            return False
        if number not in self.pulls:
            begin = max(max(self.planned[number]), self.network.combine_free)
            self.pulls[number] = [_PlanePulls(number, p, begin, self.network.num_ranks) for p in range(self.planes)]
        return True

    def words_came(self, number: int, ranks: np.ndarray, words: np.ndarray) -> None:
        """Words of ranks that are ready, in order of time; every plane sees the same."""
        for i in np.argsort(words, kind="stable"):
            when, rank = float(words[i]), int(ranks[i])
            for pulls in self.pulls[number]:
                self.network.layer.at(when, lambda p=pulls, w=when, r=rank: self._word(p, w, r))  # type: ignore[misc]

    def _word(self, pulls: _PlanePulls, when: float, rank: int) -> None:
        pulls.words.append(rank)
        if not pulls.pulling:
            self._request(pulls, max(pulls.now, when))

    def _request(self, pulls: _PlanePulls, now: float) -> None:
        """Pull from the next rank whose word is there; return the sums after the last."""
        net, received = self.network, self.network.pulled_bytes(pulls.number) / self.planes
        pulls.now, pulls.pulling = now, False
        while pulls.words or pulls.batch:
            if not pulls.batch:
                # The program takes the words that are there in order of rank, then looks again.
                pulls.batch, pulls.words = sorted(pulls.words), []
            rank = pulls.batch.pop(0)
            pulls.left -= 1
            if received[rank]:
                pulls.pulling = True
                begin = now + self.plan.leg_us
                net.layer.at(begin, partial(self._read, pulls, rank, float(received[rank]), begin))
                return
        if pulls.left == 0:
            net.layer.at(now, lambda: self._return_sums(pulls, now))

    def _read(self, pulls: _PlanePulls, rank: int, num_bytes: float, begin: float) -> None:
        plan, net = self.plan, self.network
        work = num_bytes / plan.port
        start = max(begin, float(net.up[rank]))
        net.up[rank] = start + work
        net.busy["rank port out"][rank] += work
        head = start + min(plan.packet_us, work) + plan.leg_us
        net.layer.at(head, lambda: self._add(pulls, num_bytes, head, start + work + plan.leg_us))

    def _add(self, pulls: _PlanePulls, num_bytes: float, head: float, tail: float) -> None:
        plan, port = self.plan, self.combine_port + pulls.plane
        inward = num_bytes / plan.switch_port
        begin = self._take_in(port, head, inward)
        tail = max(tail, begin + inward)
        pulls.tail = max(pulls.tail, tail)
        seen = max(begin if plan.cut_through else tail, float(self.landed[pulls.plane]))
        done = seen + float(plan.switch_costs.accumulate(num_bytes / plan.combine_row_bytes))
        self.network.layer.at(done, lambda: self._request(pulls, done))

    def _return_sums(self, pulls: _PlanePulls, now: float) -> None:
        net, number = self.network, pulls.number
        begin = max(now, float(self.landed[pulls.plane]))
        port = self.combine_port + pulls.plane
        self._send_out("sums", number, port, begin, net.returned_bytes(number) / self.planes, pulls.tail)
        net.combine_free = max(net.combine_free, begin)
        pulls.left = -1
        if all(p.left == -1 for p in self.pulls[number]):
            net.summed = number
            net.next_pull()
