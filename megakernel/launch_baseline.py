"""Builds the Baseline's kernels (`baseline_kernels.cu`) and launches them on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from inc_runtime.backends.cuda_driver import Gpu
from inc_runtime.compile_cache import build
from megakernel.baseline_arguments import header_text

SOURCE = Path(__file__).with_name("baseline_kernels.cu")
MOVER_THREADS, STREAM_THREADS, LANES = 512, 512, 32
MOVERS = ("pack", "group")
"""They meet in a barrier over the grid: one block per SM, all resident."""
ROUTE_SIZES = (64, 128, 256)
STREAMS = (*(f"route_{most}_experts" for most in ROUTE_SIZES), "route_given", "swiglu", "reduce", "global_reduce", "do_nothing")
HEADERS = {"baseline_arguments.h": header_text()}


class Kernels(Protocol):
    """What the Baseline needs of a GPU."""

    num_mover_blocks: int
    error_word: np.ndarray
    error_address: int

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory that kernels can use: [num_bytes] uint8, not cleared."""
        ...

    def launch(self, name: str, arguments: np.ndarray, num_rows: int | None = None) -> None:
        """Start a kernel on the current stream. `num_rows`: how many warps find work, where the host knows it."""
        ...

    def grouped_mm(self, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows [R, K] grouped by expert, `ends` [E] int32, times weights [E, N, K], transposed: [R, N]."""
        ...


class GpuKernels:
    """The kernels on the current CUDA device of torch.

    `num_sms`: SMs that this process may count on; default: all. Raises: BuildError, PlacementError.
    """

    def __init__(self, num_sms: int | None = None) -> None:
        device = torch.cuda.current_device()
        torch.zeros(1, device=device)  # the primary context exists from here on
        self.gpu = Gpu(device)
        built = build(SOURCE, arch=self.gpu.arch, headers=HEADERS)
        self._functions = {name: self.gpu.function(built.path, name) for name in (*MOVERS, *STREAMS)}
        self.num_mover_blocks = num_sms or self.gpu.num_sms
        self._stream_blocks = {
            name: self.gpu.resident_blocks(self._functions[name], STREAM_THREADS) * self.num_mover_blocks // self.gpu.num_sms
            for name in STREAMS
        }
        word, self.error_address = self.gpu.pinned(np.dtype("<u8"))
        self.error_word = word.reshape(())

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def launch(self, name: str, arguments: np.ndarray, num_rows: int | None = None) -> None:
        moves = name in MOVERS
        num_threads = MOVER_THREADS if moves else STREAM_THREADS
        num_blocks = self.num_mover_blocks if moves else self._stream_blocks[name]
        if num_rows is not None:
            num_blocks = max(1, min(num_blocks, -(-num_rows * LANES // num_threads)))
        self.gpu.launch(
            self._functions[name],
            [arguments],
            num_blocks=num_blocks,
            num_threads=num_threads,
            resident=False,
            stream=torch.cuda.current_stream().cuda_stream,
        )

    def grouped_mm(self, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)


Allocate = Callable[[int], torch.Tensor]
