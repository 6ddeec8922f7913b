"""The Baseline's exchange in shared placements: one-sided puts on stream through the relay switches (`relayed_exchange.cu`).

NCCL takes one rank per GPU. Here the rows cross the same switch and ports as those of the other implementations; they are
packed while they are sent, so that the pack kernel is not launched. In a world without switches they go straight.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.device.arguments import EXCHANGE_ARGUMENTS
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import Dims
from megakernel.library_exchange import Places

SOURCE = Path(__file__).with_name("relayed_exchange.cu")
THREADS = 512


def whole_batch(bound_tokens: int, *, local_bypass: bool = False) -> Pipeline:
    """The pipeline of a heap for this exchange: one microbatch is the batch, one slot set."""
    return Pipeline(bound_tokens=bound_tokens, microbatch_tokens=bound_tokens, depth=1, local_bypass=local_bypass)


class RelayedExchange:
    """Twin of `LibraryExchange` on a heap of the plain all-to-all, laid out for `whole_batch`. The relays serve meanwhile.

    `layer`: compared by the receivers, so that ranks that call layers in another order are refused. `num_blocks`: SMs of a
    launch, by default those of this PE's seat. Raises: ConfigurationError for another heap.
    """

    def __init__(self, heap: DeviceHeap, shape: LayerShape, *, layer: int = 0, num_blocks: int | None = None) -> None:
        dims = heap.layout.dims
        wanted = (CommunicationModel.ALL_TO_ALL, 1, shape.hidden_size, shape.top_k)
        if (dims.model, dims.depth, dims.hidden_size, dims.top_k) != wanted or dims.num_relays > 2:
            raise ConfigurationError(
                f"the heap is for {dims.model.value}, depth {dims.depth}, hidden_size {dims.hidden_size}, top_k {dims.top_k}, "
                f"{dims.num_relays} relays: the Baseline's exchange needs all_to_all, depth 1, {shape.hidden_size}, "
                f"{shape.top_k}, a relay for each way or none. Lay it out with whole_batch() of this layer."
            )
        self.heap, self.rank, self.num_ranks = heap, heap.job.pe, dims.num_ranks
        self._built = heap.build(SOURCE)
        self._num_blocks = num_blocks or heap.job.seat.num_blocks
        self._call = np.zeros((), EXCHANGE_ARGUMENTS)
        self._call["num_experts"], self._call["top_k"], self._call["layer"] = shape.num_experts, shape.top_k, layer
        self.sent_counts = torch.zeros(self.num_ranks, dtype=torch.int32, device="cuda")
        self.places = self._places(dims)

    def _places(self, dims: Dims) -> Places:
        tokens, row_bytes = dims.microbatch_tokens, dims.hidden_size * dims.row_element_bytes
        record_bytes = dims.routing_dtype.itemsize
        ids = dims.routing_dtype.fields["expert_ids"][1]  # type: ignore[index]

        def runs(region: str, stride: int, offset: int = 0) -> list[int]:
            first = self.heap.job.slab + self.heap.layout.offset(self.heap.role, region) + offset
            return [first + rank * stride for rank in range(self.num_ranks)]

        rows = runs("expert_rows", tokens * row_bytes)
        returned = runs("received_partial_sums", dims.combine_plane_tokens * row_bytes)
        if dims.local_bypass:  # the own partial sums are added where they stand
            returned[self.rank] = rows[self.rank]
        return Places(
            send=[],
            received_rows=rows,
            received_records=runs("expert_rows_routing", tokens * record_bytes, ids),
            received_counts=runs("expert_rows_header", self._header_bytes()),
            partial=rows,  # over the rows, in place
            returned=returned,
            row_stride=row_bytes,
            record_stride=record_bytes,
            slots=int(self.heap.argument["row_of_token"]),
        )

    def _header_bytes(self) -> int:
        region, dims = self.heap.layout.region(self.heap.role, "expert_rows_header"), self.heap.layout.dims
        return region.num_bytes(dims) // self.num_ranks

    def dispatch(self, call: np.ndarray, bound_tokens: int) -> None:
        """See `Exchange`. A failure shows at `DeviceHeap.check`."""
        for name in ("tokens", "expert_ids", "weights", "num_tokens"):
            self._call[name] = call[name]
        self._call["bound_tokens"] = bound_tokens
        self._launch("relayed_dispatch", [self._call])

    def combine(self, bound_tokens: int) -> None:
        """See `Exchange`."""
        self._launch("relayed_combine", [])

    def _launch(self, kernel: str, arguments: list[np.ndarray]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.heap.launch(self._built, kernel, arguments, num_blocks=self._num_blocks, num_threads=THREADS, stream=stream)
