"""The compute ranks' process group: the library collectives of the Baseline, traced, with errors that name who died."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from inc_runtime.backends.host_memory import process_start
from inc_runtime.errors import IncError
from inc_runtime.op_trace import Event, OpTrace


class LibraryCollectiveFailed(IncError):
    """A collective of torch.distributed failed: its own error does not say which rank is gone, so we look."""

    def __init__(self, name: str, rank: int, dead: list[str], error: RuntimeError) -> None:
        who = f"{', '.join(dead)} died" if dead else "no process of this machine is gone"
        super().__init__(f"rank {rank} lost a peer in the library's {name}: {who}. torch.distributed: {error}")


@dataclass
class LibraryGroup:
    """The compute ranks' process group and the trace of what was exchanged over it. Collective to make.

    The ranks tell each other host and process, so that an error can name who died.
    """

    group: dist.ProcessGroup | None
    trace: OpTrace
    processes: list[tuple[str, int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.processes = [("", 0, 0)] * self.num_ranks
        own = (socket.gethostname(), os.getpid(), process_start(os.getpid()))
        dist.all_gather_object(self.processes, own, group=self.group)

    def dead_ranks(self) -> list[str]:
        """Ranks of this host whose process is gone, after a moment for the system to notice."""
        time.sleep(0.2)
        here = socket.gethostname()
        return [
            f"rank {rank} (process {pid})"
            for rank, (host, pid, start) in enumerate(self.processes)
            if host == here and process_start(pid) != start
        ]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size(self.group)

    def barrier(self) -> None:
        """Return once every rank of the group has called it."""
        with self._naming_who_died("barrier"):
            dist.barrier(group=self.group)

    @contextmanager
    def _naming_who_died(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LibraryCollectiveFailed(name, self.rank, self.dead_ranks(), error) from error

    @contextmanager
    def stage(self, name: str, rows: int) -> Iterator[None]:
        start = time.perf_counter() * 1e6
        yield
        self.trace.add(Event(self.rank, "stage", name, 1, start, time.perf_counter() * 1e6, rows=rows))

    def exchange(self, name: str, parts: Sequence[Sequence[np.ndarray]], expected: Sequence[Sequence[np.ndarray]]) -> None:
        """One library all-to-all. `parts[d]` are the arrays for rank d, `expected[s]` those to fill from rank s.

        The first array of a part holds token rows, if any does. A message crosses the fabric's switch once in and once
        out; the trace holds one event for each message.
        """
        messages = [b"".join(array.tobytes() for array in part) for part in parts]
        sizes = [sum(array.nbytes for array in arrays) for arrays in expected]
        received = np.empty(sum(sizes), np.uint8)
        sent = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8) if any(messages) else torch.empty(0).byte()
        start = time.perf_counter() * 1e6
        with self._naming_who_died(name):
            sent_sizes = [len(message) for message in messages]
            dist.all_to_all_single(torch.from_numpy(received), sent, sizes, sent_sizes, group=self.group)
        end = time.perf_counter() * 1e6
        for peer, (part, message) in enumerate(zip(parts, messages, strict=True)):
            rows = part[0] if part[0].ndim == 2 else part[0][:0]
            size = len(message)
            self.trace.add(
                Event(self.rank, "library", name, 1, start, end, peer, len(rows), rows.nbytes, size, len(rows) > 0)
            )
        offset = 0
        for array in (array for arrays in expected for array in arrays):
            array.view(np.uint8).reshape(-1)[...] = received[offset : offset + array.nbytes]
            offset += array.nbytes
