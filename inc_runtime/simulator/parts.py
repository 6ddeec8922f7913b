"""Measured parts of a layer that the calibration predicts in closed form: expert products, and the stages of the Baseline.

Sources: results/measure_expert_matmul.py, results/measure_moe_layer.py, and published products (results/data/machine_figures_*).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from inc_runtime.config import Implementation, LayerShape
from inc_runtime.simulator.calibration import Calibration
from inc_runtime.simulator.fast_mode import expected_loads
from inc_runtime.simulator.measured import MODELLED_PLACEMENTS, Label, Row, number_of, scenario_of, shape_of_row
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import Scenario
from inc_runtime.simulator.unit_costs import MATRIX_STAGES, UnitCosts

LIBRARY = "grouped_mm"
OWN_KERNEL = "expert_matmul"
OWN_KERNELS = (OWN_KERNEL, f"{OWN_KERNEL}_gather", f"{OWN_KERNEL}_32_sms")
PRODUCTS = (LIBRARY, *OWN_KERNELS)
EXCHANGES = ("dispatch", "combine")


@dataclass(frozen=True)
class ProductPoint:
    """Grouped products without a layer. `stages`: one MatMul, or both; a kernel of ours does both in one launch.

    `even`: as many rows for every expert, else random. `num_sms` 0: all that a rank has.
    """

    implementation: str
    placement: str
    num_ranks: int
    num_rows: int
    num_experts: int
    shape: LayerShape
    num_sms: int
    stages: tuple[str, ...]
    even: bool
    measured: float
    unit: str = "us"

    plural: ClassVar[str] = "products"

    @property
    def label(self) -> Label:
        what = " + ".join(self.stages) if len(self.stages) == 1 else "both products"
        return "expert products", self.placement, self.implementation, self.num_ranks, self.num_rows, "", what

    def predict(self, calibration: Calibration) -> float:
        machine = calibration.on_placement(self.placement, self.num_ranks)
        if self.num_sms:
            machine = replace(machine, matrix_tflops=machine.matrix_tflops * self.num_sms / machine.total_sms)
        costs = UnitCosts(self.shape, machine, fused=False)
        tile, rows = machine.tile_rows, self.num_rows / self.num_experts
        # Of random rows, the last tile of an expert is half full on average.
        padded = self.num_experts * (-(-rows // tile) * tile if self.even else rows + tile / 2)
        total = sum(float(costs.matmul(stage, padded, self.num_experts)) for stage in self.stages)
        if self.implementation in OWN_KERNELS:
            total -= machine.launch_us + machine.expert_us * self.num_experts
        return total


@dataclass(frozen=True)
class StagePoint:
    """One stage of the unfused layer, a kernel of its own or a library's collective."""

    scenario: Scenario
    stage: str
    measured: float
    unit: str = "us"

    plural: ClassVar[str] = "stages"

    @property
    def label(self) -> Label:
        s = self.scenario
        return "stage", s.placement, s.implementation.value, s.num_ranks, s.tokens_per_rank, "", self.stage

    def predict(self, calibration: Calibration) -> float:
        plan = LayerPlan(self.scenario, calibration)
        loads, costs = expected_loads(plan)[0], plan.costs
        if self.stage in MATRIX_STAGES:
            return float(costs.products(loads)[self.stage].max())
        if self.stage in EXCHANGES:
            row = plan.dispatch_row_bytes + plan.record_bytes if self.stage == "dispatch" else plan.combine_row_bytes
            away = loads.rows.sum(axis=1) - loads.rows.diagonal()
            return float(away.max()) * row / plan.port + calibration.exchange_us + plan.share.latency_us
        found: dict[str, Any] = {
            "route": lambda: costs.route(loads.tokens),
            "pack": lambda: costs.pack(loads.sent_copies) - calibration.exchange_us,
            "group": lambda: costs.group(loads.pairs, loads.received),
            "swiglu": lambda: costs.swiglu(loads.pairs),
            "reduce": lambda: costs.reduce(loads.pairs, loads.received) - calibration.exchange_us,
            "global_reduce": lambda: costs.global_reduce(loads.tokens),
        }
        return float(found[self.stage]().max())


def stage_points(rows: Iterable[Row]) -> list[StagePoint]:
    """Stages of the Baseline with a library's collectives, evenly routed."""
    return [
        StagePoint(scenario_of(row), row["stage"], float(row["value"]))
        for row in rows
        if row["metric"] == "stage_time" and row["implementation"] == Implementation.BASELINE.value
        if row["placement"] == "native" and (row.get("routing") or "uniform") == "uniform"
    ]


def product_points(rows: Iterable[Row]) -> list[ProductPoint]:
    """Expert products: alone on a device with as many rows for every expert, or beside a layer with random ones."""
    points = []
    for row in rows:
        if row["implementation"] not in PRODUCTS or row["placement"] not in MODELLED_PLACEMENTS:
            continue
        shape, ranks, stages, even, num_sms = shape_of_row(row), int(row["num_ranks"]), tuple(MATRIX_STAGES), True, 0
        num_rows, num_experts = number_of(row, "num_rows", number_of(row, "rows", 0)), shape.num_experts
        if row["metric"] == "stage_time" and row["measurement"] == "machine":
            stages = (row["stage"],)
        elif row["metric"] == "stage_time" and row.get("distribution") == "uniform":
            num_sms = int(row["num_sms"])
        elif row["metric"] == "layer_time" and (row.get("routing") or "uniform") == "uniform":
            num_rows, num_experts, even = number_of(row, "num_tokens", 0) * shape.top_k, -(-shape.num_experts // ranks), False
        else:
            continue
        where, value = (row["implementation"], row["placement"], ranks), float(row["value"])
        points.append(ProductPoint(*where, num_rows, num_experts, shape, num_sms, stages, even, value))
    return points
