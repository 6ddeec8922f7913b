"""Shared memory of the host backend: one slab per PE, private to the user, with nothing left behind.

Each PE creates one file of mode 0600 in the shared-memory folder, really allocated, so that a full folder is an error here and
not a SIGBUS later. Every PE maps the files of all; a PE unlinks its own as soon as all have mapped it, so that from then on
even `kill -9` leaves nothing. Files that a crash during start-up left are removed by the next start of the same user.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inc_runtime.environment import Environment
from inc_runtime.errors import HeapTooLarge, PeerMissing
from inc_runtime.protocol import World

PREFIX = f"inc-{os.getuid()}-"
CONTROL_BYTES = 8192
MAGIC_NUMBER = 0x1AC0_0001
MAX_PES = 504


class Control:
    """int64 fields in front of a PE's slab. ATTACHED and AWAITED have one field per PE."""

    READY, PID, PROCESS_START, LAYOUT, CLOSED, ACTIVITY = range(6)
    ATTACHED = 8
    AWAITED = ATTACHED + MAX_PES


class Activity(enum.IntEnum):
    """What a PE is doing, as its control fields say to the others."""

    RUNNING = 0
    WAITING = 1
    IDLE = 2


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


@dataclass
class Peer:
    """What this PE maps of another: its control page and its slab."""

    control: np.ndarray
    slab: np.ndarray

    @property
    def alive(self) -> bool:
        return process_start(int(self.control[Control.PID])) == int(self.control[Control.PROCESS_START])

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped by a signal or a debugger."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{int(self.control[Control.PID])}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    @property
    def closed(self) -> bool:
        return bool(self.control[Control.CLOSED])


def job_key(environment: Environment) -> str:
    """A name that all processes of one job share, and no other job: by its id, or by the torchrun that started it."""
    if environment.job_id:
        return hashlib.sha256(f"job {environment.job_id}".encode()).hexdigest()[:16]
    parts = (environment.master_addr, environment.master_port, environment.run_id, environment.restart_count)
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM, with which torchrun ends the peers of a failed process, unwind the stack instead of killing at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def remove_stale(folder: Path) -> list[Path]:
    """Unlink files of this user whose process is gone. Returns them."""
    removed = []
    for path in folder.glob(PREFIX + "*"):
        try:
            head = np.fromfile(path, np.int64, 3)
            stale = len(head) == 3 and head[0] == MAGIC_NUMBER and process_start(int(head[1])) != int(head[2])
            if stale or (len(head) < 3 and time.time() - path.stat().st_mtime > 60):
                path.unlink()
                removed.append(path)
        except FileNotFoundError:
            continue
    return removed


class SharedSlabs:
    """The slabs of all PEs of one heap. `generation` numbers the heaps of a job, equal on all PEs."""

    def __init__(
        self, world: World, pe: int, heap_bytes: int, layout_digest: int, generation: int, environment: Environment
    ) -> None:
        self.world, self.pe = world, pe
        self.folder = Path(environment.shared_memory_folder)
        self.stem = f"{PREFIX}{job_key(environment)}-{generation}"
        self.num_bytes = CONTROL_BYTES + heap_bytes
        self.limit_s = environment.start_limit_s
        remove_stale(self.folder)
        self.path = self.folder / f"{self.stem}-{pe}"
        with _exit_on_sigterm():
            self._map_all(layout_digest)

    def _map_all(self, layout_digest: int) -> None:
        """Create this PE's slab and map all others. Whatever fails, no file of the job stays, whoever made it."""
        pe, world = self.pe, self.world
        started = False
        try:
            own = self._create(layout_digest)
            self.peers = [own if peer == pe else self._attach(peer, layout_digest) for peer in range(world.num_pes)]
            for peer in self.peers:
                peer.control[Control.ATTACHED + pe] = 1
            self._await_attached(own)
            started = True
        finally:
            for path in [self.path] if started else self.folder.glob(f"{self.stem}-*"):
                path.unlink(missing_ok=True)

    def _create(self, layout_digest: int) -> Peer:
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise PeerMissing(
                f"{self.world.name_of(self.pe)} cannot create {self.path}: {error.strerror}. If another job uses this "
                "MASTER_PORT, choose another one; else set INC_SHARED_MEMORY_FOLDER to a folder that can be written."
            ) from error
        try:
            try:
                os.posix_fallocate(fd, 0, self.num_bytes)
            except OSError as error:
                free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
                raise HeapTooLarge(
                    f"{self.world.name_of(self.pe)} needs {self.num_bytes:,} bytes of shared memory in {self.folder}, "
                    f"where {free:,} are free ({self.world.num_pes} PEs take {self.world.num_pes * self.num_bytes:,}). "
                    "Lower microbatch_tokens or depth, or set INC_SHARED_MEMORY_FOLDER to a larger folder."
                ) from error
            peer = self._map(fd)
        finally:
            os.close(fd)
        peer.control[Control.PID] = os.getpid()
        peer.control[Control.PROCESS_START] = process_start(os.getpid())
        peer.control[Control.LAYOUT] = layout_digest
        peer.control[Control.READY] = MAGIC_NUMBER
        return peer

    def _map(self, fd: int) -> Peer:
        raw = np.frombuffer(mmap.mmap(fd, self.num_bytes), np.uint8)
        return Peer(raw[:CONTROL_BYTES].view(np.int64), raw[CONTROL_BYTES:])

    def _attach(self, peer: int, layout_digest: int) -> Peer:
        path = self.folder / f"{self.stem}-{peer}"
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR)
                try:
                    size = os.fstat(fd).st_size  # once: the peer may be allocating it right now
                    if size == self.num_bytes:
                        mapped = self._map(fd)
                        if mapped.control[Control.READY] == MAGIC_NUMBER and mapped.alive:
                            return self._checked(mapped, peer, layout_digest)
                    elif size > CONTROL_BYTES:
                        self._refuse_layout(peer)
                finally:
                    os.close(fd)
            time.sleep(0.002)
        raise PeerMissing(
            f"{self.world.name_of(self.pe)} waited {self.limit_s:.0f} s for {self.world.name_of(peer)} to join the job "
            f"(PE {peer} of {self.world.num_pes}). Start it, or look at what it printed; INC_START_LIMIT_S sets the limit."
        )

    def _checked(self, mapped: Peer, peer: int, layout_digest: int) -> Peer:
        if int(mapped.control[Control.LAYOUT]) != layout_digest:
            self._refuse_layout(peer)
        return mapped

    def _refuse_layout(self, peer: int) -> None:
        raise PeerMissing(
            f"{self.world.name_of(self.pe)} and {self.world.name_of(peer)} lay out the heap differently. Give every process "
            "the same model, shape, pipeline and numbers of ranks and switches."
        )

    def _await_attached(self, own: Peer) -> None:
        deadline = time.monotonic() + self.limit_s
        attached = own.control[Control.ATTACHED : Control.ATTACHED + self.world.num_pes]
        while not attached.all():
            absent = [peer for peer in range(self.world.num_pes) if not attached[peer]]
            gone = [peer for peer in absent if not self.peers[peer].alive]
            if gone or time.monotonic() > deadline:
                who = self.world.name_of((gone or absent)[0])
                why = "died" if gone else f"did not map the heap within {self.limit_s:.0f} s"
                raise PeerMissing(f"{self.world.name_of(self.pe)} started, but {who} {why}. Look at what it printed.")
            time.sleep(0.001)
