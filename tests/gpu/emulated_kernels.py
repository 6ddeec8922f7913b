"""The Baseline's kernels on the CPU, through `emulated/emulate.cpp`: every rank is a thread of the test, blocks are processes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from functools import cache
from pathlib import Path

import numpy as np
import torch

from megakernel.baseline_arguments import header_text
from megakernel.checkpoint import ExpertWeights
from megakernel.gpu_baseline import GpuBaseline, block_sizes
from megakernel.library_exchange import BlockMemory, BlockSizes

FOLDER = Path(__file__).resolve().parent / "emulated"
STAGES = FOLDER.parents[2] / "megakernel" / "baseline_stages"
BLOCKS, THREADS = 3, 64
GUARD_BYTES, GUARD = 256, 0xA5


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def library(folder: Path) -> ctypes.CDLL:
    (folder / "baseline_arguments.h").write_text(header_text())
    target = folder / "emulated.so"
    includes = [f"-I{path}" for path in (FOLDER, folder, STAGES)]
    command = [compiler() or "g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", *includes, "-o", str(target)]
    subprocess.run([*command, str(FOLDER / "emulate.cpp")], check=True, timeout=120)
    return ctypes.CDLL(str(target))


class EmulatedKernels:
    """Twin of `launch_baseline.GpuKernels`. Memory starts poisoned: 0xFF bytes are NaN as bfloat16 and float32."""

    num_mover_blocks = BLOCKS
    _one_at_a_time = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self._library = library(folder)
        self._held: list[torch.Tensor] = []
        error = self.allocate(8).zero_()
        self.error_word = error.numpy().view(np.uint64).reshape(())
        self.error_address = error.data_ptr()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.full((num_bytes + GUARD_BYTES,), 0xFF, dtype=torch.uint8).share_memory_()
        memory[num_bytes:] = GUARD
        self._held.append(memory)
        return memory[:num_bytes]

    def check_guards(self) -> None:
        """Nothing was written beyond the end of any memory."""
        assert all(bool((memory[-GUARD_BYTES:] == GUARD).all()) for memory in self._held)

    def launch(self, name: str, arguments: np.ndarray, num_rows: int | None = None) -> None:
        if name == "swiglu":  # its arithmetic is the fused kernel's, in inline assembly
            self.activate(arguments)
            return
        packed = np.ascontiguousarray(arguments)
        with self._one_at_a_time:
            status = self._library.launch(name.encode(), ctypes.c_void_p(packed.ctypes.data), BLOCKS, THREADS)
        assert status == 0, f"{name}: status {status}"

    def activate(self, arguments: np.ndarray) -> None:
        ends = tensor_at(arguments["expert_ends"], (int(arguments["num_local_experts"]),), torch.int32)
        rows, width = int(ends[-1]), int(arguments["intermediate_size"])
        gate, up = tensor_at(arguments["projections"], (rows, 2 * width), torch.bfloat16).float().chunk(2, dim=1)
        target = tensor_at(arguments["activations"], (rows, width), torch.bfloat16)
        target[...] = (torch.nn.functional.silu(gate) * up).bfloat16()

    def grouped_mm(self, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        size = 2 * len(rows) * weights.shape[1]
        out = self.allocate(size).view(torch.bfloat16).view(len(rows), weights.shape[1])
        first = 0
        for expert, end in enumerate(ends.tolist()):
            out[first:end] = (rows[first:end].float() @ weights[expert].float().T).bfloat16()
            first = end
        return out


def tensor_at(address: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at an address of this process."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    buffer = (ctypes.c_uint8 * num_bytes).from_address(int(address))
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class MemoryExchange:
    """Twin of `LibraryExchange` for ranks that are threads: whole blocks, copied between two barriers."""

    def __init__(self, rank: int, everyone: list[MemoryExchange], meet: threading.Barrier, sizes: BlockSizes, allocate) -> None:
        self.rank, self.num_ranks, self.everyone, self.meet, self.sizes = rank, meet.parties, everyone, meet, sizes
        self.memory = BlockMemory(rank, self.num_ranks, sizes, allocate)
        self.places = self.memory.places(sizes)
        self.sent_counts = allocate(4 * self.num_ranks).view(torch.int32)
        everyone.append(self)

    def _carry(self, kind_in: str, kind_out: str, num_bytes: int) -> None:
        self.meet.wait(60)
        for other in self.everyone:
            if other.rank != self.rank:
                source, target = getattr(other.memory, kind_out)[self.rank], getattr(self.memory, kind_in)[other.rank]
                target[:num_bytes] = source[:num_bytes]
        self.meet.wait(60)

    def dispatch(self, call: np.ndarray, bound_tokens: int) -> None:
        self._carry("received", "send", self.sizes.packets(bound_tokens))

    def combine(self, bound_tokens: int) -> None:
        self._carry("returned", "partial", self.sizes.rows(bound_tokens))


def shared_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().clone().share_memory_()


def run_ranks(folder: Path, shape, bound, experts_of, calls: list[list[dict]], bias=None) -> list[list[torch.Tensor]]:
    """Run each rank's calls (arguments of `GpuBaseline.__call__` without `out`) and return their outputs, by rank."""
    num_ranks, everyone = len(calls), []
    meet, outputs, failures = threading.Barrier(num_ranks), [[] for _ in calls], []
    sizes = block_sizes(shape, bound)
    kernels = [EmulatedKernels(folder) for _ in calls]
    layers = []
    for rank in range(num_ranks):
        exchange = MemoryExchange(rank, everyone, meet, sizes, kernels[rank].allocate)
        experts: ExpertWeights = experts_of(shape.experts_of_rank(rank, num_ranks))
        layers.append(GpuBaseline(shape, exchange, sizes, kernels[rank], experts, None if bias is None else shared_copy(bias)))

    def run(rank: int) -> None:
        try:
            for call in calls[rank]:
                call = {name: shared_copy(value) if torch.is_tensor(value) else value for name, value in call.items()}
                out = torch.full_like(call["hidden_states"], float("nan")).share_memory_()
                outputs[rank].append(layers[rank](**call, out=out).clone())
            layers[rank].raise_on_error()
            kernels[rank].check_guards()
        except Exception as error:
            failures.append(error)
            meet.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if failures:
        raise (real or failures)[0]
    return outputs
