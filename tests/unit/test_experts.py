"""Stages 3 to 7 on the host: a row's result depends on the row alone, bitwise, and a wrong activation shows."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
import torch

from inc_runtime.collectives.microbatch import ReceivedRows
from inc_runtime.config import LayerShape
from megakernel import experts as stage
from megakernel.fused_layer import run_experts
from megakernel.reference import bf16_bound, moe_layer_reference, relative_error
from tests.simulate import Layer, random_tokens

SHAPE = LayerShape(6, 3, 64, 48)
LAYER = Layer(SHAPE)
FIRST, LAST = 2, 5
"""The rank under test holds experts 2, 3 and 4."""


class NoTrace:
    """A PE that only computes."""

    def stage(self, stage: str, magic: int, *, rows: int = 0):
        return torch.no_grad()


def received(tokens: np.ndarray, ids: np.ndarray, weights: np.ndarray, valid: Sequence[int], capacity: int) -> ReceivedRows:
    """A slot of `capacity` poisoned rows whose rows `valid` hold the tokens."""
    k = ids.shape[1]
    record = np.dtype([("token", "<i4"), ("sender", "<i4"), ("expert_ids", "<i4", (k,)), ("weights", "<f4", (k,))])
    rows = np.full((capacity, tokens.shape[1]), np.nan, ml_dtypes.bfloat16)
    routing = np.full(capacity * record.itemsize, 0xFF, np.uint8).view(record)
    rows[valid] = tokens
    routing["expert_ids"][valid], routing["weights"][valid] = ids, weights
    return ReceivedRows(rows, routing, np.asarray(valid, np.int64))


def partial_sums(
    tokens: np.ndarray, ids: np.ndarray, weights: np.ndarray, valid: Sequence[int] | None = None, capacity: int = 200
) -> np.ndarray:
    """What `run_experts` leaves in the slot for these rows: [n, H] bfloat16."""
    rows = received(tokens, ids, weights, range(len(tokens)) if valid is None else valid, capacity)
    own = stage.HostExperts(FIRST, LAYER.gate_up[FIRST:LAST], LAYER.down[FIRST:LAST])
    run_experts(NoTrace(), 1, own, rows)  # type: ignore[arg-type]
    return rows.rows[rows.valid]


def drawn(num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, SHAPE.num_experts, (num_rows, 3)).astype(np.int32)
    return random_tokens(rng, num_rows, SHAPE.hidden_size), ids, rng.random((num_rows, 3)).astype(np.float32) + 0.1


def test_a_row_gives_the_same_bits_alone_among_others_at_any_place_and_in_any_order() -> None:
    tokens, ids, weights = drawn(70)
    together = partial_sums(tokens, ids, weights)
    for row in (0, 1, 15, 16, 17, 33, 69):
        alone = partial_sums(tokens[[row]], ids[[row]], weights[[row]])
        assert alone.tobytes() == together[[row]].tobytes(), f"row {row} alone"
    for number in (2, 16, 17, 31, 64):
        some = partial_sums(tokens[:number], ids[:number], weights[:number])
        assert some.tobytes() == together[:number].tobytes(), f"the first {number} rows"
    order = np.random.default_rng(1).permutation(70)
    shuffled = partial_sums(tokens[order], ids[order], weights[order])
    assert shuffled.tobytes() == together[order].tobytes()


def test_a_row_gives_the_same_bits_wherever_it_lies_in_the_slot() -> None:
    tokens, ids, weights = drawn(20)
    packed = partial_sums(tokens, ids, weights)
    scattered = partial_sums(tokens, ids, weights, valid=range(5, 105, 5))
    roomy = partial_sums(tokens, ids, weights, capacity=1000)
    assert packed.tobytes() == scattered.tobytes() == roomy.tobytes()


def test_at_the_width_of_olmoe_a_row_gives_the_same_bits_in_every_place_of_a_tile() -> None:
    """H = 2,048 and I = 1,024, where a library would pick its kernel by the number of rows."""
    layer = Layer(LayerShape(1, 1, 2048, 1024))
    tokens = random_tokens(np.random.default_rng(0), stage.ROW_TILE, 2048)
    own = stage.HostExperts(0, layer.gate_up, layer.down)
    ones = np.ones((stage.ROW_TILE, 1), np.float32)
    together = received(tokens, np.zeros((stage.ROW_TILE, 1), np.int32), ones, range(stage.ROW_TILE), stage.ROW_TILE)
    run_experts(NoTrace(), 1, own, together)  # type: ignore[arg-type]
    for row in (0, 7, 15):
        alone = received(tokens[[row]], np.zeros((1, 1), np.int32), ones[:1], [0], 1)
        run_experts(NoTrace(), 1, own, alone)  # type: ignore[arg-type]
        assert alone.rows.tobytes() == together.rows[[row]].tobytes(), f"row {row}"


def wanted(tokens: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    own = np.where((ids >= FIRST) & (ids < LAST), ids, -1)
    return moe_layer_reference(tokens, own, weights, LAYER.gate_up, LAYER.down, num_experts=SHAPE.num_experts)


def test_partial_sums_are_those_of_the_own_experts_with_the_routing_weights_applied() -> None:
    tokens, ids, weights = drawn(200)
    seen = partial_sums(tokens, ids, weights)
    chosen = ((ids >= FIRST) & (ids < LAST)).any(axis=1)
    assert relative_error(seen, wanted(tokens, ids, weights)) < bf16_bound(int(chosen.sum()), SHAPE)
    assert not seen[~chosen].astype(np.float32).any(), "rows without an expert here are zeros"


def swapped_gate_and_up(projections: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    up, gate = projections.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(dtype)


def unweighted(partial: torch.Tensor, grouped: stage.GroupedRows, positions: slice, outputs: torch.Tensor) -> None:
    partial.index_add_(0, torch.from_numpy(grouped.row[positions]), outputs.float())


def last_row_lost(partial: torch.Tensor, grouped: stage.GroupedRows, positions: slice, outputs: torch.Tensor) -> None:
    kept = slice(positions.start, positions.stop - 1)
    rows = torch.from_numpy(grouped.row[kept])
    partial.index_add_(0, rows, torch.from_numpy(grouped.weight[kept])[:, None] * outputs[:-1].float())


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("swiglu", swapped_gate_and_up),
        ("swiglu", lambda projections, dtype: projections.chunk(2, dim=-1)[0].bfloat16()),
        ("reduce", unweighted),
        ("reduce", last_row_lost),
        ("matmul_down", lambda activations, down: (activations.float() @ down.T).bfloat16() * 1.02),
    ],
    ids=["swapped gate and up", "no activation", "weights left out", "last row of a tile lost", "two per cent too large"],
)
def test_a_wrong_stage_fails_the_bound(name: str, mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, ids, weights = drawn(200)
    monkeypatch.setattr(stage, name, mutant)
    assert relative_error(partial_sums(tokens, ids, weights), wanted(tokens, ids, weights)) > bf16_bound(120, SHAPE)


def test_group_lists_the_pairs_by_expert_then_by_row_and_counts_duplicates_twice() -> None:
    ids = np.array([[3, 2, 3], [-1, 4, 0], [2, 5, -1]], np.int32)
    weights = np.arange(9, dtype=np.float32).reshape(3, 3)
    rows = received(random_tokens(np.random.default_rng(0), 3, 64), ids, weights, [4, 0, 7], 9)
    own = stage.HostExperts(FIRST, LAYER.gate_up[FIRST:LAST], LAYER.down[FIRST:LAST])
    grouped = stage.group(rows, own)
    assert grouped.row.tolist() == [0, 2, 0, 0, 1] and grouped.weight.tolist() == [1, 6, 0, 2, 4]
    assert grouped.first.tolist() == [0, 2, 4, 5]


def test_tiles_cover_every_pair_once_and_never_mix_experts() -> None:
    first = np.array([0, 0, 17, 49, 49, 50])
    grouped = stage.GroupedRows(np.arange(50), np.ones(50, np.float32), first)
    tiles = stage.expert_tiles(grouped)
    assert [p for _, positions in tiles for p in range(positions.start, positions.stop)] == list(range(50))
    assert [(e, t.stop - t.start) for e, t in tiles] == [(1, 16), (1, 1), (2, 16), (2, 16), (4, 1)]
    assert all(first[expert] <= tile.start and tile.stop <= first[expert + 1] for expert, tile in tiles)


def test_a_rank_without_experts_or_without_rows_returns_zeros_or_nothing() -> None:
    tokens, ids, weights = drawn(4)
    rows = received(tokens, ids, weights, range(4), 4)
    run_experts(NoTrace(), 1, stage.HostExperts(6, LAYER.gate_up[6:], LAYER.down[6:]), rows)  # type: ignore[arg-type]
    assert not rows.rows.astype(np.float32).any()
    assert partial_sums(tokens[:0], ids[:0], weights[:0]).shape == (0, 64)


def test_numpy_and_torch_share_the_memory_of_bfloat16_rows() -> None:
    rows = random_tokens(np.random.default_rng(0), 3, 8)
    tensor = stage.bf16_from_numpy(rows)
    assert torch.equal(tensor.float(), torch.from_numpy(rows.astype(np.float32)))
    tensor[1] = 2
    assert (rows[1].astype(np.float32) == 2).all() and stage.bf16_to_numpy(tensor).tobytes() == rows.tobytes()
