"""Build and launch the expert products (`expert_matmul.cu`): MatMul 1 with SwiGLU and MatMul 2 in one launch.

Needs a Hopper GPU (compute capability 9.0), nvcc for sm_90a, and torch for memory and streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from inc_runtime.backends.cuda_driver import Gpu
from inc_runtime.compile_cache import build
from megakernel.device_arguments import HEADERS, MAX_LOCAL_EXPERTS, PRODUCTS_ARGUMENTS, TILE_ROWS
from megakernel.launch_megakernel import tensor_map

SOURCE = Path(__file__).resolve().parent / "expert_matmul.cu"
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
    maps: dict[str, np.ndarray] = field(default_factory=dict)


class ExpertMatmul:
    """Builds and loads the kernels, and launches them on torch's current stream."""

    def __init__(self, max_rows: int, shape: Shape) -> None:
        if shape.hidden % 256 or shape.intermediate % 128 or not 1 <= shape.num_experts <= MAX_LOCAL_EXPERTS:
            raise ValueError(f"{shape}: needs hidden % 256 == 0, intermediate % 128 == 0 and 1 to {MAX_LOCAL_EXPERTS} experts")
        torch.zeros(1, device="cuda")
        self.gpu, self.shape = Gpu(torch.cuda.current_device()), shape
        cubin = build(SOURCE, arch=self.gpu.arch, headers=HEADERS).path
        self.functions = {name: self.gpu.function(cubin, name) for name in KERNELS}
        self.activation = torch.empty(max_rows, shape.intermediate, dtype=torch.bfloat16, device="cuda")
        self.output = torch.empty(max_rows, shape.hidden, dtype=torch.bfloat16, device="cuda")
        max_row_tiles = max_rows // TILE_ROWS + shape.num_experts
        self.flags = torch.zeros(max_row_tiles * (shape.intermediate // 128), dtype=torch.int64, device="cuda")
        self.ticket = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.error = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.own_maps = {"activation_rows": tensor_map(self.activation, 64), "output_rows": tensor_map(self.output, 64)}
        self.magic = 0
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count

    def launch(self, inputs: Inputs, kind: str, *, blocks: int = 0, weighted: bool = False, lag_tiles: int | None = None,
               arrival: torch.Tensor | None = None, limit: int = WAIT_LIMIT_CLOCKS) -> None:
        if not inputs.maps:
            inputs.maps = {
                "input_rows": tensor_map(inputs.rows, 64),
                "gate_up_weights": tensor_map(inputs.gate_up.flatten(0, 1), 128),
                "down_weights": tensor_map(inputs.down.flatten(0, 1), 128),
            }
        self.magic += 1
        blocks = blocks or self.num_sms
        arguments = np.zeros((), PRODUCTS_ARGUMENTS)
        matmul = arguments["matmul"]
        for name, words in (inputs.maps | self.own_maps).items():
            matmul[name]["words"] = words
        addresses = {
            "token_rows": inputs.tokens, "row_to_token": inputs.row_to_token, "activation": self.activation,
            "output": self.output, "activation_flags": self.flags, "ticket_word": self.ticket, "error_record": self.error,
        }  # fmt: skip
        for name, tensor in addresses.items():
            matmul[name] = tensor.data_ptr()
        matmul["routing_weight"] = inputs.weight.data_ptr() if weighted else 0
        matmul["row_tile_arrival"] = arrival.data_ptr() if arrival is not None else 0
        matmul["wait_limit_clocks"] = limit
        matmul["num_experts"], matmul["hidden"] = self.shape.num_experts, self.shape.hidden
        matmul["intermediate"] = self.shape.intermediate
        matmul["lag_tiles"] = 2 * blocks if lag_tiles is None else lag_tiles  # every block has one tile at work and one drawn
        arguments["expert_row_offset"], arguments["expert_row_count"] = inputs.offsets.data_ptr(), inputs.counts.data_ptr()
        arguments["magic"] = self.magic
        self.gpu.launch(
            self.functions[kind], [arguments], num_blocks=blocks, num_threads=THREADS, shared_bytes=SHARED_BYTES, resident=False,
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def raise_on_error(self) -> None:
        record = int(self.error.item())
        if record:
            self.error.zero_()
            raise TimeoutError(f"block {record >> 40} gave up at wait {record >> 32 & 255}, detail {record & 0xFFFFFFFF}")
