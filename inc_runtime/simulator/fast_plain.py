"""The plain forms of the fast mode on real switches of one level: message by message among few ranks, as flows among many."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from inc_runtime.simulator.exchanges import Exchanges
from inc_runtime.simulator.fast_transfers import Action, Switches, TransferLayer

PARTS_OF_A_RANK = 16
"""Into how many parts all messages of a rank are cut, so that ports serve several senders in turn; at least one a message."""


class Messages(Switches):
    """Without phases. Messages leave a rank's port one after another; the port of the destination serves them as they come."""

    def __init__(self, layer: TransferLayer) -> None:
        super().__init__(layer)
        self.parts = max(1, PARTS_OF_A_RANK // self.num_ranks)
        self.rows = [one.plane_rows.tolist() for one in layer.loads]
        self.missing: dict[tuple[str, int, int], int] = defaultdict(lambda: self.num_ranks * self.planes * self.parts)

    def words_of(self, kind: str, number: int) -> list[int]:
        return [1] * self.num_ranks

    def send(self, rank: int, number: int) -> None:
        self._send_all(rank, number, "tokens", self.token_row)
        self.layer.sent(rank)

    def publish(self, rank: int, number: int) -> None:
        self._send_all(rank, number, "sums", self.plan.combine_row_bytes)
        self.layer.published(rank)

    def _send_all(self, rank: int, number: int, kind: str, row_bytes: int) -> None:
        """Messages to all ranks, the next one first, plane after plane."""
        network, plan, now = self.network, self.plan, self.layer.now
        for rows in self.rows[number]:
            for step in range(self.num_ranks):
                target = (rank + 1 + step) % self.num_ranks
                count = rows[rank][target] if kind == "tokens" else rows[target][rank]
                kept = self.bypass and target == rank
                duration = 0.0 if kept else count * row_bytes / (plan.port * self.parts)
                packet = min(plan.packet_us, duration)
                for _ in range(self.parts):
                    start = network.occupy(("up", rank), now, duration)
                    tail = start + duration + packet + plan.leg_us
                    come = partial(self._come, kind, number, target, duration, tail)
                    self.layer.at(start + packet + plan.leg_us, come)

    def _come(self, kind: str, number: int, target: int, duration: float, tail: float) -> None:
        """A part comes to the port in; the rank has all once the last has left it, no earlier than `tail`, and crossed a leg."""
        begin = self.network.occupy(("down", target), self.layer.now, duration)
        left = max(begin + duration, tail)
        key = (kind, number, target)
        self.missing[key] -= 1
        if not self.missing[key]:
            self.layer.at(left + self.plan.leg_us, lambda: self.layer.arrive(kind, number, target))


class FlowSwitches(Switches):
    """Many ranks: all messages of an exchange at once, as in the aggregated event mode."""

    def __init__(self, layer: TransferLayer) -> None:
        super().__init__(layer)
        self.phased = self.plan.scenario.model.phased
        self.exchanges = Exchanges(self.plan, self.network, lambda kind, magic, rank: layer.arrive(kind, magic - 1, rank))

    def words_of(self, kind: str, number: int) -> list[int]:
        return [1] * self.num_ranks

    def send(self, rank: int, number: int) -> None:
        def push() -> None:
            left = self.exchanges.send_all(rank, "tokens", number + 1)
            if self.phased:
                self.exchanges.give_back_at(left + self.plan.leg_us)
            self.layer.sent(rank)

        if self.phased:
            self.exchanges.ask(push)
        else:
            push()

    def received(self, rank: int, number: int, then: Action) -> None:
        if self.phased and self.plan.scenario.pipeline.barrier_after_dispatch:
            self.exchanges.join_barrier(number + 1, then)
        else:
            then()

    def publish(self, rank: int, number: int) -> None:
        if self.phased:
            self.exchanges.publish_in_phases(rank, number + 1, lambda: self.layer.published(rank))
        else:
            self.exchanges.send_all(rank, "sums", number + 1)
            self.layer.published(rank)
