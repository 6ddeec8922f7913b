"""The stages of the MoE layer, as data: eight with in-network computing, ten without.

Every implementation is described by this table: which stages it runs, on which class of unit, and which tensors it stores
in global memory. Source: post, Fusing the layer into one kernel.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from inc_runtime.config import Implementation


class Unit(enum.Enum):
    """The class of hardware unit that a stage runs on."""

    MATRIX = "matrix units"
    VECTOR = "vector units"
    NETWORK = "in-network element"


@dataclass(frozen=True)
class Stage:
    """One stage. `number` is its place in the eight; 0 marks the two that in-network computing removes.

    `stores` is the tensor it produces; `local_when_fused` that a fused kernel keeps it on chip; `in_heap` that the network
    reads or writes it, so that it lies in the symmetric heap.
    """

    name: str
    number: int
    unit: Unit
    stores: str
    local_when_fused: bool = False
    in_heap: bool = False


ROUTE = Stage("route", 1, Unit.VECTOR, "tokens and routing records", in_heap=True)
PACK = Stage("pack", 0, Unit.VECTOR, "tokens packed per destination", in_heap=True)
DISPATCH = Stage("dispatch", 2, Unit.NETWORK, "received rows", in_heap=True)
GROUP = Stage("group", 3, Unit.VECTOR, "rows grouped by expert")
MATMUL_GATE_UP = Stage("matmul_gate_up", 4, Unit.MATRIX, "gate and up projections", local_when_fused=True)
SWIGLU = Stage("swiglu", 5, Unit.VECTOR, "activations", local_when_fused=True)
MATMUL_DOWN = Stage("matmul_down", 6, Unit.MATRIX, "expert outputs", local_when_fused=True)
REDUCE = Stage("reduce", 7, Unit.VECTOR, "partial sums", in_heap=True)
COMBINE = Stage("combine", 8, Unit.NETWORK, "token sums", in_heap=True)
GLOBAL_REDUCE = Stage("global_reduce", 0, Unit.VECTOR, "sums over the ranks")

TEN_STAGES = (
    ROUTE,
    PACK,
    DISPATCH,
    GROUP,
    MATMUL_GATE_UP,
    SWIGLU,
    MATMUL_DOWN,
    REDUCE,
    COMBINE,
    GLOBAL_REDUCE,
)
EIGHT_STAGES = tuple(stage for stage in TEN_STAGES if stage.number)

STAGES_OF = {
    Implementation.BASELINE: TEN_STAGES,
    Implementation.MEGAKERNEL: TEN_STAGES,
    Implementation.MEGAKERNEL_PHASED: TEN_STAGES,
    Implementation.MEGAKERNEL_INC: EIGHT_STAGES,
    Implementation.MEGAKERNEL_INC_PHASED: EIGHT_STAGES,
}


def stored_tensors(implementation: Implementation) -> tuple[str, ...]:
    """Tensors that the implementation stores in global memory and reads back: 10, 7 or 5 round trips."""
    fused = implementation is not Implementation.BASELINE
    return tuple(s.stores for s in STAGES_OF[implementation] if not (fused and s.local_when_fused))
