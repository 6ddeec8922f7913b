"""The discrete-event mode of the simulated backend: role programs without payload, several threads per PE, timed units.

Differs from `backends/simulated.py`, whose event queue it uses: token rows are counted, not held (`CountedRows`); a PE may
run several programs at once (the warps of a fused kernel), each with its own wait; the matrix and the vector units of a rank
are first-come-first-served servers; transfers go through `Network`. A relay has room for all chunks, so that its credits never
hold a sender back: with the cells of `RELAY_CELLS` alone, a busy destination would stall the rows for others, and the plain
forms would look worse than their best. A flag still has one writer and strictly increasing
words, and what never arrives is still reported as a deadlock, with roles, flags and magic.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import greenlet
import numpy as np

from inc_runtime.backends.base import SIGNAL_BYTES
from inc_runtime.backends.simulated import SimulatedPe, Simulation
from inc_runtime.errors import Deadlock, ProtocolViolation
from inc_runtime.heap_layout import Kind
from inc_runtime.one_sided import Awaited, Flag, Piece, Segment
from inc_runtime.op_trace import CHUNK_FLAGS, Event, OpTrace
from inc_runtime.protocol import Chunk, Role, Tag, magic_of
from inc_runtime.simulator.counted_rows import CountedRows
from inc_runtime.simulator.network import CONTROL_BYTES, Network, Phase
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads

MATRIX, VECTOR = "matrix units", "vector units"
SENDER_FLAGS = ("expert_rows_arrived", "expert_chunk_arrived", "partial_chunk_arrived")
DISPATCH_ROWS = ("inbox_tokens", "expert_rows")


Key = tuple[str, tuple[int, ...]]


class _Parked:
    """A thread in a wait. `bounds`: the word that each flag still lacks; `left`: how many must come before it goes on."""

    def __init__(self, pe: TimedPe, awaited: Sequence[Awaited], tag: Tag, bounds: dict[Key, int], left: int) -> None:
        self.pe, self.awaited, self.tag, self.bounds, self.left = pe, awaited, tag, bounds, left
        self.thread = greenlet.getcurrent()

    @property
    def woken(self) -> bool:
        return self.left == 0


class EventSimulation(Simulation):
    """A layer plan on the event queue. `loads(magic)` gives the routing of a microbatch, as drawn."""

    def __init__(self, plan: LayerPlan, loads: Callable[[int], MicrobatchLoads], *, traced: bool = False) -> None:
        self.plan, self.loads = plan, loads
        self.parked: list[_Parked] = []
        self.network = Network(plan, self.at, lambda: self.now, loads)
        self.signal_us = plan.leg_us + (plan.uplink_us if self.network.two_level else 0.0)
        self.unit_free: dict[tuple[str, int], float] = {}
        self.unit_busy: dict[tuple[str, int], float] = {}
        self.detailed = traced
        self.layer_end = 0.0
        super().__init__(plan.scenario.world, plan.scenario.layout)

    def make_pe(self, pe: int, traced: bool) -> SimulatedPe:
        return TimedPe(self, pe)

    def wake(self, thread: greenlet.greenlet) -> None:
        self.at(self.now, thread.switch)

    def use_unit(self, unit: str, pe: int, cost_us: float) -> None:
        """Occupy a unit of a rank, after those who asked before, and let that time pass."""
        key = (unit, pe)
        end = max(self.now, self.unit_free.get(key, 0.0)) + cost_us
        self.unit_free[key] = end
        self.unit_busy[key] = self.unit_busy.get(key, 0.0) + cost_us
        self.sleep(end - self.now)

    def run(self) -> float:
        # Millions of small objects live until the end, and none of them in cycles: looking for cycles doubles the time.
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().run()
        except Deadlock:
            raise Deadlock("\n".join(self._report())) from None
        finally:
            if collects:
                gc.enable()

    def _report(self) -> Iterator[str]:
        yield "no event is left, but these still wait:"
        for parked in self.parked:
            for a in parked.awaited if not parked.woken else ():
                seen = magic_of(parked.pe.word(a.flag))
                if seen < a.magic and not a.optional:
                    yield (
                        f"  {parked.pe.name} at {parked.tag.name}: {a.flag.region}{list(a.flag.index)} from {a.sender}, "
                        f"expected magic {a.magic}, seen {seen}"
                    )


class Gate:
    """A count that threads of one rank wait for, as the warps of one kernel do through shared memory."""

    def __init__(self, simulation: EventSimulation) -> None:
        self.simulation, self.count = simulation, 0
        self.waiting: list[tuple[int, greenlet.greenlet]] = []

    def advance(self) -> None:
        self.count += 1
        ready = [thread for count, thread in self.waiting if count <= self.count]
        self.waiting = [(count, thread) for count, thread in self.waiting if count > self.count]
        for thread in ready:
            self.simulation.wake(thread)

    def wait(self, count: int) -> None:
        if self.count < count:
            self.waiting.append((count, greenlet.getcurrent()))
            self.simulation._hub.switch()


class TimedPe(SimulatedPe):
    """One PE of the discrete-event mode."""

    simulation: EventSimulation

    def __init__(self, simulation: EventSimulation, pe: int) -> None:
        self.simulation = simulation
        self.plan = simulation.plan
        self.words: dict[Key, int] = {}
        self.waiting: dict[Key, _Parked] = {}
        self.writers: dict[Key, int] = {}
        # Not the constructor of BasePe: it would allocate the private rows of the switches.
        self.pe, self.world, self.layout = pe, simulation.world, simulation.layout
        self.role, self.name, self.trace = self.world.role_of(pe), self.world.name_of(pe), OpTrace(pe)
        self.sum_order = simulation.sum_order
        self.memory = cast("dict[str, np.ndarray]", self._regions())
        self.left_at = self.release_at = 0.0
        self.requests: list[Flag] = []
        self.owners_served = 0
        self.returning: greenlet.greenlet | None = None
        self.gets_open, self.sums_head, self.sums_tail, self.sums_sent = 0, 0.0, 0.0, False
        self.gates: dict[str, Gate] = {}
        self.held = frozenset(name for name, memory in self.memory.items() if isinstance(memory, np.ndarray))
        regions = self.layout.regions(self.role)
        self.control = frozenset(name for name, region in regions.items() if region.kind is Kind.CONTROL)
        rows = {True: self.plan.dispatch_row_bytes, False: self.plan.combine_row_bytes}
        self.bytes_of_a_row = {
            name: rows[name in DISPATCH_ROWS or (name == "relay_rows" and self.role is Role.DISPATCH_SWITCH)]
            for name, region in regions.items()
            if region.kind is Kind.ROWS
        }
        self.is_switch = self.role is not Role.COMPUTE_RANK
        self.bypass = self.plan.scenario.network.local_bypass

    def _regions(self) -> dict[str, Any]:
        """Rows are counted; records of received rows too, where nobody reads them; the rest is real, and committed on touch."""
        dims, regions = self.layout.dims, {}
        for name, region in self.layout.regions(self.role).items():
            counted = region.kind is Kind.ROWS or (name == "expert_rows_routing" and dims.model.in_network)
            if region.kind is not Kind.FLAGS:
                shape, dtype = region.shape(dims), region.dtype(dims)
                regions[name] = CountedRows(shape, dtype) if counted else np.zeros(shape, dtype)
        return regions

    def gate(self, name: str) -> Gate:
        return self.gates.setdefault(name, Gate(self.simulation))

    def word(self, flag: Flag) -> int:
        return self.words.get((flag.region, flag.index), 0)

    def raise_flag(self, sender: int, flag: Flag, word: int) -> None:
        """A word lands: check the rules of a flag, and wake the thread that waits for it."""
        key = (flag.region, flag.index)
        if self.words.get(key, 0) >= word or self.writers.setdefault(key, sender) != sender:
            raise ProtocolViolation(
                f"{self.world.name_of(sender)} raised {flag.region}{list(flag.index)} of {self.name} to word {word}, but it "
                f"holds {self.words.get(key, 0)}, written by {self.world.name_of(self.writers[key])}."
            )
        self.words[key] = word
        parked = self.waiting.get(key)
        if parked is not None and parked.left and parked.bounds.get(key, word + 1) <= word:
            del parked.bounds[key]
            parked.left -= 1
            if not parked.left:
                self.simulation.wake(parked.thread)

    def receive(self, brought: Sequence[tuple[str, tuple, np.ndarray]]) -> None:
        """Headers and records of a put land."""
        for region, index, values in brought:
            self.memory[region][index] = values

    def wait_until_some(
        self, awaited: Sequence[Awaited], tag: Tag, *, microbatch: int = -1, idle: bool = False
    ) -> list[int]:
        if tag is Tag.RELAY_CREDIT:
            return [0]
        sim, start, words = self.simulation, self.now_us(), self.words
        keys = [(a.flag.region, a.flag.index) for a in awaited]
        bounds = [a.threshold for a in awaited]
        ready = [i for i, key in enumerate(keys) if words.get(key, 0) >= bounds[i]]
        # Rows of W senders are waited for in one step, as the program only counts them: else each of W ranks would wake W times.
        need = len(keys) if tag is Tag.EXPERT_ROWS else 1
        if len(ready) < need:
            lacking = {key: bound for key, bound in zip(keys, bounds, strict=True) if words.get(key, 0) < bound}
            parked = _Parked(self, awaited, tag, lacking, need - len(ready))
            self.waiting.update(dict.fromkeys(lacking, parked))
            sim.parked.append(parked)
            if len(sim.parked) > 16 * len(sim.pes):
                sim.parked = [p for p in sim.parked if not p.woken]
            sim._hub.switch()
            ready = [i for i, key in enumerate(keys) if words.get(key, 0) >= bounds[i]]
        if tag is Tag.COMBINE_REQUEST:
            self.requests += [awaited[i].flag for i in ready if awaited[i].flag.region == "combine_requests"]
        if sim.detailed:
            self._record_wait(awaited, tag, start)
        return ready

    def put_signal(
        self, peer: int, segments: Sequence[Segment], flag: Flag, word: int, *, magic: int, part: int = 0
    ) -> None:
        sim, net, plan = self.simulation, self.simulation.network, self.plan
        target = cast("TimedPe", sim.pes[peer])
        if flag.region == "token_sums_arrived":
            self._await_sums()
            self.owners_served += 1
        event = self._timed_event(target, segments, flag, word, magic, part)
        # Read now: a quiet that does not wait lets the program reuse the source before this put has landed.
        held = target.held
        brought = [(s.region, s.index, np.array(s.read())) for s in segments if s.region in held and s.num_rows]
        start = max(sim.now, self.release_at) if flag.region in ("dispatch_grants", "relay_credits") else sim.now

        def land() -> None:
            event.end_us = sim.now
            target.receive(brought)
            target.raise_flag(self.pe, flag, word)

        from_switch, to_switch = self.is_switch, target.is_switch
        if from_switch and to_switch and plan.real:
            sim.at(start, land)
        elif event.rows == 0 and event.wire_bytes < CONTROL_BYTES and flag.region not in CHUNK_FLAGS:
            sim.at(start + sim.signal_us, land)
        elif not from_switch:
            net.push(self.pe, peer, event.wire_bytes, magic, land, flag.region == "relay_arrived")
        elif not to_switch:
            tail, sender = self._input_tail(flag, magic)
            tokens = flag.region == "expert_rows_arrived"
            left = net.deliver(self.pe, peer, event.wire_bytes, tail, land, magic=magic, tokens=tokens, sender=sender)
            self.left_at = max(self.left_at, left)
        else:
            net.between_emulated(self.pe, peer, event.wire_bytes, land)

    def _input_tail(self, flag: Flag, magic: int) -> tuple[float, int]:
        """When the last byte of what this put forwards is in the switch, and its sender, or -1 where it has several."""
        net = self.simulation.network
        if flag.region in ("expert_chunk_arrived", "partial_chunk_arrived"):
            return net.chunk_tails[self.pe, flag.index[2]].popleft(), flag.index[2]
        if flag.region == "expert_rows_arrived":
            sender = flag.index[2] if net.phased else -1
            return net.tails[self.pe, magic, sender], sender
        return self.sums_tail, -1

    def _await_sums(self) -> None:
        """Returned sums begin once every pulled row has begun (cut-through) or arrived, and `sums_out` is free again."""
        sim = self.simulation
        if self.gets_open:
            self.returning = greenlet.getcurrent()
            sim._hub.switch()
        begin = max(self.sums_head if self.plan.cut_through else self.sums_tail, self.release_at)
        if begin > sim.now:
            sim.sleep(begin - sim.now)
        self.sums_sent = True

    def _timed_event(
        self, target: TimedPe, segments: Sequence[Segment], flag: Flag, word: int, magic: int, part: int
    ) -> Event:
        """The trace event with the bytes of the chosen wire format, less what a local bypass keeps at home."""
        bytes_of_a_row, control, bypass = target.bytes_of_a_row, target.control, self.bypass
        rows = row_bytes = wire_bytes = 0
        for segment in segments:
            count = segment.num_rows
            size = bytes_of_a_row.get(segment.region)
            if segment.region in control:
                wire_bytes += segment.num_bytes
                continue
            if bypass:
                count -= self._rows_at_home(target, flag, magic, count, segments)
            if size is None:
                wire_bytes += count * segment.source.dtype.itemsize if count else 0
            else:
                rows, row_bytes = rows + count, row_bytes + count * size
                wire_bytes += count * size
        now, kind_name = self.simulation.now, "put_signal" if segments else "signal"
        amounts = rows, row_bytes, wire_bytes + SIGNAL_BYTES
        event = Event(self.pe, kind_name, flag.region, magic, now, now, target.pe, *amounts, bool(word & 1), part)
        self.trace.add(event)
        return event

    def _rows_at_home(self, target: TimedPe, flag: Flag, magic: int, count: int, segments: Sequence[Segment]) -> int:
        """Rows of this segment that a local bypass keeps on their owner."""
        region, loads = flag.region, self.simulation.loads(magic)
        if region == "tokens_arrived":
            return round(count * float(loads.at_home[self.pe]) / max(1, int(loads.tokens[self.pe])))
        if region == "token_sums_arrived":
            return round(count * float(loads.at_home[target.pe]) / max(1, int(loads.tokens[target.pe])))
        if region == "expert_rows_arrived":
            planes = self.world.num_dispatch_switches
            if self.layout.dims.model.phased:
                return count if flag.index[2] == target.pe else 0
            return round(float(loads.rows[target.pe, target.pe]) / planes)
        if region == "relay_arrived":
            return count if int(segments[0].source[0, Chunk.DESTINATION]) == self.pe else 0
        return count if region in SENDER_FLAGS and flag.index[2] == target.pe else 0

    def get(self, peer: int, pieces: Sequence[Piece], *, magic: int) -> None:
        sim, plan = self.simulation, self.plan
        rows = sum(len(piece.target) for piece in pieces)
        if plan.scenario.network.local_bypass:
            rows -= self._own_rows_of(peer, pieces, magic)
        num_bytes = rows * plan.combine_row_bytes
        event = Event(self.pe, "get", pieces[0].region, magic, sim.now, sim.now, peer, rows, num_bytes, num_bytes, True)
        self.trace.add(event)
        if self.sums_sent:
            self.sums_head = self.sums_tail = 0.0
            self.sums_sent = False
        self.gets_open += 1

        def arriving(head: float, tail: float) -> None:
            self.sums_head, self.sums_tail = max(self.sums_head, head), max(self.sums_tail, tail)
            event.end_us = max(tail, event.start_us)
            self.gets_open -= 1
            if self.returning is not None and not self.gets_open:
                thread, self.returning = self.returning, None
                sim.wake(thread)

        phase = None
        if plan.scenario.model.phased and sim.network.two_level:
            served, num_ranks = self.owners_served, plan.scenario.num_ranks
            group = min(plan.scenario.ranks_per_phase, num_ranks - served % num_ranks)
            phase = Phase(served, [flag.index[1] for flag in self.requests[served : served + group]])
        sim.network.pull(self.pe, peer, num_bytes, magic, arriving, phase)

    def _own_rows_of(self, peer: int, pieces: Sequence[Piece], magic: int) -> int:
        """Of the rows of a pull, those that a local bypass keeps on `peer`, their owner: its run, or its share of a packet."""
        dims, lengths = self.layout.dims, [len(piece.target) for piece in pieces]
        if dims.model.phased:
            runs = [cast("slice", piece.index[1]).start // dims.dispatch_plane_tokens % dims.num_ranks for piece in pieces]
            return sum(length for run, length in zip(runs, lengths, strict=True) if run == peer)
        loads = self.simulation.loads(magic)
        return round(sum(lengths) * float(loads.rows[peer, peer]) / max(1, int(loads.received[peer])))

    def quiet(self) -> None:
        """Switches go on, as their ports work on their own and pull from all ranks at once; what reuses memory starts later.

        The persistent kernels of an emulated switch do so too: results/data/collectives_*.csv could not be met one by one.
        """
        self.release_at = self.left_at

    @contextmanager
    def stage(self, stage: str, magic: int, *, rows: int = 0) -> Iterator[None]:
        """A stage that a role program announces: on the vector units of a rank, or on the switch itself."""
        yield
        if self.role is Role.COMPUTE_RANK:
            self.work(VECTOR, stage, magic, rows, self.plan.costs.of_stage(stage, rows))
        elif not self.plan.real:
            self.simulation.sleep(self.plan.switch_costs.of_stage(stage, rows))

    def work(self, unit: str, stage: str, magic: int, rows: int, cost_us: float) -> None:
        """Run a stage of known cost on a unit of this rank."""
        start = self.simulation.now
        self.simulation.use_unit(unit, self.pe, cost_us)
        if self.simulation.detailed:
            self.trace.add(Event(self.pe, "stage", stage, magic, start, self.simulation.now, rows=rows))
