"""GPU memory of a rank beside the symmetric heap: grouped rows and what the blocks of a launch tell each other.

All layers of one shape on one heap share it, as they run one after another. Its size depends on the heap's microbatch, not on the
number of tokens nor on the routing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.config import LayerShape, Pipeline
from inc_runtime.errors import ConfigurationError
from megakernel.device_arguments import GROUPED_SETS, GROUPING, TALLY_BITS, TILE_ROWS

ACTIVATION_COLUMNS = 128
"""Columns of the activation that one tile of MatMul 1 writes."""
OUTPUT_COLUMNS = 256
"""Columns of the output that one tile of MatMul 2 writes."""
MAX_PIECES = 1 << 32
"""A gathering warp counts 16-byte pieces of the received rows in 32 bits."""


@dataclass
class LayerMemory:
    """Tensors of one shape on one heap. `words` must start from zero, and again when the heap is reset: they hold magic."""

    grouped_capacity: int  # rows of one set
    activation: torch.Tensor  # bf16 [GROUPED_SETS * capacity, I]
    output: torch.Tensor  # bf16 [GROUPED_SETS * capacity, H]
    row_to_token: torch.Tensor  # int32 [GROUPED_SETS * capacity]
    position: torch.Tensor  # int32 [GROUPED_SETS, R, k]
    expert_ids: torch.Tensor  # int32 [bound, k]
    weights: torch.Tensor  # float32 [bound, k]
    activation_flags: torch.Tensor  # int64 [tiles, I / ACTIVATION_COLUMNS]
    row_tile_arrival: torch.Tensor  # int64 [tiles]
    tiles_done: torch.Tensor  # int32 [tiles]
    ticket_word: torch.Tensor  # int64 [1]
    groupings: torch.Tensor  # uint8: GROUPING [GROUPED_SETS]
    generation: int

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        return self.activation_flags, self.row_tile_arrival, self.tiles_done, self.ticket_word, self.groupings

    @property
    def num_bytes(self) -> int:
        tensors = [getattr(self, field.name) for field in fields(self)]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def follow(self, heap: DeviceHeap) -> None:
        """Start from zero again where the heap was reset since the last call. No launch may run."""
        if self.generation != heap.generation:
            for tensor in self.words:
                tensor.zero_()
            self.generation = heap.generation


def grouped_rows(shape: LayerShape, num_experts: int, received_rows: int) -> int:
    """The most grouped rows of one microbatch, whole tiles: every choice of every row here, ids that occur twice included."""
    most = received_rows * shape.top_k + num_experts * (TILE_ROWS - 1)
    return -(-most // TILE_ROWS) * TILE_ROWS


def check_size(shape: LayerShape, pipeline: Pipeline, num_experts: int, received_rows: int) -> None:
    """Refuse what overflows the words of the kernel. Raises ConfigurationError."""
    rows, most = grouped_rows(shape, num_experts, received_rows), 1 << TALLY_BITS
    columns = shape.intermediate_size // ACTIVATION_COLUMNS + shape.hidden_size // OUTPUT_COLUMNS
    tiles = pipeline.num_microbatches * (rows // TILE_ROWS) * columns
    pieces = pipeline.depth * received_rows * shape.hidden_size // 8
    sizes = f"microbatch_tokens = {pipeline.microbatch_tokens}, bound_tokens = {pipeline.bound_tokens}"
    for name, value, limit in (("grouped rows", rows, most), ("tiles", tiles, most), ("pieces of 16 bytes", pieces, MAX_PIECES)):
        if value >= limit:
            raise ConfigurationError(
                f"{sizes}: up to {value} {name}, "
                f"the megakernel counts below {limit}. Larger microbatches make fewer tiles, smaller ones fewer rows."
            )


def memory_of(heap: DeviceHeap, shape: LayerShape, pipeline: Pipeline, num_experts: int, device: torch.device) -> LayerMemory:
    """The memory of layers of this shape on this heap, made once."""
    received = heap.layout.dims.expert_row_capacity
    check_size(shape, pipeline, num_experts, received)
    key = (shape.hidden_size, shape.intermediate_size, shape.top_k, num_experts, pipeline.bound_tokens)
    if key not in heap.layer_memory:
        heap.layer_memory[key] = _make(heap, shape, pipeline, grouped_rows(shape, num_experts, received), device)
    memory = heap.layer_memory[key]
    assert isinstance(memory, LayerMemory)
    return memory


def _make(heap: DeviceHeap, shape: LayerShape, pipeline: Pipeline, capacity: int, device: torch.device) -> LayerMemory:
    rows, k, received = GROUPED_SETS * capacity, shape.top_k, heap.layout.dims.expert_row_capacity

    def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    memory = LayerMemory(
        grouped_capacity=capacity,
        activation=zeros(rows, shape.intermediate_size, dtype=torch.bfloat16),
        output=zeros(rows, shape.hidden_size, dtype=torch.bfloat16),
        row_to_token=zeros(rows, dtype=torch.int32),
        position=zeros(GROUPED_SETS, received, k, dtype=torch.int32),
        expert_ids=zeros(pipeline.bound_tokens, k, dtype=torch.int32),
        weights=zeros(pipeline.bound_tokens, k, dtype=torch.float32),
        activation_flags=zeros(rows // TILE_ROWS, shape.intermediate_size // ACTIVATION_COLUMNS, dtype=torch.int64),
        row_tile_arrival=zeros(rows // TILE_ROWS, dtype=torch.int64),
        tiles_done=zeros(rows // TILE_ROWS, dtype=torch.int32),
        ticket_word=zeros(1, dtype=torch.int64),
        groupings=zeros(GROUPED_SETS * GROUPING.itemsize, dtype=torch.uint8),
        generation=heap.generation,
    )
    torch.cuda.current_stream(device).synchronize()  # launches may come on other streams
    return memory
