"""Dispatch and combine as measured without a layer around them, and the model of a layer without stages that predicts them.

Source: results/measure_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from inc_runtime.config import OLMOE_1B_7B, Implementation
from inc_runtime.simulator.calibration import Calibration
from inc_runtime.simulator.fast_mode import expected_loads, switches_of
from inc_runtime.simulator.fast_transfers import TransferLayer
from inc_runtime.simulator.measured import Label, Row, network_of, number_of
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario import Scenario

MEASURED_DEPTH, STEADY_MICROBATCHES = 3, 12
NOTHING = 1e-9


@dataclass(frozen=True)
class ExchangePlan(LayerPlan):
    """A layer without stages. `served`: the collective whose rows travel, tokens or sums; None: both."""

    served: str | None = None

    @cached_property
    def share(self) -> Calibration:
        free = {"matrix_tflops": 1 / NOTHING, "memory_tbps": 1 / NOTHING}
        none = dict.fromkeys(("vector_overhead_us", "matrix_overhead_us", "fused_route_ns", "interference"), 0.0)
        return replace(super().share, **free, **none)  # type: ignore[arg-type]

    @cached_property
    def dispatch_row_bytes(self) -> int:
        return 0 if self.served == "sums" else super().dispatch_row_bytes

    @cached_property
    def combine_row_bytes(self) -> int:
        return 0 if self.served == "tokens" else super().combine_row_bytes


@dataclass(frozen=True)
class ExchangePoint:
    """Dispatch or combine between ranks without a layer: `latency_p50` of a lone microbatch, or GB/s of rows in steady state."""

    scenario: Scenario
    metric: str
    role: str
    measured: float
    unit: str

    plural: ClassVar[str] = "exchanges"

    @property
    def label(self) -> Label:
        s = self.scenario
        phases = f" G = {s.ranks_per_phase}" if s.model.phased else ""
        port = f" at {s.network.port_gbps:g} GB/s" if s.network.port_gbps else ""
        what = f"{self.metric} {self.role}{phases}{port}"
        return "collectives", s.placement, s.implementation.value, s.num_ranks, "", str(s.microbatch_tokens), what

    @property
    def kind(self) -> str:
        return "tokens" if self.metric == "egress" or self.role == "dispatch" else "sums"

    def predict(self, calibration: Calibration) -> float:
        served = self.kind if self.role.endswith("alone") else None
        plan = ExchangePlan(self.scenario, calibration, served)
        layer = TransferLayer(plan, expected_loads(plan), switches_of(plan))
        layer.run()
        tokens, sums = layer.last_arrival["tokens"], layer.last_arrival["sums"]
        if self.metric == "latency_p50":
            return tokens[0] if self.kind == "tokens" else sums[0] - tokens[0]
        times = tokens if self.kind == "tokens" else sums
        row_bytes = plan.dispatch_row_bytes if self.kind == "tokens" else plan.combine_row_bytes
        rows = sum(float(one.received.sum()) for one in layer.loads[3:])
        return rows * row_bytes / (times[STEADY_MICROBATCHES - 1] - times[2]) / 1e3


def exchange_points(rows: Iterable[Row]) -> list[ExchangePoint]:
    """Latency and throughput of the collectives at the default number of switch blocks, on the placements that are modelled."""
    known = {implementation.value for implementation in Implementation}
    points = []
    for row in rows:
        usable = row["measurement"] == "collectives" and row["placement"] == "scale_model" and row["implementation"] in known
        steady = row["metric"] in ("egress", "ingress") and row.get("sum_order") == "arrival"
        if not usable or not (steady or row["metric"] == "latency_p50") or (row.get("routing") or "uniform") != "uniform":
            continue
        count, depth = (STEADY_MICROBATCHES, MEASURED_DEPTH) if steady else (1, 1)
        implementation, size = Implementation(row["implementation"]), int(row["microbatch_tokens"])
        port = row.get("rank_port_gbps")
        scenario = Scenario(
            shape=OLMOE_1B_7B,
            num_ranks=int(row["num_ranks"]),
            implementation=implementation,
            tokens_per_rank=count * size,
            microbatch_tokens=size,
            depth=depth,
            ranks_per_phase=number_of(row, "ranks_per_phase", 1),
            network=replace(network_of(row), port_gbps=float(port) if port and float(port) else None),
            placement=row["placement"],
        )
        points.append(ExchangePoint(scenario, row["metric"], row["role"], float(row["value"]), row["unit"]))
    return points
