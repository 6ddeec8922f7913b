"""The simulated backend: all PEs in one process, each role program a greenlet, on one virtual clock.

A seeded generator stretches every delivery and every verb, so that each seed is another schedule of the same
programs. The simulator reads the source of a nonblocking put when it lands, and lets bytes land some time before
their flag: a missing `quiet`, or a slot that is reused too early, shows as wrong rows. When no event is left while
programs still wait, it reports the deadlock: role, tag, flag, expected and seen magic of each.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import greenlet
import numpy as np

from inc_runtime.backends.base import BasePe
from inc_runtime.backends.link_model import LinkModel
from inc_runtime.config import SumOrder
from inc_runtime.errors import ArrivalTimeout, Deadlock, ProtocolViolation
from inc_runtime.heap_layout import STARTS_AT_ZERO, HeapLayout
from inc_runtime.one_sided import Awaited, Flag, Piece, Segment
from inc_runtime.op_trace import Event
from inc_runtime.protocol import Tag, World, magic_of, signal_word

StageCost = Callable[[str, int], float]
POISON = 0xFF


@dataclass
class _Waiter:
    pe: SimulatedPe
    awaited: Sequence[Awaited]
    tag: Tag
    microbatch: int
    idle: bool
    thread: greenlet.greenlet
    since_us: float


class Simulation:
    """A world of simulated PEs. `spawn` their programs, then `run`; use once.

    `jitter_us`: largest extra delay, drawn for each delivery and verb. `stage_cost(stage, rows)`: us of local work.
    `wait_limit_us`: virtual limit of a wait that is not idle; None leaves it to the deadlock report.
    """

    def __init__(
        self,
        world: World,
        layout: HeapLayout,
        *,
        seed: int = 0,
        jitter_us: float = 0.0,
        link: LinkModel | None = None,
        stage_cost: StageCost | None = None,
        wait_limit_us: float | None = None,
        traced: bool = True,
        sum_order: SumOrder = SumOrder.ARRIVAL,
    ) -> None:
        self.world, self.layout = world, layout
        self.link = link or LinkModel()
        self.stage_cost = stage_cost or (lambda stage, rows: 0.0)
        self.wait_limit_us = wait_limit_us
        self.jitter_us = jitter_us
        self.now = 0.0
        self.random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._waiters: dict[int, _Waiter] = {}
        self._flag_writers: dict[tuple[int, str, tuple[int, ...]], int] = {}
        self._hub = greenlet.getcurrent()
        self._threads: list[tuple[greenlet.greenlet, SimulatedPe]] = []
        self.sum_order = sum_order
        self.pes = [self.make_pe(pe, traced) for pe in range(world.num_pes)]

    def make_pe(self, pe: int, traced: bool) -> SimulatedPe:
        """The PEs of this simulation; the discrete-event mode of `inc_runtime/simulator` makes others."""
        return SimulatedPe(self, pe, traced)

    def spawn(self, pe: int, program: Callable[[SimulatedPe], None]) -> None:
        thread = greenlet.greenlet(lambda: program(self.pes[pe]))
        self._threads.append((thread, self.pes[pe]))
        self.at(self.now + self.jitter(), thread.switch)

    def spawn_world(
        self, rank_program: Callable[[SimulatedPe], None], switch_program: Callable[[SimulatedPe], None]
    ) -> None:
        """Spawn every PE of the world; a rank that ends tells every switch to stop."""

        def rank(pe: SimulatedPe) -> None:
            rank_program(pe)
            pe.close()

        for pe in range(self.world.num_pes):
            self.spawn(pe, rank if pe < self.world.num_ranks else switch_program)

    def run(self) -> float:
        """Run all programs to their end. Returns the virtual time in us. Raises what a program raised, or Deadlock."""
        self._hub = greenlet.getcurrent()
        for thread, _ in self._threads:
            thread.parent = self._hub
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        unfinished = [pe for thread, pe in self._threads if not thread.dead]
        if unfinished:
            raise Deadlock(self._deadlock_report(unfinished))
        return self.now

    def events(self) -> list[Event]:
        return sorted((e for pe in self.pes for e in pe.trace.events), key=lambda e: (e.start_us, e.pe))

    def at(self, time_us: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_us, self._sequence, action))

    def jitter(self) -> float:
        return self.random.random() ** 4 * self.jitter_us if self.jitter_us else 0.0

    def sleep(self, duration_us: float) -> None:
        thread = greenlet.getcurrent()
        self.at(self.now + duration_us, thread.switch)
        self._hub.switch()

    def claim_flag(self, writer: int, peer: int, flag: Flag) -> None:
        owner = self._flag_writers.setdefault((peer, flag.region, flag.index), writer)
        if owner != writer and flag.region != "abort":
            name = self.world.name_of
            raise ProtocolViolation(
                f"{name(writer)} raised {flag.region}{list(flag.index)} of {name(peer)}, which {name(owner)} writes."
            )

    def park(self, waiter: _Waiter) -> None:
        self._waiters[waiter.pe.pe] = waiter
        self._hub.switch()

    def flag_changed(self, peer: int) -> None:
        """Wake the waiter of `peer` if what it waits for has come."""
        waiter = self._waiters.get(peer)
        if waiter and (waiter.pe.arrived(waiter.awaited) or waiter.pe.word(Flag("abort", (0,)))):
            del self._waiters[peer]
            self.at(self.now + self.jitter(), waiter.thread.switch)

    def expire(self, waiter: _Waiter) -> None:
        if self._waiters.get(waiter.pe.pe) is waiter:
            del self._waiters[waiter.pe.pe]
            waiter.thread.switch()

    def _deadlock_report(self, unfinished: list[SimulatedPe]) -> str:
        lines = ["no event is left, but these still wait:"]
        for pe in unfinished:
            waiter = self._waiters.get(pe.pe)
            if waiter is None:
                lines.append(f"  {pe.name}: not in a wait")
                continue
            for a in waiter.awaited:
                seen = magic_of(pe.word(a.flag))
                if seen < a.magic:
                    lines.append(
                        f"  {pe.name} at {waiter.tag.name}: {a.flag.region}{list(a.flag.index)} from {a.sender}, "
                        f"expected magic {a.magic}, seen {seen}"
                    )
        return "\n".join(lines)


class SimulatedPe(BasePe):
    """One simulated PE: the verbs over the event queue of its `Simulation`."""

    def __init__(self, simulation: Simulation, pe: int, traced: bool) -> None:
        self.simulation = simulation
        world, layout = simulation.world, simulation.layout
        slab = np.full(layout.heap_bytes, POISON, np.uint8)
        memory = layout.carve(world.role_of(pe), slab)
        for name, region in layout.regions(world.role_of(pe)).items():
            if not region.private and (region.kind.value == "flags" or name in STARTS_AT_ZERO):
                memory[name][...] = 0
        super().__init__(pe, world, layout, memory, traced=traced, sum_order=simulation.sum_order)
        self._outstanding = 0
        self._quiet_thread: greenlet.greenlet | None = None
        self._barriers = 0

    def now_us(self) -> float:
        return self.simulation.now

    def arrived(self, awaited: Sequence[Awaited]) -> list[int]:
        return [i for i, a in enumerate(awaited) if self.word(a.flag) >= a.threshold]

    def _spend(self, stage: str, rows: int) -> None:
        self.simulation.sleep(self.simulation.stage_cost(stage, rows) + self.simulation.jitter())

    def _abort_seen(self) -> None:
        self._check_abort([pe.memory for pe in self.simulation.pes])

    def put_signal(
        self, peer: int, segments: Sequence[Segment], flag: Flag, word: int, *, magic: int, part: int = 0
    ) -> None:
        self._abort_seen()
        sim = self.simulation
        sim.claim_flag(self.pe, peer, flag)
        event = self._put_event(peer, segments, flag, word, magic, part, sim.now)
        memory = sim.pes[peer].memory
        landed = sim.link.deliver(self.pe, peer, event.wire_bytes, sim.now) + sim.jitter()
        early = sim.random.random() if sim.jitter_us else 1.0
        bytes_at = min(landed, sim.now + (landed - sim.now) * early)
        event.end_us = landed
        self.trace.add(event)
        self._outstanding += 1
        sim.at(bytes_at, lambda: self._copy(memory, peer, segments))

        def land() -> None:
            self._raise_flag(memory, peer, flag, word)
            sim.flag_changed(peer)
            self._complete()

        sim.at(landed, land)
        if sim.jitter_us:
            sim.sleep(sim.jitter())

    def signal(self, peer: int, flag: Flag, word: int, *, magic: int) -> None:
        self.put_signal(peer, (), flag, word, magic=magic)

    def get(self, peer: int, pieces: Sequence[Piece], *, magic: int) -> None:
        self._abort_seen()
        sim = self.simulation
        event = self._get_event(peer, pieces, magic, sim.now)
        memory = sim.pes[peer].memory
        requested = sim.now + sim.link.latency_us
        landed = sim.link.deliver(peer, self.pe, event.wire_bytes, requested) + sim.jitter()
        event.end_us = landed
        self.trace.add(event)
        self._outstanding += 1

        def land() -> None:
            for piece in pieces:
                piece.target[...] = self._target(memory, peer, piece.region, piece.index)
            self._complete()

        sim.at(landed, land)

    def _complete(self) -> None:
        self._outstanding -= 1
        if self._outstanding == 0 and self._quiet_thread is not None:
            thread, self._quiet_thread = self._quiet_thread, None
            self.simulation.at(self.simulation.now, thread.switch)

    def quiet(self) -> None:
        start = self.now_us()
        if self._outstanding:
            self._quiet_thread = greenlet.getcurrent()
            self.simulation._hub.switch()
        self.trace.add(Event(self.pe, "quiet", "quiet", 0, start, self.now_us()))

    def wait_until_some(
        self, awaited: Sequence[Awaited], tag: Tag, *, microbatch: int = -1, idle: bool = False
    ) -> list[int]:
        sim, start = self.simulation, self.now_us()
        self._abort_seen()
        if not self.arrived(awaited):
            waiter = _Waiter(self, awaited, tag, microbatch, idle, greenlet.getcurrent(), start)
            if sim.wait_limit_us is not None and not idle:
                sim.at(start + sim.wait_limit_us, lambda: sim.expire(waiter))
            sim.park(waiter)
            self._abort_seen()
        ready = self.arrived(awaited)
        if not ready:
            waited_s = (self.now_us() - start) / 1e6
            raise ArrivalTimeout(self._wait_record(awaited, tag, microbatch, waited_s))
        self._record_wait(awaited, tag, start)
        return ready

    def close(self) -> None:
        """Tell every switch that this rank sends nothing more."""
        word = signal_word(int(self.memory["magic"][0]) + 1, True)
        for switch in range(self.world.num_ranks, self.world.num_pes):
            self.signal(switch, Flag("stop", (self.pe,)), word, magic=0)

    def barrier(self) -> None:
        self._barriers += 1
        start = self.now_us()
        word = signal_word(self._barriers, False)
        for peer in range(self.world.num_pes):
            if peer != self.pe:
                self.signal(peer, Flag("pe_barrier", (self.pe,)), word, magic=self._barriers)
        for peer in range(self.world.num_pes):
            if peer != self.pe:
                awaited = Awaited(Flag("pe_barrier", (peer,)), self._barriers, self.world.name_of(peer))
                self.wait_until(awaited, Tag.PE_BARRIER)
        self.trace.add(Event(self.pe, "barrier", "barrier", 0, start, self.now_us()))
