"""Build and launch the expert products (`expert_matmul.cu`): MatMul 1 with SwiGLU and MatMul 2 in one launch.

Needs a Hopper GPU (compute capability 9.0), the CUDA driver, nvcc for sm_90a, and torch for memory and streams.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

SOURCE = Path(__file__).resolve().parent / "expert_matmul.cu"
TILE_ROWS = 128
WAIT_LIMIT_CLOCKS = 1 << 30  # about 0.6 s
SHARED_BYTES = 232448  # the 227 KB that a block can have; sizeof(inc::SharedStorage) is checked against it
THREADS = 384
KERNELS = ("expert_matmul", "expert_matmul_gather")


@dataclass(frozen=True)
class Shape:
    """Experts of one rank; the default is OLMoE-1B-7B on one of four ranks."""

    num_experts: int = 16
    hidden: int = 2048
    intermediate: int = 1024


def build_cubin(directory: Path) -> Path:
    """Compile the kernel for sm_90a with nvcc into `directory`, named by a hash of its sources."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    digest = hashlib.sha256()
    for path in sorted([SOURCE, *SOURCE.parent.glob("device/*.cuh"), *SOURCE.parent.glob("stages/*.cuh")]):
        digest.update(path.read_bytes())
    cubin = directory / f"expert_matmul_{digest.hexdigest()[:16]}.cubin"
    if not cubin.exists():
        target = "-gencode=arch=compute_90a,code=sm_90a"
        subprocess.run([nvcc, "-std=c++17", "-O3", target, "-cubin", "-o", str(cubin), str(SOURCE)], check=True)
    return cubin


class Driver:
    """The few CUDA driver calls that are needed here, each checked."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name} failed with {status}: {text.value!r}")

    def tensor_map(self, matrix: torch.Tensor, box_rows: int) -> bytes:
        """Tensor map of a row-major bf16 matrix [rows, columns], boxes of `box_rows` x 64, 128-byte swizzle."""
        rows, columns = matrix.shape
        storage = ctypes.create_string_buffer(128 + 64)
        address = (ctypes.addressof(storage) + 63) // 64 * 64
        bfloat16, swizzle_128, promote_256 = 9, 3, 3
        self.call(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(address), bfloat16, 2, ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns * 2),
            (ctypes.c_uint32 * 2)(64, box_rows), (ctypes.c_uint32 * 2)(1, 1), 0, swizzle_128, promote_256, 0,
        )
        return ctypes.string_at(address, 128)


@dataclass
class Inputs:
    """One set of inputs on the GPU. Rows are grouped by expert; `offsets` may leave gaps between experts."""

    rows: torch.Tensor  # [num_rows, H] bf16
    gate_up: torch.Tensor  # [E, 2I, H] bf16
    down: torch.Tensor  # [E, H, I] bf16
    offsets: torch.Tensor  # [E] int32
    counts: torch.Tensor  # [E] int32
    ends: torch.Tensor  # [E] int32, for torch's grouped_mm (no gaps)
    weight: torch.Tensor  # [num_rows] float32
    tokens: torch.Tensor  # [num_tokens, H] bf16, for gathering
    row_to_token: torch.Tensor  # [num_rows] int32
    count_list: list[int]
    maps: dict[str, bytes] = field(default_factory=dict)


class ExpertMatmul:
    """Loads the kernels and launches them on torch's current stream."""

    def __init__(self, cubin: Path, max_rows: int, shape: Shape) -> None:
        if shape.hidden % 256 or shape.intermediate % 128 or not 1 <= shape.num_experts <= 128:
            raise ValueError(f"{shape}: needs hidden % 256 == 0, intermediate % 128 == 0 and 1 to 128 experts")
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.driver = Driver()
        self.shape = shape
        image, module = cubin.read_bytes(), ctypes.c_void_p()
        self.driver.call("cuModuleLoadData", ctypes.byref(module), image)
        self.functions = {}
        for name in KERNELS:
            function = ctypes.c_void_p()
            self.driver.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self.driver.call("cuFuncSetAttribute", function, 8, SHARED_BYTES)
            self.functions[name] = function
        self.activation = torch.empty(max_rows, shape.intermediate, dtype=torch.bfloat16, device="cuda")
        self.output = torch.empty(max_rows, shape.hidden, dtype=torch.bfloat16, device="cuda")
        max_row_tiles = max_rows // TILE_ROWS + shape.num_experts
        self.flags = torch.zeros(max_row_tiles * (shape.intermediate // 128), dtype=torch.int64, device="cuda")
        self.ticket = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.error = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.own_maps = [self.driver.tensor_map(self.activation, 64), self.driver.tensor_map(self.output, 64)]
        self.magic = 0
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count

    def launch(self, inputs: Inputs, kind: str, *, blocks: int = 0, weighted: bool = False, lag_tiles: int | None = None,
               arrival: torch.Tensor | None = None, arrival_word: int = 0, limit: int = WAIT_LIMIT_CLOCKS) -> None:
        if not inputs.maps:
            inputs.maps = {
                "rows": self.driver.tensor_map(inputs.rows, 64),
                "gate_up": self.driver.tensor_map(inputs.gate_up.flatten(0, 1), 128),
                "down": self.driver.tensor_map(inputs.down.flatten(0, 1), 128),
            }
        self.magic += 1
        blocks = blocks or self.num_sms
        if lag_tiles is None:
            lag_tiles = 2 * blocks  # every block has one tile at work and one drawn
        packed = b"".join([inputs.maps["rows"], inputs.maps["gate_up"], self.own_maps[0], inputs.maps["down"],
                           self.own_maps[1]])
        packed += struct.pack(
            "11Q2Qq4i", inputs.tokens.data_ptr(), inputs.row_to_token.data_ptr(), self.activation.data_ptr(),
            self.output.data_ptr(), inputs.weight.data_ptr() if weighted else 0, inputs.offsets.data_ptr(),
            inputs.counts.data_ptr(), arrival.data_ptr() if arrival is not None else 0, self.flags.data_ptr(),
            self.ticket.data_ptr(), self.error.data_ptr(), arrival_word, self.magic, limit,
            self.shape.num_experts, self.shape.hidden, self.shape.intermediate, lag_tiles,
        )
        buffer = ctypes.create_string_buffer(packed, 768)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.driver.call("cuLaunchKernel", self.functions[kind], blocks, 1, 1, THREADS, 1, 1, SHARED_BYTES, stream,
                         parameters, None)

    def raise_on_error(self) -> None:
        record = int(self.error.item())
        if record:
            self.error.zero_()
            raise TimeoutError(f"block {record >> 40} gave up at wait {record >> 32 & 255}, detail {record & 0xFFFFFFFF}")
