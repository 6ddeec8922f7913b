"""Measured parts of a layer that the calibration predicts: expert products, and dispatch and combine without a layer around them.

Sources: results/measure_expert_matmul.py and results/measure_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from inc_runtime.config import OLMOE_1B_7B, Implementation, LayerShape
from inc_runtime.simulator.calibration import Calibration
from inc_runtime.simulator.fast_mode import expected_loads, switches_of
from inc_runtime.simulator.fast_transfers import TransferLayer
from inc_runtime.simulator.measured import Label, Row
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import Forwarding, NetworkSpec, Scenario, SwitchKind
from inc_runtime.simulator.unit_costs import UnitCosts

PRODUCTS = ("expert_matmul", "expert_matmul_gather", "expert_matmul_32_sms")
MEASURED_DEPTH, STEADY_MICROBATCHES = 3, 12
NOTHING = 1e-9


@dataclass(frozen=True)
class ProductPoint:
    """Both expert products in one kernel, evenly routed, on `num_sms` SMs that have the GPU to themselves."""

    implementation: str
    num_rows: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    num_sms: int
    measured: float
    unit: str = "us"

    @property
    def label(self) -> Label:
        return "expert products", "native", self.implementation, 1, self.num_rows, "", "stage_time"

    def predict(self, calibration: Calibration) -> float:
        share = self.num_sms / calibration.total_sms
        machine = replace(calibration, matrix_tflops=calibration.matrix_tflops * share)
        shape = LayerShape(self.num_experts, 1, self.hidden_size, self.intermediate_size)
        tile, rows = calibration.tile_rows, -(-self.num_rows // self.num_experts)
        padded = self.num_experts * -(-rows // tile) * tile
        return float(UnitCosts(shape, machine).experts(padded, self.num_experts))


@dataclass(frozen=True)
class ExchangePlan(LayerPlan):
    """A layer without stages. `served`: the collective whose rows travel, tokens or sums; None: both."""

    served: str | None = None

    @cached_property
    def share(self) -> Calibration:
        free = {"matrix_tflops": 1 / NOTHING, "memory_tbps": 1 / NOTHING, "vector_overhead_us": 0.0, "matrix_overhead_us": 0.0}
        return replace(super().share, **free)  # type: ignore[arg-type]

    @cached_property
    def dispatch_row_bytes(self) -> int:
        return 0 if self.served == "sums" else super().dispatch_row_bytes

    @cached_property
    def combine_row_bytes(self) -> int:
        return 0 if self.served == "tokens" else super().combine_row_bytes


@dataclass(frozen=True)
class ExchangePoint:
    """Dispatch or combine between ranks without a layer: `latency_p50` of a lone microbatch, or GB/s of rows in steady state."""

    placement: str
    implementation: Implementation
    num_ranks: int
    microbatch_tokens: int
    metric: str
    role: str
    measured: float
    unit: str

    @property
    def label(self) -> Label:
        what = f"{self.metric} {self.role}"
        return "collectives", self.placement, self.implementation.value, self.num_ranks, "", str(self.microbatch_tokens), what

    @property
    def kind(self) -> str:
        return "tokens" if self.metric == "egress" or self.role == "dispatch" else "sums"

    def predict(self, calibration: Calibration) -> float:
        count, depth = (1, 1) if self.metric == "latency_p50" else (STEADY_MICROBATCHES, MEASURED_DEPTH)
        scenario = Scenario(
            shape=OLMOE_1B_7B,
            num_ranks=self.num_ranks,
            implementation=self.implementation,
            tokens_per_rank=count * self.microbatch_tokens,
            microbatch_tokens=self.microbatch_tokens,
            depth=depth,
            network=NetworkSpec(SwitchKind.EMULATED, Forwarding.STORE_AND_FORWARD),
            placement=self.placement,
        )
        served = self.kind if self.role.endswith("alone") else None
        plan = ExchangePlan(scenario, calibration, served)
        layer = TransferLayer(plan, expected_loads(plan), switches_of(plan))
        layer.run()
        tokens, sums = layer.last_arrival["tokens"], layer.last_arrival["sums"]
        if self.metric == "latency_p50":
            return tokens[0] if self.kind == "tokens" else sums[0] - tokens[0]
        times = tokens if self.kind == "tokens" else sums
        row_bytes = plan.dispatch_row_bytes if self.kind == "tokens" else plan.combine_row_bytes
        rows = sum(float(one.received.sum()) for one in layer.loads[3:])
        return rows * row_bytes / (times[count - 1] - times[2]) / 1e3


def product_points(rows: Iterable[Row]) -> list[ProductPoint]:
    """Expert products with as many rows for every expert: other distributions are not in the data, only their names."""
    return [
        ProductPoint(
            row["implementation"],
            int(row["num_rows"]),
            int(row["num_experts"]),
            int(row["hidden"]),
            int(row["intermediate"]),
            int(row["num_sms"]),
            float(row["value"]),
        )
        for row in rows
        if row["metric"] == "stage_time" and row["implementation"] in PRODUCTS and row.get("distribution") == "uniform"
    ]


def exchange_points(rows: Iterable[Row]) -> list[ExchangePoint]:
    """Latency and throughput of the collectives at the default number of switch blocks, on the placements that are modelled."""
    known = {implementation.value for implementation in Implementation}
    points = []
    for row in rows:
        usable = row["measurement"] == "collectives" and row["placement"] == "scale_model" and row["implementation"] in known
        # Paced ports and phases are measured as well; what is fitted here is the links and the switches as they are.
        inc = row["implementation"] == Implementation.MEGAKERNEL_INC.value and float(row.get("rank_port_gbps") or 0) == 0
        usable = usable and inc
        steady = row["metric"] in ("egress", "ingress") and row.get("sum_order") == "arrival"
        if usable and (steady or row["metric"] == "latency_p50"):
            where = row["placement"], Implementation(row["implementation"]), int(row["num_ranks"]), int(row["microbatch_tokens"])
            points.append(ExchangePoint(*where, row["metric"], row["role"], float(row["value"]), row["unit"]))
    return points
