"""The plain forms of the fast mode on real switches of one level: message by message among few ranks, as flows among many."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from math import ceil

from inc_runtime.simulator.closed_forms import CHUNK, HEADER, WORD
from inc_runtime.simulator.exchanges import Exchanges
from inc_runtime.simulator.fast_transfers import Action, Switches, TransferLayer

PARTS_OF_A_LAYER, MOST_PARTS = 12_000, 4
"""Up to so many chunks of a layer, and of a message, are followed one by one; where there are more, a part is several chunks."""


class Messages(Switches):
    """Without phases. The chunks of its messages leave a rank's port one after another; that of the destination serves them
    as they come.

    `coming[d]`: what reaches the port of a rank, (time, number, duration, earliest end) each, not served yet;
    `last[kind, number]`: what comes last of an exchange to each port. A port is served when the last of an exchange has come:
    whatever comes before that has been sent, as a message is on its way for longer than no time.
    """

    def __init__(self, layer: TransferLayer) -> None:
        super().__init__(layer)
        self.rows = [one.plane_rows.tolist() for one in layer.loads]
        messages = 2 * len(layer.loads) * self.planes * self.num_ranks**2
        self.most_parts = min(MOST_PARTS, max(1, PARTS_OF_A_LAYER // messages))
        self.chunk_rows = self.plan.scenario.layout.dims.rows_per_chunk
        self.coming: list[list[tuple[float, int, float, float]]] = [[] for _ in range(self.num_ranks)]
        self.last: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(lambda: [(0.0, 0)] * self.num_ranks)
        self.senders: dict[tuple[str, int], int] = defaultdict(int)
        self.sequence = 0

    def words_of(self, kind: str, number: int) -> list[int]:
        return [1] * self.num_ranks

    def send(self, rank: int, number: int) -> None:
        self._send_all(rank, number, "tokens", self.token_row)
        self.layer.sent(rank)

    def publish(self, rank: int, number: int) -> None:
        self._send_all(rank, number, "sums", self.plan.combine_row_bytes)
        self.layer.published(rank)

    def _send_all(self, rank: int, number: int, kind: str, row_bytes: int) -> None:
        """Messages to all ranks, the next one first, plane after plane; a part of a message carries what a chunk does."""
        network, plan, coming, last = self.network, self.plan, self.coming, self.last[kind, number]
        up, sequence, tokens, port = ("up", rank), self.sequence, kind == "tokens", plan.port
        packet_us, leg_us, row_us = plan.packet_us, plan.row_leg_us, row_bytes / port
        into_us, out_us, first_us = (CHUNK + HEADER * tokens + WORD) / port, WORD / port, HEADER * tokens / port
        begin = start = max(self.layer.now, network.free[up])
        for rows in self.rows[number]:
            own = rows[rank]
            for target in [*range(rank + 1, self.num_ranks), *range(rank + 1)]:
                left = count = own[target] if tokens else rows[target][rank]
                part = max(self.chunk_rows, ceil(count / self.most_parts))
                stays, more_us = self.bypass and target == rank, first_us if count else 0.0
                while True:
                    payload_us = 0.0 if stays else (part if part < left else left) * row_us
                    into, out = payload_us + into_us, payload_us + out_us + more_us
                    here = start + leg_us + (packet_us if packet_us < into else into)
                    start += into
                    sequence += 1
                    coming[target].append((here, sequence, out, start + leg_us + (packet_us if packet_us < out else out)))
                    left, more_us = left - part, 0.0
                    if left <= 0:
                        break
                if coming[target][-1][:2] > last[target]:
                    last[target] = coming[target][-1][:2]
        network.free[up] = start
        network.busy[up] += start - begin
        self.sequence = sequence
        self.senders[kind, number] += 1
        if self.senders[kind, number] == self.num_ranks:
            for target, (time_us, _) in enumerate(last):
                self.layer.at(max(time_us, self.layer.now), partial(self._serve, kind, number, target))

    def _serve(self, kind: str, number: int, target: int) -> None:
        """Serve what came to a port up to the last message of an exchange; the rank has all one leg later."""
        down, network, until = ("down", target), self.network, self.last[kind, number][target]
        coming = self.coming[target]
        coming.sort()
        free, busy, served, ended = network.free[down], 0.0, 0, 0.0
        for time_us, sequence, duration, earliest in coming:
            if (time_us, sequence) > until:
                break
            free = (time_us if time_us > free else free) + duration
            ended = free if free > earliest else earliest
            busy += duration
            served += 1
        del coming[:served]
        network.free[down] = free
        network.busy[down] += busy
        arrived = partial(self.layer.arrive, kind, number, target)
        self.layer.at(max(ended + self.plan.row_leg_us, self.layer.now), arrived)


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
