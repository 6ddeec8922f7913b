"""What the stages cost on the units of one rank, in us, from the shape of the layer and the calibration.

A vector stage moves bytes through global memory: o + bytes / bandwidth. The matrix stages multiply whole tiles, or read the
weights of the experts that have rows, whichever takes longer: o + max(FLOPs / rate, bytes / bandwidth). In a fused kernel
SwiGLU runs in the epilogue of the first MatMul and costs nothing of its own.
All functions take numbers or numpy arrays of one number per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from inc_runtime.config import LayerShape
from inc_runtime.simulator.calibration import Calibration

ELEMENT_BYTES = 2
MATRIX_STAGES = ("matmul_gate_up", "matmul_down")
Rows = Any


@dataclass(frozen=True)
class UnitCosts:
    """Costs on one rank. `fused`: one kernel for the layer; else one kernel per stage. `copies`: mean rows of a token on
    the wire without a multicast. `reserved`: share of the SMs that transfers take from both classes of unit."""

    shape: LayerShape
    calibration: Calibration
    fused: bool = True
    copies: float = 1.0
    reserved: float = 0.0

    @property
    def row_bytes(self) -> int:
        return self.shape.hidden_size * ELEMENT_BYTES

    def vector(self, num_bytes: Rows) -> Rows:
        c = self.calibration
        overhead = c.vector_overhead_us if self.fused else c.launch_us
        # Bandwidth is shared by all SMs, and half of them saturate it: reserving a few costs issue slots, not bytes.
        return overhead + num_bytes / (c.memory_tbps * c.vector_efficiency * 1e6)

    def route(self, tokens: Rows) -> Rows:
        return self.vector(2 * self.row_bytes * tokens)

    def pack(self, copies: Rows) -> Rows:
        return self.vector(2 * self.row_bytes * copies)

    def group(self, pairs: Rows) -> Rows:
        return self.vector(2 * self.row_bytes * pairs)

    def swiglu(self, pairs: Rows) -> Rows:
        if self.fused:
            return np.zeros_like(np.asarray(pairs, float))
        return self.vector(3 * self.shape.intermediate_size * ELEMENT_BYTES * pairs)

    def matmul(self, stage: str, padded: Rows, active: Rows) -> Rows:
        """One MatMul over `padded` rows of `active` experts; gate and up are two thirds of the FLOPs and of the weights."""
        c, s = self.calibration, self.shape
        weights = s.hidden_size * s.intermediate_size * (2 if stage == "matmul_gate_up" else 1)
        flops_us = 2 * weights * padded / (c.matrix_tflops * (1 - self.reserved) * 1e6)
        bytes_us = ELEMENT_BYTES * weights * active / (c.memory_tbps * 1e6)
        overhead = c.matrix_overhead_us / 2 if self.fused else c.launch_us
        return overhead + np.maximum(flops_us, bytes_us)

    def experts(self, padded: Rows, active: Rows) -> Rows:
        """Both MatMuls: us."""
        return self.matmul("matmul_gate_up", padded, active) + self.matmul("matmul_down", padded, active)

    def reduce(self, pairs: Rows, received: Rows) -> Rows:
        return self.vector(self.row_bytes * (pairs + received))

    def global_reduce(self, tokens: Rows) -> Rows:
        return self.vector(self.row_bytes * (self.copies + 1) * tokens)

    def copy_out(self, tokens: Rows) -> Rows:
        return self.vector(2 * self.row_bytes * tokens)

    def accumulate(self, rows: Rows) -> Rows:
        """An emulated switch adds the partial sums of one rank, in registers and as they come: no pass over memory."""
        return self.calibration.switch_overhead_us + 0.0 * np.asarray(rows)

    def regroup(self, rows: Rows) -> Rows:
        """An emulated switch reads the routing of one sender; the rows themselves move with the put."""
        return self.calibration.switch_overhead_us + 0.0 * np.asarray(rows)

    def of_stage(self, stage: str, rows: int) -> float:
        """Cost of a stage that a role program itself announces."""
        return float(getattr(self, stage)(rows))
