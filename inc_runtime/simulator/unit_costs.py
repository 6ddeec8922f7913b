"""What the stages cost on the units of one rank, in us, from the shape of the layer and the calibration.

A vector stage moves bytes through global memory: o + bytes / bandwidth. The matrix stages multiply whole tiles and read the
weights of the experts that have rows: o + the longer of FLOPs / rate and bytes / bandwidth, and more where both are near, as
neither hides the other wholly: (a^4 + b^4)^(1/4).
One kernel for the layer: the rows travel straight from the tokens, and are gathered while the first MatMul loads them, so that
routing and grouping move only records; SwiGLU runs in the epilogue of that MatMul; vector stages run beside the products, and
slow them. One kernel per stage: every stage stores its tensor, and every kernel is launched.
All functions take numbers or numpy arrays of one number per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from inc_runtime.config import LayerShape
from inc_runtime.simulator.calibration import Calibration
from inc_runtime.simulator.traffic import MicrobatchLoads, UnitLoads

ELEMENT_BYTES, RECORD_BYTES = 2, 16
MATRIX_STAGES = {"matmul_gate_up": 2, "matmul_down": 1}
"""The MatMuls, and how many matrices [H, I] of an expert each multiplies by."""
BURST_US = 2000.0
"""Products that run for longer run at the rate that the power of the device sustains."""
ROOFLINE = 4
Rows = Any


@dataclass(frozen=True)
class UnitCosts:
    """Costs on one rank. `fused`: one kernel for the layer; else one kernel per stage. `copies`: mean rows of a token on
    the wire without a multicast. `multicast`: the network copies rows. `library`: a library's collectives carry the rows of
    an unfused layer, packed before; else kernels that pack while they send. `reserved`: share of the SMs that transfers take
    from the products."""

    shape: LayerShape
    calibration: Calibration
    fused: bool = True
    copies: float = 1.0
    reserved: float = 0.0
    multicast: bool = True
    library: bool = False

    @property
    def row_bytes(self) -> int:
        return self.shape.hidden_size * ELEMENT_BYTES

    def vector(self, num_bytes: Rows) -> Rows:
        """A pass over memory. Bandwidth is shared by all SMs, and half of them saturate it: reserving a few costs no bytes."""
        c = self.calibration
        overhead, efficiency = (
            (c.vector_overhead_us, c.fused_vector_efficiency) if self.fused else (c.launch_us, c.vector_efficiency)
        )
        return overhead + num_bytes / (c.memory_tbps * efficiency * 1e6)

    def route(self, tokens: Rows) -> Rows:
        """Reads logits, writes records; with a multicast the rows are sent by the same warps: one read and one write each."""
        sent = 2 * self.row_bytes if self.multicast else 0
        per_token = 4 * self.shape.num_experts + RECORD_BYTES * self.shape.top_k + sent
        c = self.calibration
        return self.vector(per_token * tokens) + (c.fused_route_ns if self.fused else c.route_ns) / 1e3 * tokens

    def pack(self, copies: Rows) -> Rows:
        """Rows as they are sent without a multicast; an unfused layer then launches its exchange."""
        if self.fused:
            return self.vector(2 * self.row_bytes * copies)
        if not self.library:
            return self.calibration.launch_us + 0.0 * np.asarray(copies)
        read = copies / max(1.0, self.copies)
        return self.vector(self.row_bytes * (read + copies)) + self.calibration.exchange_us

    def group(self, pairs: Rows, received: Rows) -> Rows:
        return self.vector(RECORD_BYTES * pairs if self.fused else self.row_bytes * (pairs + received))

    def swiglu(self, pairs: Rows) -> Rows:
        if self.fused:
            return np.zeros_like(np.asarray(pairs, float))
        return self.vector(3 * self.shape.intermediate_size * ELEMENT_BYTES * pairs)

    def matmul(self, stage: str, padded: Rows, active: Rows) -> Rows:
        """One MatMul over `padded` rows of `active` experts, with nothing beside it."""
        c, s = self.calibration, self.shape
        weights = s.hidden_size * s.intermediate_size * MATRIX_STAGES[stage]
        rate = c.matrix_tflops * (c.fused_rate * (1 - self.reserved) if self.fused else 1.0) * 1e6
        flops_us = 2 * weights * padded / rate
        if not self.fused:
            # Both MatMuls take 3 / MATRIX_STAGES of one.
            both = flops_us * 3 / MATRIX_STAGES[stage]
            flops_us = flops_us * (1 + (1 / c.sustained_rate - 1) * np.maximum(0, 1 - BURST_US / np.maximum(both, 1e-9)))
        bytes_us = ELEMENT_BYTES * weights * active / (c.memory_tbps * 1e6)
        overhead = c.matrix_overhead_us / 2 if self.fused else c.launch_us + c.expert_us * active
        return overhead + (flops_us**ROOFLINE + bytes_us**ROOFLINE) ** (1 / ROOFLINE)

    def beside(self, loads: MicrobatchLoads | UnitLoads) -> Rows:
        """Time of the vector stages of a microbatch: [..., W]. They run beside the products of a fused kernel."""
        sent = 0.0 if self.multicast else self.pack(loads.sent_copies)
        last = self.copy_out(loads.tokens) if self.multicast else self.global_reduce(loads.tokens)
        return (
            self.route(loads.tokens)
            + sent
            + self.group(loads.pairs, loads.received)
            + self.reduce(loads.pairs, loads.received)
            + last
        )

    def products(self, loads: MicrobatchLoads | UnitLoads) -> dict[str, Rows]:
        """Both MatMuls of a microbatch by stage: [..., W] each."""
        slower = self.calibration.interference * self.beside(loads) if self.fused else 0.0
        return {
            stage: self.matmul(stage, loads.padded, loads.active) + slower * matrices / 3
            for stage, matrices in MATRIX_STAGES.items()
        }

    def reduce(self, pairs: Rows, received: Rows) -> Rows:
        """Weighted sums of each received row; an unfused layer then launches its exchange."""
        cost = self.vector(self.row_bytes * (pairs + received))
        if self.fused:
            return cost
        return cost + (self.calibration.exchange_us if self.library else self.calibration.launch_us)

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
