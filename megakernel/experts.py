"""Stages 3 to 7 on the host: group, MatMul, SwiGLU, MatMul, reduce, in torch.

Products run in float32 on the rows as they come and round to the row format where the kernel's tensors have it: after SwiGLU
and after the down projection. In `RowFormat.FLOAT32` nothing is rounded. Experts compute in tiles of `ROW_TILE` rows, padded
with zeros, so that every product has the same shape and the result of a row does not depend on how many rows came with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from inc_runtime.collectives.microbatch import ReceivedRows

ROW_TILE = 16


@dataclass(frozen=True)
class HostExperts:
    """The experts of one rank in float32: `gate_up` [num_local, 2*I, H] (gate rows first), `down` [num_local, H, I]."""

    first_expert: int
    gate_up: torch.Tensor
    down: torch.Tensor

    def __len__(self) -> int:
        return len(self.gate_up)


@dataclass(frozen=True)
class GroupedRows:
    """Rows of one microbatch in expert order.

    `row` [R]: position among the received rows; `weight` [R] float32; `first` [num_local + 1]: where each expert begins.
    """

    row: np.ndarray
    weight: np.ndarray
    first: np.ndarray


def bf16_from_numpy(array: np.ndarray) -> torch.Tensor:
    """A torch view of a numpy bfloat16 array, without a copy."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def bf16_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A numpy bfloat16 view of a contiguous torch bfloat16 tensor, without a copy."""
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def rows_from_numpy(array: np.ndarray) -> torch.Tensor:
    """A torch view of numpy token rows, bfloat16 or float32, without a copy."""
    return torch.from_numpy(array) if array.dtype == np.float32 else bf16_from_numpy(array)


def rows_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A numpy view of contiguous torch token rows, bfloat16 or float32, without a copy."""
    return tensor.contiguous().numpy() if tensor.dtype == torch.float32 else bf16_to_numpy(tensor)


def format_of(received: ReceivedRows) -> torch.dtype:
    """The dtype to which the experts round: that of the rows they received."""
    return torch.float32 if received.rows.dtype == np.float32 else torch.bfloat16


def group(received: ReceivedRows, experts: HostExperts) -> GroupedRows:
    """Stage 3: list the (row, expert) pairs of this rank's experts, by expert, then by row, then by column of choice."""
    records = received.routing[received.valid]
    local = records["expert_ids"] - experts.first_expert
    pair_row, pair_column = np.nonzero((local >= 0) & (local < len(experts)))
    expert = local[pair_row, pair_column]
    order = np.argsort(expert, kind="stable")
    first = np.searchsorted(expert[order], np.arange(len(experts) + 1))
    return GroupedRows(pair_row[order], records["weights"][pair_row, pair_column][order], first)


def matmul_gate_up(tile: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Stage 4: [ROW_TILE, H] float32 by [2*I, H] float32 to [ROW_TILE, 2*I] float32."""
    return tile @ gate_up.T


def swiglu(projections: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stage 5: silu(gate) * up, rounded to `dtype`: [rows, 2*I] float32 to [rows, I]."""
    gate, up = projections.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(dtype)


def matmul_down(activations: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Stage 6: [ROW_TILE, I] by [H, I] float32 to [ROW_TILE, H], rounded to the dtype of the activations."""
    return (activations.float() @ down.T).to(activations.dtype)


def expert_tiles(grouped: GroupedRows) -> list[tuple[int, slice]]:
    """The tiles of all experts that have rows: (local expert, positions in the grouped rows)."""
    tiles = []
    for expert, (start, stop) in enumerate(zip(grouped.first[:-1], grouped.first[1:], strict=True)):
        tiles += [(expert, slice(t, min(t + ROW_TILE, stop))) for t in range(start, stop, ROW_TILE)]
    return tiles


def gather_tile(received: ReceivedRows, grouped: GroupedRows, positions: slice) -> torch.Tensor:
    """Rows of one tile as float32, zeros below: [ROW_TILE, H]."""
    rows = received.rows[received.valid[grouped.row[positions]]]
    tile = torch.zeros(ROW_TILE, rows.shape[1])
    tile[: len(rows)] = rows_from_numpy(rows)
    return tile


def reduce(partial: torch.Tensor, grouped: GroupedRows, positions: slice, outputs: torch.Tensor) -> None:
    """Stage 7: add weight * output of one tile to `partial` [num_received, H] float32, in grouped order."""
    rows = torch.from_numpy(grouped.row[positions])
    weights = torch.from_numpy(grouped.weight[positions])[:, None]
    partial.index_add_(0, rows, weights * outputs.float())


def write_partial_sums(received: ReceivedRows, partial: torch.Tensor) -> None:
    """End of stage 7: the partial sums overwrite the received rows; rows without a local expert become zero."""
    received.rows[received.valid] = rows_to_numpy(partial.to(format_of(received)))
