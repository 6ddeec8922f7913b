"""Bytes of token rows that one rank holds at once, tensor by tensor: what fusion, the ring and the switch each remove.

The Baseline holds every tensor for the whole batch. The fused forms hold the network's tensors for D microbatches in the ring of
the heap, and those of the experts for one tile. Source: post, Communication volume and memory.
"""

from __future__ import annotations

from inc_runtime.config import CommunicationModel, Implementation, LayerShape, Pipeline
from inc_runtime.heap_layout import BF16, Dims, HeapLayout, Kind
from inc_runtime.protocol import Role, World
from megakernel.experts import ROW_TILE


def baseline_bytes(shape: LayerShape, num_tokens: int, num_ranks: int) -> dict[str, int]:
    """Bytes by tensor with `num_tokens` per rank, each at the size that it has when every token reaches every rank and the
    experts are chosen evenly: packed, received, grouped and the expert tensors, partial sums out and in, the sums.
    """
    row = shape.hidden_size * BF16.itemsize
    copies = num_tokens * min(shape.top_k, num_ranks)
    pairs = num_tokens * shape.top_k
    return {
        "tokens": num_tokens * row,
        "packed tokens": copies * row,
        "received rows": copies * row,
        "grouped rows": pairs * row,
        "gate and up projections": pairs * 2 * shape.intermediate_size * BF16.itemsize,
        "activations": pairs * shape.intermediate_size * BF16.itemsize,
        "expert outputs": pairs * row,
        "partial sums": copies * row,
        "returned partial sums": copies * row,
        "token sums": num_tokens * row,
    }


def fused_bytes(
    model: CommunicationModel, shape: LayerShape, pipeline: Pipeline, world: World, *, ring_sets: int | None = None
) -> dict[str, int]:
    """Bytes by tensor of a fused form: the row regions of a rank's heap, and one tile of the experts.

    `ring_sets`: slot sets to count instead of the pipeline's depth, such as M for an allocator without a ring.
    """
    dims = Dims.of(model, world, shape, pipeline)
    regions = HeapLayout(dims).regions(Role.COMPUTE_RANK)
    sets = pipeline.depth if ring_sets is None else ring_sets
    held = {
        name: region.num_bytes(dims) // pipeline.depth * sets for name, region in regions.items() if region.kind is Kind.ROWS
    }
    width = shape.hidden_size + 3 * shape.intermediate_size
    return held | {"one tile of the experts": ROW_TILE * width * BF16.itemsize}


def memory_bytes(
    implementation: Implementation,
    model: CommunicationModel,
    shape: LayerShape,
    pipeline: Pipeline,
    num_tokens: int,
    world: World,
) -> int:
    """Bytes of token rows of one rank in one call of `num_tokens` per rank."""
    if implementation is Implementation.BASELINE:
        return sum(baseline_bytes(shape, num_tokens, world.num_ranks).values())
    return sum(fused_bytes(model, shape, pipeline, world).values())
