"""Baseline: one kernel per stage, whole tensors between them, library collectives (torch.distributed).

The ten stages run one after another over the whole batch. Counts are traded first, in an all-to-all of their own; the rows
then go in one all-to-all each way (or an all-gather and a reduce-scatter). Every intermediate tensor is stored.
"""

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
from inc_runtime.collectives.microbatch import Call, ReceivedRows
from inc_runtime.config import CommunicationModel
from inc_runtime.errors import IncError
from inc_runtime.heap_layout import BF16
from inc_runtime.op_trace import Event, OpTrace
from inc_runtime.routing import expert_rank_membership, rows_of_expert_ranks
from megakernel import experts as stage
from megakernel.experts import HostExperts
from megakernel.fused_layer import LayerInput


class LibraryCollectiveFailed(IncError):
    """A collective of torch.distributed failed: its own error does not say which rank is gone, so we look."""

    def __init__(self, name: str, rank: int, dead: list[str], error: RuntimeError) -> None:
        who = f"{', '.join(dead)} died" if dead else "no process of this machine is gone"
        super().__init__(f"rank {rank} lost a peer in the library's {name} exchange: {who}. torch.distributed: {error}")


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
        try:
            sent_sizes = [len(message) for message in messages]
            dist.all_to_all_single(torch.from_numpy(received), sent, sizes, sent_sizes, group=self.group)
        except RuntimeError as error:
            raise LibraryCollectiveFailed(name, self.rank, self.dead_ranks(), error) from error
        end = time.perf_counter() * 1e6
        for peer, (part, message) in enumerate(zip(parts, messages, strict=True)):
            rows = part[0] if part[0].dtype == BF16 else part[0][:0]
            size = len(message)
            self.trace.add(
                Event(self.rank, "library", name, 1, start, end, peer, len(rows), rows.nbytes, size, len(rows) > 0)
            )
        offset = 0
        for array in (array for arrays in expected for array in arrays):
            array.view(np.uint8).reshape(-1)[...] = received[offset : offset + array.nbytes]
            offset += array.nbytes


def run_baseline(
    library: LibraryGroup,
    call: Call,
    model: CommunicationModel,
    experts: HostExperts,
    given: LayerInput,
    output: np.ndarray,
) -> None:
    """Run the ten stages over the whole batch and fill `output` [N, H] bfloat16."""
    num_tokens = len(given.tokens)
    with library.stage("route", num_tokens):
        routed = given.route(slice(None))
    with library.stage("pack", num_tokens):
        membership = expert_rank_membership(
            routed.expert_ids, call.shape.num_experts, library.num_ranks, selective=model.selective
        )
        rows_for = rows_of_expert_ranks(membership)
        records = routing_records(routed.expert_ids, routed.weights)
        packed = [routed.tokens[rows] for rows in rows_for]
        packed_records = [records[rows] for rows in rows_for]
    ranks = range(library.num_ranks)
    counts = np.zeros((library.num_ranks, 1), np.int64)
    library.exchange("counts", [[np.array([len(rows)])] for rows in rows_for], [[counts[r]] for r in ranks])
    first = np.concatenate([[0], np.cumsum(counts)])
    rows = np.empty((first[-1], output.shape[1]), BF16)
    routing = np.empty(first[-1], records.dtype)
    blocks = [slice(first[r], first[r + 1]) for r in ranks]
    to_send = [[packed[r], packed_records[r]] for r in ranks]
    library.exchange("dispatch", to_send, [[rows[block], routing[block]] for block in blocks])
    received = ReceivedRows(rows, routing, np.arange(len(rows)))
    run_experts(library, experts, received)
    returned = [np.empty((len(own), output.shape[1]), BF16) for own in rows_for]
    library.exchange("combine", [[rows[block]] for block in blocks], [[part] for part in returned])
    with library.stage("global_reduce", num_tokens):
        sums = np.zeros(output.shape, np.float32)
        for own, part in zip(rows_for, returned, strict=True):
            sums[own] += part.astype(np.float32)
        output[...] = sums.astype(output.dtype)


def routing_records(expert_ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Experts and weights of each token, as one array of records."""
    top_k = expert_ids.shape[1]
    records = np.empty(len(expert_ids), [("expert_ids", "<i4", (top_k,)), ("weights", "<f4", (top_k,))])
    records["expert_ids"], records["weights"] = expert_ids, weights
    return records


def run_experts(library: LibraryGroup, experts: HostExperts, received: ReceivedRows) -> None:
    """Stages 3 to 7 over the whole batch, one after another, each storing its tensor."""
    hidden = received.rows.shape[1]
    with library.stage("group", len(received)):
        grouped = stage.group(received, experts)
        tiles = stage.expert_tiles(grouped)
        rows = [stage.gather_tile(received, grouped, positions) for _, positions in tiles]
    num_rows = len(grouped.row)
    with library.stage("matmul_gate_up", num_rows):
        projections = [stage.matmul_gate_up(x, experts.gate_up[e]) for x, (e, _) in zip(rows, tiles, strict=True)]
    with library.stage("swiglu", num_rows):
        activations = [stage.swiglu(p) for p in projections]
    with library.stage("matmul_down", num_rows):
        outputs = [stage.matmul_down(a, experts.down[e]) for a, (e, _) in zip(activations, tiles, strict=True)]
    with library.stage("reduce", num_rows):
        partial = torch.zeros(len(received), hidden)
        for tile, (_, positions) in zip(outputs, tiles, strict=True):
            stage.reduce(partial, grouped, positions, tile[: positions.stop - positions.start])
        stage.write_partial_sums(received, partial)
