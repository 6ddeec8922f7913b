"""How the Baseline's packets and partial sums travel: an `Exchange` of blocks, and the one over the library's collectives.

A block for a rank is a header with the number of packets, then the packets (`baseline_arguments.py`); partial sums come back as
rows in the order of the packets. A rank's block for itself is written where it would be received, so it never travels.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from inc_runtime.errors import PlacementError
from megakernel.baseline_arguments import HEADER_BYTES
from megakernel.launch_baseline import Allocate

MARK_BYTES, NO_MARK = 16, 251


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of one layer's blocks, each for at most `bound_tokens` packets."""

    bound_tokens: int
    packet_bytes: int
    row_bytes: int

    def packets(self, count: int) -> int:
        """Bytes of a block of `count` packets."""
        return HEADER_BYTES + count * self.packet_bytes

    def rows(self, count: int) -> int:
        """Bytes of `count` partial sums."""
        return count * self.row_bytes


@dataclass(frozen=True)
class Places:
    """Where an exchange takes and leaves what it carries: device addresses by rank, and strides in bytes.

    `send`: blocks for packets, empty where the exchange makes its messages itself. Received: the first row, the first record
    (k ids, k weights) and the number (int32) of the rows from each rank. `partial`, `returned`: runs of H bfloat16, out and in.
    `slots`: where the exchange keeps the place of each token's row per rank [N, W] int32; 0: the pack kernel writes it.
    """

    send: list[int]
    received_rows: list[int]
    received_records: list[int]
    received_counts: list[int]
    partial: list[int]
    returned: list[int]
    row_stride: int
    record_stride: int
    slots: int = 0


class Exchange(Protocol):
    """Carries rows and partial sums between the ranks, on the current stream. Collective: every rank calls, in the same order."""

    rank: int
    num_ranks: int
    places: Places
    sent_counts: torch.Tensor
    """[num_ranks] int32: packets for each rank, written by the pack kernel."""

    def dispatch(self, call: np.ndarray, bound_tokens: int) -> None:
        """Rows to their ranks. `call`: BASELINE_ARGUMENTS; no rank brought more than `bound_tokens` tokens."""
        ...

    def combine(self, bound_tokens: int) -> None:
        """Partial sums back to the ranks whose rows they answer."""
        ...


class Counting(enum.Enum):
    """How many packets of a block are sent.

    `BOUNDED`: as many as the bound allows; the host never waits for the GPU. `COUNTED`: those that there are; the counts are
    traded first, and the host waits for them.
    """

    BOUNDED = "bounded"
    COUNTED = "counted"


class BlockMemory:
    """The blocks of one rank, by the rank at the other end. Its own are shared by both sides: written where they are read."""

    def __init__(self, rank: int, num_ranks: int, sizes: BlockSizes, allocate: Allocate) -> None:
        everyone = list(range(num_ranks))
        peers = [other for other in everyone if other != rank]
        packets, rows = sizes.packets(sizes.bound_tokens), sizes.rows(sizes.bound_tokens)
        self.received = self._carve(allocate, packets, everyone)
        self.returned = self._carve(allocate, rows, everyone)
        self.send = self._carve(allocate, packets, peers) | {rank: self.received[rank]}
        self.partial = self._carve(allocate, rows, peers) | {rank: self.returned[rank]}

    @staticmethod
    def _carve(allocate: Allocate, num_bytes: int, ranks: list[int]) -> dict[int, torch.Tensor]:
        stride = -(-num_bytes // 256) * 256
        memory = allocate(max(stride * len(ranks), 16))
        return {rank: memory[i * stride : i * stride + num_bytes] for i, rank in enumerate(ranks)}

    def places(self, sizes: BlockSizes) -> Places:
        """Addresses of the blocks; a packet is a row with its record behind."""

        def addresses(blocks: dict[int, torch.Tensor], offset: int = 0) -> list[int]:
            return [blocks[rank].data_ptr() + offset for rank in sorted(blocks)]

        return Places(
            send=addresses(self.send),
            received_rows=addresses(self.received, HEADER_BYTES),
            received_records=addresses(self.received, HEADER_BYTES + sizes.row_bytes),
            received_counts=addresses(self.received),
            partial=addresses(self.partial),
            returned=addresses(self.returned),
            row_stride=sizes.packet_bytes,
            record_stride=sizes.packet_bytes,
        )


class RegisteredMemory:
    """Memory that NCCL reads and writes in place, without a copy through its own buffers: one pool per group.

    What a layer frees, the next one takes; nothing goes back to the driver. A captured graph keeps NCCL's entry of an address
    alive after its memory is forgotten, and memory that then comes to lie there inherits the peers' mappings of the old: rows
    of other ranks were missing, silently. Cost and gain: DECISIONS.md, "The Baseline on GPUs".
    """

    _of_backend: dict[int, RegisteredMemory] = {}

    def __init__(self, backend: Any) -> None:
        self.numbers = itertools.count()  # of the exchanges of this group; all ranks make them in the same order
        self._backend = backend
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))  # never destroyed: at exit the driver may be gone before it

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> RegisteredMemory:
        """The memory of this group. Collective the first time."""
        backend: Any = (group or dist.group.WORLD)._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
        if id(backend) not in cls._of_backend:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # NCCL makes its communicator at the first collective
            cls._of_backend[id(backend)] = cls(backend)
        return cls._of_backend[id(backend)]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 on the current device, not cleared."""
        with torch.cuda.use_mem_pool(self._pool):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._backend.register_mem_pool(self._pool)  # segments that are registered already are passed over
        return memory


class LibraryExchange:
    """Blocks over torch.distributed's all-to-all (NCCL). Its memory is allocated once, for the bound of the layer.

    Collective to make. Raises: PlacementError where a block does not arrive in its place.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, sizes: BlockSizes, counting: Counting = Counting.BOUNDED
    ) -> None:
        self.group, self.sizes, self.counting = group, sizes, counting
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        registered = RegisteredMemory.of(group)
        allocate = registered.allocate
        self.memory = BlockMemory(self.rank, self.num_ranks, sizes, allocate)
        self.places = self.memory.places(sizes)
        self._counts = allocate(2 * 4 * self.num_ranks).view(torch.int32).view(2, self.num_ranks)
        self.sent_counts = self._counts[0]
        self._packets: tuple[list[int], list[int]] = ([], [])  # sent to and received from each rank, of the last dispatch
        self._number = next(registered.numbers)
        self._check_arrival()

    def _check_arrival(self) -> None:
        """Send marked blocks once and look where they arrive: memory that NCCL knows wrongly would else lose rows silently."""
        memory, bounds = self.memory, [self.sizes.bound_tokens] * self.num_ranks
        kinds = (memory.received, memory.send, self.sizes.packets), (memory.returned, memory.partial, self.sizes.rows)
        for targets, sources, num_bytes in kinds:
            for peer in self._peers:
                sources[peer][-MARK_BYTES:] = self._mark(self.rank, peer)
                targets[peer][-MARK_BYTES:] = NO_MARK
            self._all_to_all(targets, sources, num_bytes, bounds, bounds)
            for peer in self._peers:
                seen, wanted = targets[peer][-MARK_BYTES:].tolist(), self._mark(peer, self.rank)
                if seen != [wanted] * MARK_BYTES:
                    raise PlacementError(
                        f"rank {self.rank}: a block of rank {peer} did not arrive in the memory registered for it (bytes "
                        f"{set(seen)}, expected {wanted}). NCCL holds an old mapping of that address: start the process anew."
                    )

    def _mark(self, sender: int, receiver: int) -> int:
        return (self._number * 97 + sender * 13 + receiver * 7) % NO_MARK

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.rank]

    def dispatch(self, call: np.ndarray, bound_tokens: int) -> None:
        """See `Exchange`. With `COUNTED`, the host waits for the counts here."""
        self._packets = ([bound_tokens] * self.num_ranks, [bound_tokens] * self.num_ranks)
        if self.counting is Counting.COUNTED:
            dist.all_to_all_single(self._counts[1], self._counts[0], group=self.group)
            sent, received = self._counts.tolist()
            self._packets = sent, received
        self._all_to_all(self.memory.received, self.memory.send, self.sizes.packets, *reversed(self._packets))

    def combine(self, bound_tokens: int) -> None:
        """See `Exchange`. Follows the counts of the dispatch before."""
        self._all_to_all(self.memory.returned, self.memory.partial, self.sizes.rows, *self._packets)

    def _all_to_all(
        self,
        targets: dict[int, torch.Tensor],
        sources: dict[int, torch.Tensor],
        num_bytes: Callable[[int], int],
        counts_in: list[int],
        counts_out: list[int],
    ) -> None:
        if self.num_ranks == 1:
            return
        nothing = self.memory.received[self.rank][:0]
        incoming, outgoing = [nothing] * self.num_ranks, [nothing] * self.num_ranks
        for peer in self._peers:
            incoming[peer] = targets[peer][: num_bytes(counts_in[peer])]
            outgoing[peer] = sources[peer][: num_bytes(counts_out[peer])]
        dist.all_to_all(incoming, outgoing, group=self.group)
