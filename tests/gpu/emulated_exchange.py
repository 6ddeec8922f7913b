"""The kernels of ranks and switches on the CPU: every block a process, every CUDA thread a thread, all PEs at once.

The sources are copied, their inline assembly is replaced by what it means on x86, and blocks of a switch get 64 threads. It
shows that indices, words and waits are right, not what a GPU's memory allows: x86 keeps stores in order.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from inc_runtime.compile_cache import Verbs
from inc_runtime.config import SumOrder
from inc_runtime.device.arguments import (
    ERROR_RECORD,
    EXCHANGE_ARGUMENTS,
    EXCHANGE_RESULT,
    SWITCH_ARGUMENTS,
    WORKSPACE,
    header_text,
    heap_argument,
)
from inc_runtime.device.heap_options import model_options
from inc_runtime.heap_layout import BF16, STARTS_AT_ZERO, Dims, Kind
from inc_runtime.protocol import Role, World
from switch_emulator.launch_switch import has_clerk, kernel_of
from tests.gpu.exchange_program import differing_regions
from tests.gpu.expected import Case, expected

FOLDER = Path(__file__).resolve().parent / "emulated"
ROOT = FOLDER.parents[2]
DEVICE_FOLDERS = ("inc_runtime/device", "switch_emulator/device")
SWITCH_THREADS, RANK_THREADS, BLOCKS, CLERK_THREADS = 64, 64, 2, 32
WAIT_LIMIT_S = 60.0
MEANING = {
    "bar.sync": "::team->wait();",
    "bar.red.and.pred": "every = ::team->all(threadIdx.x, good);",
    "ld.acquire": "sched_yield(), value = __atomic_load_n(static_cast<const uint64_t*>(word), __ATOMIC_ACQUIRE);",
    "ld.relaxed": "sched_yield(), value = __atomic_load_n(static_cast<const uint64_t*>(word), __ATOMIC_ACQUIRE);",
    "st.release": "__atomic_store_n(static_cast<uint64_t*>(word), value, __ATOMIC_RELEASE);",
    "st.relaxed": "__atomic_store_n(static_cast<uint64_t*>(word), value, __ATOMIC_RELEASE);",
    "fence.acq_rel": "__atomic_thread_fence(__ATOMIC_SEQ_CST);",
    "ld.global.L1": "std::memcpy(&v, source, 16);",
    "st.global.L1": "std::memcpy(target, &v, 16);",
    "%globaltimer": "now = now_ns();",
}
"""What each statement of inline assembly does, by what is in it."""

CONSTANTS = {
    "extern __shared__ __align__(16) char dynamic[];": "alignas(16) static char dynamic[1 << 16];",
    "SWITCH_THREADS = 512;": f"SWITCH_THREADS = {SWITCH_THREADS};",
    "POLLS_BEFORE_SLEEP = 4096;": "POLLS_BEFORE_SLEEP = 16;",
    "WAIT_SLEEP_NS = 100, IDLE_SLEEP_NS = 1000;": "WAIT_SLEEP_NS = 20'000, IDLE_SLEEP_NS = 100'000;",
}
"""Text of the sources that is replaced: small blocks, and waits that leave the few processors to others soon."""


def without_assembly(text: str) -> str:
    """The source with its inline assembly replaced. Raises KeyError for a statement that has no meaning here."""

    def replaced(found: re.Match) -> str:
        return next((meaning for word, meaning in MEANING.items() if word in found[0]), None) or MEANING[found[0]]

    return re.sub(r"asm volatile\(.*?\);", replaced, text, flags=re.DOTALL)


@cache
def library(folder: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    """Ranks and switches of one communication model, as `options` of the compiler choose it, built in `folder`."""
    copy = folder / ("exchange" + "".join(options))
    for device in DEVICE_FOLDERS:
        (copy / device).mkdir(parents=True)
        for path in (ROOT / device).glob("*.*"):
            if path.suffix not in (".cuh", ".cu", ".h"):
                continue
            text = without_assembly(path.read_text())
            for old, new in CONSTANTS.items():
                text = text.replace(old, new)
            (copy / device / path.name).write_text(text)
    (copy / DEVICE_FOLDERS[0] / "arguments.h").write_text(header_text())
    includes = [f"-I{path}" for path in (FOLDER, copy, *(copy / device for device in DEVICE_FOLDERS))]
    command = [shutil.which("g++") or "g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", *options]
    target = copy / "emulated.so"
    subprocess.run([*command, *includes, "-o", str(target), str(FOLDER / "emulate_exchange.cpp")], check=True, timeout=280)
    return ctypes.CDLL(str(target))


class SharedMemory:
    """Memory that forked processes share, handed out from the front."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._used = 0

    def array(self, dtype: np.dtype, shape: tuple[int, ...] = (), *, fill: int = 0) -> np.ndarray:
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        taken = self._bytes[self._used : self._used + size]
        assert len(taken) == size, "the shared memory is too small"
        self._used += -(-size // 256) * 256
        taken[:] = fill
        return taken.view(dtype).reshape(shape)


def address_of(array: np.ndarray) -> int:
    return array.ctypes.data


class EmulatedWorld:
    """All PEs of one case. `poison`: rows and records begin as NaN bytes."""

    def __init__(self, folder: Path, case: Case, world: World) -> None:
        self.case, self.world, self.layout = case, world, case.layout(world)
        dims = self.layout.dims
        self._library = library(folder, tuple(model_options(dims)))
        self._memory = SharedMemory(world.num_pes * (self.layout.heap_bytes + WORKSPACE.itemsize + (1 << 20)) + (16 << 20))
        self.slabs = [self._memory.array(np.uint8, (self.layout.heap_bytes,)) for _ in range(world.num_pes)]
        self.regions = [self.layout.carve(world.role_of(pe), slab) for pe, slab in enumerate(self.slabs)]
        self.heaps, self.records, self.workspaces = [], [], []
        for pe in range(world.num_pes):
            self._lay_out(pe, dims)
        self.switches: list[int] = []
        for pe in range(world.num_ranks, world.num_pes):
            role = world.role_of(pe)
            arguments = np.zeros((), SWITCH_ARGUMENTS)
            arguments["rank_order"] = case.pipeline.sum_order is SumOrder.RANK
            threads = SWITCH_THREADS + CLERK_THREADS * has_clerk(role, dims.model)
            self.switches += self._start(pe, kernel_of(role, dims.model), arguments, threads, SWITCH_THREADS)

    def _lay_out(self, pe: int, dims: Dims) -> None:
        role = self.world.role_of(pe)
        for name, region in self.regions[pe].items():
            kind = self.layout.region(role, name).kind
            region.reshape(-1).view("u1")[...] = 0 if kind is Kind.FLAGS or name in STARTS_AT_ZERO else 0xFF
        heap = heap_argument(self.layout, pe, [address_of(slab) for slab in self.slabs], wait_limit_s=WAIT_LIMIT_S)
        self.workspaces.append(self._memory.array(WORKSPACE))
        self.records.append(self._memory.array(ERROR_RECORD))
        heap["workspace"], heap["error_record"] = address_of(self.workspaces[-1]), address_of(self.records[-1])
        if role is Role.COMBINE_SWITCH and dims.model.in_network:
            sums = self.layout.region(role, "accumulators").num_bytes(dims)
            heap["accumulators"] = address_of(self._memory.array(np.uint8, (sums,), fill=0xFF))
        if role is Role.COMPUTE_RANK:
            tokens = dims.depth * dims.microbatch_tokens * dims.num_ranks
            for table in ("group_rows", "row_of_token", "token_of_row", "ranks_of_token"):
                heap[table] = address_of(self._memory.array(np.int32, (tokens,)))
        self.heaps.append(heap)

    def _start(self, pe: int, kernel: str, arguments: np.ndarray, threads: int, team_threads: int) -> list[int]:
        blocks = 1 if kernel == "stop_kernel" else BLOCKS
        pids = (ctypes.c_int * blocks)()
        heap = self.heaps[pe]
        pointers = ctypes.c_void_p(address_of(heap)), ctypes.c_void_p(address_of(arguments))
        assert self._library.start(kernel.encode(), *pointers, blocks, threads, team_threads, pids) == 0, kernel
        return list(pids)

    def exchange(self, call: int) -> list[np.ndarray]:
        """One call of all ranks. Returns their outputs. Raises AssertionError with what a PE has reported."""
        outputs, processes = [], []
        for rank in range(self.world.num_ranks):
            given, pipeline = self.case.given(call, rank), self.case.pipeline
            arguments = np.zeros((), EXCHANGE_ARGUMENTS)
            for name, array in (
                ("tokens", given.tokens), ("expert_ids", given.expert_ids.astype(np.int32)), ("weights", given.weights)
            ):  # fmt: skip
                shared = self._memory.array(array.dtype, array.shape)
                shared[...] = array
                arguments[name] = address_of(shared)
            outputs.append(self._memory.array(BF16, given.tokens.shape, fill=0xFF))
            arguments["output"], arguments["result"] = address_of(outputs[-1]), address_of(self._memory.array(EXCHANGE_RESULT))
            arguments["num_tokens"], arguments["bound_tokens"] = len(given.tokens), pipeline.bound_tokens
            arguments["num_experts"], arguments["top_k"] = self.case.shape.num_experts, self.case.shape.top_k
            arguments["layer"], arguments["num_microbatches"] = call, pipeline.num_microbatches
            self.heaps[rank]["barrier_after_dispatch"] = pipeline.barrier_after_dispatch
            processes += self._start(rank, "exchange_kernel", arguments, RANK_THREADS, RANK_THREADS)
        self._finish(processes)
        return outputs

    def _finish(self, processes: list[int]) -> None:
        statuses = [self._library.finish(pid) for pid in processes]
        reports = {pe: record for pe, record in enumerate(self.records) if record["state"]}
        assert not any(statuses) and not reports, f"statuses {statuses}, reports {reports}"

    def stop(self) -> None:
        """Every rank raises its stop words; the switches end."""
        if self.layout.dims.direct:
            return
        for rank in range(self.world.num_ranks):
            self._finish(self._start(rank, "stop_kernel", np.zeros((), SWITCH_ARGUMENTS), 32, 32))
        self._finish(self.switches)


def check_case(folder: Path, case: Case, world: World, on_call: Callable[[int, EmulatedWorld], None] = lambda *_: None) -> None:
    """Every region and output of every call equals what the role programs leave. Raises AssertionError."""
    emulated = EmulatedWorld(folder, case, world)
    for call in range(len(case.num_tokens)):
        memory, wanted = expected(case, world, call + 1)
        outputs = emulated.exchange(call)
        on_call(call, emulated)
        for rank, (seen, right) in enumerate(zip(outputs, wanted, strict=True)):
            assert (seen == right).all(), f"call {call}: output of rank {rank} differs"
    emulated.stop()
    for pe in range(world.num_pes):
        found = differing_regions(emulated.regions[pe], memory[pe], Verbs.DIRECT, case.model)
        assert not found, f"{world.name_of(pe)}: {found}"
