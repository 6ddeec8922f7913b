"""The host backend: one process per PE over POSIX shared memory, started by torchrun. Needs no GPU.

A put is a copy into the peer's mapped slab followed by the store of the flag, a get a copy out of it: both are complete when
the call returns, which the verbs allow. x86-64 keeps stores in order, so whoever sees the word sees the bytes; other
processors need a fence that Python does not offer, and are refused. Waits yield the core, notice a dead peer within
`LIVENESS_S`, and end at the wait limit.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from inc_runtime.backends.base import BasePe
from inc_runtime.backends.host_memory import MAX_PES, Activity, Control, SharedSlabs, job_key
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, check
from inc_runtime.environment import Environment, require_job_id
from inc_runtime.errors import Aborted, ArrivalTimeout, ConfigurationError, PeerDied
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.one_sided import Awaited, Flag, Piece, Segment
from inc_runtime.op_trace import Event
from inc_runtime.protocol import Role, Tag, World, signal_word

LIVENESS_S = 0.05
SPINS_BEFORE_SLEEP = 200
LONGEST_SLEEP_S = 0.001
SWITCH_LIMIT_SHARE = 0.8
"""Ranks wait for a switch that waits for a rank: the switch gives up first, so that the report names the late rank."""
_generations: defaultdict[str, itertools.count] = defaultdict(itertools.count)
"""Numbers the heaps that this process joins, by job: all PEs of a job join its heaps in one order."""


class HostPe(BasePe):
    """One PE of the host backend. Make it with `join`; leave with `close`.

    `delay_us` > 0 sleeps a seeded random time before each verb, for tests; `traced` None follows INC_TRACE.
    """

    def __init__(
        self,
        world: World,
        layout: HeapLayout,
        environment: Environment,
        pipeline: Pipeline,
        *,
        delay_us: float = 0.0,
        seed: int = 0,
        poison: bool = False,
        traced: bool | None = None,
    ) -> None:
        dims = layout.dims
        digest = int.from_bytes(hashlib.sha256(repr((dims, layout.heap_bytes, pipeline)).encode()).digest()[:7], "little")
        generation = next(_generations[job_key(environment)])
        self._slabs = SharedSlabs(world, environment.rank, layout.heap_bytes, digest, generation, environment)
        self._peer_memory = [
            layout.carve(world.role_of(peer), mapped.slab) for peer, mapped in enumerate(self._slabs.peers)
        ]
        traced = environment.trace if traced is None else traced
        own = self._peer_memory[environment.rank]
        super().__init__(environment.rank, world, layout, own, traced=traced, sum_order=pipeline.sum_order)
        self._pe_of_name = {world.name_of(pe): pe for pe in range(world.num_pes)}
        self._limit_s = environment.wait_limit_s * (SWITCH_LIMIT_SHARE if self.is_switch else 1.0)
        self._random = random.Random(seed * 1000 + self.pe)
        self._delay_us = delay_us
        self._barriers = 0
        if poison:
            self._poison()

    @classmethod
    def join(
        cls,
        shape: LayerShape,
        pipeline: Pipeline,
        model: CommunicationModel,
        *,
        num_ranks: int,
        num_dispatch_switches: int = 1,
        num_combine_switches: int = 1,
        pe: int | None = None,
        **options,
    ) -> HostPe:
        """Join the job that this process belongs to. Collective: every process calls it with equal arguments.

        The job is that of torchrun, which numbers the PEs; or, given the number `pe` of this process, that of INC_JOB_ID.
        Raises: ConfigurationError for a shape, pipeline or world that cannot work; HeapTooLarge; PeerMissing.
        """
        environment = Environment.read()
        world = World(num_ranks, num_dispatch_switches, num_combine_switches)
        check(shape, pipeline, num_ranks)
        if pe is None:
            environment = replace(environment, job_id="")
            check_processes(world, environment)
        else:
            require_job_id(environment)
            check_world(world)
            environment = replace(environment, rank=pe)
        layout = HeapLayout(Dims.of(model, world, shape, pipeline))
        return cls(world, layout, environment, pipeline, **options)

    @property
    def is_switch(self) -> bool:
        return self.role is not Role.COMPUTE_RANK

    def _poison(self) -> None:
        """Fill the data regions of this PE with NaN bytes, before any peer has written: ends with a barrier."""
        for name, region in self.layout.regions(self.role).items():
            if region.kind.value in ("rows", "records"):
                self.memory[name].view("u1")[...] = 0xFF
        self.barrier()

    def now_us(self) -> float:
        return time.perf_counter() * 1e6

    def _begin(self) -> float:
        if self._delay_us:
            time.sleep(self._random.random() ** 4 * self._delay_us * 1e-6)
        self._check_abort(self._peer_memory)
        return self.now_us()

    def put_signal(
        self, peer: int, segments: Sequence[Segment], flag: Flag, word: int, *, magic: int, part: int = 0
    ) -> None:
        event = self._put_event(peer, segments, flag, word, magic, part, self._begin())
        memory = self._peer_memory[peer]
        self._copy(memory, peer, segments)
        self._raise_flag(memory, peer, flag, word)
        event.end_us = self.now_us()
        self.trace.add(event)

    def signal(self, peer: int, flag: Flag, word: int, *, magic: int) -> None:
        self.put_signal(peer, (), flag, word, magic=magic)

    def get(self, peer: int, pieces: Sequence[Piece], *, magic: int) -> None:
        event = self._get_event(peer, pieces, magic, self._begin())
        for piece in pieces:
            piece.target[...] = self._target(self._peer_memory[peer], peer, piece.region, piece.index)
        event.end_us = self.now_us()
        self.trace.add(event)

    def quiet(self) -> None:
        """Puts and gets are complete when they return: there is nothing to wait for."""
        start = self._begin()
        self.trace.add(Event(self.pe, "quiet", "quiet", 0, start, self.now_us()))

    def wait_until_some(
        self, awaited: Sequence[Awaited], tag: Tag, *, microbatch: int = -1, idle: bool = False
    ) -> list[int]:
        start = self._begin()
        watched = [(self.memory[a.flag.region], a.flag.index, a.threshold) for a in awaited]
        next_check = time.monotonic() + LIVENESS_S
        self._say(Activity.IDLE if idle else Activity.WAITING, awaited)
        for spins in itertools.count():
            ready = [i for i, (words, index, threshold) in enumerate(watched) if words[index] >= threshold]
            if ready:
                self._say(Activity.RUNNING)
                self._record_wait(awaited, tag, start)
                return ready
            self._check_abort(self._peer_memory)
            if spins < SPINS_BEFORE_SLEEP:
                os.sched_yield()
                continue
            time.sleep(min(LONGEST_SLEEP_S, 2e-5 * (spins - SPINS_BEFORE_SLEEP + 1)))
            if time.monotonic() > next_check:
                next_check = time.monotonic() + LIVENESS_S
                self._check_wait(awaited, tag, microbatch, (self.now_us() - start) / 1e6, idle)
        raise AssertionError("unreachable")

    def _say(self, activity: Activity, awaited: Sequence[Awaited] = ()) -> None:
        """Tell the other PEs what this one does, and whom it awaits, so that a report can follow the chain of waits."""
        control = self._slabs.peers[self.pe].control
        control[Control.ACTIVITY] = activity
        if activity is not Activity.RUNNING:
            control[Control.AWAITED : Control.AWAITED + self.world.num_pes] = 0
            for pe in self._awaited_pes(awaited):
                control[Control.AWAITED + pe] = 1

    def _awaited_pes(self, awaited: Sequence[Awaited]) -> set[int]:
        """PEs that owe a word: a sender, and the switch that passes it on, as in "combine switch 0 for rank 2"."""
        owed = [a for a in awaited if not a.optional]
        return {self._pe_of_name[name] for a in owed for name in a.sender.split(" for ") if name in self._pe_of_name}

    def _culprits(self, awaited: Sequence[Awaited]) -> list[str]:
        """Follow the waits from here to the PEs that are stopped, or await nobody themselves.

        A relay waits for whatever comes, so a chain may end at it: then every stopped or busy PE is named.
        """
        everyone = set(range(self.world.num_pes))
        return self._blamed(self._awaited_pes(awaited)) or self._blamed(everyone)

    def _blamed(self, pending: set[int]) -> list[str]:
        seen, culprits = {self.pe}, []
        pending = pending - seen
        while pending:
            pe = min(pending)
            pending.discard(pe)
            seen.add(pe)
            peer = self._slabs.peers[pe]
            name = f"{self.world.name_of(pe)} (process {int(peer.control[Control.PID])})"
            if peer.closed:
                culprits.append(f"{name} had left the job.")
            elif peer.stopped:
                culprits.append(f"{name} is stopped.")
            elif peer.control[Control.ACTIVITY] == Activity.RUNNING:
                culprits.append(f"{name} awaits nobody: it is slow, or stuck outside the runtime.")
            elif peer.control[Control.ACTIVITY] == Activity.WAITING:
                row = peer.control[Control.AWAITED : Control.AWAITED + self.world.num_pes]
                pending |= {int(p) for p in row.nonzero()[0]} - seen
        return culprits

    def _check_wait(self, awaited: Sequence[Awaited], tag: Tag, microbatch: int, waited_s: float, idle: bool) -> None:
        """End a wait that cannot succeed: a peer has died, or the limit has passed."""
        dead = [p for p, peer in enumerate(self._slabs.peers) if not peer.alive and not peer.closed]
        if not dead and (idle or waited_s < self._limit_s):
            return
        self._check_abort(self._peer_memory)
        record = self._wait_record(awaited, tag, microbatch, waited_s)
        if dead:
            pids = [int(self._slabs.peers[p].control[Control.PID]) for p in dead]
            names = ", ".join(f"{self.world.name_of(p)} (process {pid})" for p, pid in zip(dead, pids, strict=True))
            record.cause = f"{names} died."
            self._fail(PeerDied(record, "Look at what it printed last; start the job again."))
        record.cause = " ".join(self._culprits(awaited))
        self._fail(ArrivalTimeout(record, "Raise INC_WAIT_LIMIT_S if it is only slow, or read its trace."))

    def _fail(self, error: Exception) -> None:
        self.abort(str(error))
        raise error

    def abort(self, report: str) -> None:
        """Raise the abort word on every PE and leave `report` for them to read. The first abort wins."""
        self._write_error_record(report)
        word = signal_word(self.pe + 1, True)
        for memory in self._peer_memory:
            if not memory["abort"][0]:
                memory["abort"][0] = word

    def barrier(self) -> None:
        self._barriers += 1
        start = self._begin()
        word = signal_word(self._barriers, False)
        for peer in range(self.world.num_pes):
            self._peer_memory[peer]["pe_barrier"][self.pe] = word
        for peer in range(self.world.num_pes):
            self.wait_until(
                Awaited(Flag("pe_barrier", (peer,)), self._barriers, self.world.name_of(peer)), Tag.PE_BARRIER
            )
        self.trace.add(Event(self.pe, "barrier", "barrier", 0, start, self.now_us()))

    def close(self) -> None:
        """Leave the job: a rank tells every switch to stop. Never waits."""
        if not self.is_switch:
            word = signal_word(int(self.memory["magic"][0]) + 1, True)
            for switch in range(self.world.num_ranks, self.world.num_pes):
                self.signal(switch, Flag("stop", (self.pe,)), word, magic=0)
        self._slabs.peers[self.pe].control[Control.CLOSED] = 1

    def __enter__(self) -> HostPe:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Aborted):
            self.abort(f"{self.name}: {kind.__name__}: {error}")


def check_world(world: World) -> None:
    """Refuse a world that the host backend cannot hold. Raises ConfigurationError."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigurationError(
            f"the processor is {platform.machine()}: the host backend needs x86-64, whose stores stay in order. "
            "Use the simulated backend here."
        )
    if world.num_ranks < 1 or (world.num_dispatch_switches < 1) != (world.num_combine_switches < 1):
        raise ConfigurationError(f"{world}: there must be at least one rank, and one switch of each role or none at all.")
    if world.num_pes > MAX_PES:
        raise ConfigurationError(f"{world} has {world.num_pes} PEs, of which the host backend takes {MAX_PES} at most.")


def check_processes(world: World, environment: Environment) -> None:
    """Refuse a job whose processes do not fit the roles. Raises ConfigurationError."""
    check_world(world)
    if environment.world_size != world.num_pes:
        raise ConfigurationError(
            f"WORLD_SIZE = {environment.world_size}: {world.num_ranks} ranks, {world.num_dispatch_switches} dispatch and "
            f"{world.num_combine_switches} combine switches need {world.num_pes} processes. "
            f"Start them with: torchrun --nproc-per-node {world.num_pes} ..."
        )
    if environment.local_world_size != environment.world_size:
        raise ConfigurationError(
            f"LOCAL_WORLD_SIZE = {environment.local_world_size} of {environment.world_size}: the host backend shares memory "
            "within one machine. Run all processes on one node."
        )
