"""Results of the simulator as rows of the project's long format; every row says `simulated` and names the calibration."""

from __future__ import annotations

import csv
import datetime
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from inc_runtime.simulator.event_mode import LayerResult
from inc_runtime.simulator.measured import COLUMNS

EXTRA = (
    "calibration",
    "calibration_source",
    "mode",
    "tested_error",
    "scenario",
    "num_experts",
    "top_k",
    "hidden_size",
    "intermediate_size",
    "depth",
    "ranks_per_phase",
    "switch",
    "forwarding",
    "topology",
    "port_gbps",
    "routing",
)
Row = dict[str, object]


def base_row(result: LayerResult) -> Row:
    """The columns that say what was simulated."""
    plan, scenario = result.plan, result.plan.scenario
    shape, net = scenario.shape, scenario.network
    return {
        "measurement": "simulated_layer",
        "source": "simulated",
        "placement": scenario.placement,
        "implementation": scenario.implementation.value,
        "num_ranks": scenario.num_ranks,
        "num_tokens": scenario.tokens_per_rank,
        "microbatch_tokens": scenario.pipeline.microbatch_tokens,
        "calibration": plan.machine.name,
        "calibration_source": plan.machine.source,
        "mode": result.mode,
        "tested_error": result.tested_error,
        "scenario": scenario.name,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "depth": scenario.pipeline.depth,
        "ranks_per_phase": scenario.ranks_per_phase if scenario.model.phased else "",
        "switch": net.switch.value,
        "forwarding": net.forwarding.value,
        "topology": net.topology.value,
        "port_gbps": round(plan.share.port_gbps, 3),
        "routing": scenario.routing.kind.value,
    }


def result_rows(result: LayerResult) -> list[Row]:
    """Layer time, busy shares, switch memory, and in event mode the counters of one result."""
    base = base_row(result)
    rows = [base | {"metric": "layer_time", "value": round(result.layer_time_us, 3), "unit": "us"}]
    for unit, share in result.busy.items():
        rows.append(base | {"metric": f"busy_{unit.replace(' ', '_')}", "value": round(share, 5), "unit": "share"})
    scenario = result.plan.scenario
    rows.append(base | {"metric": "switch_row_bytes", "value": scenario.switch_row_bytes(), "unit": "B"})
    if result.counters is not None:
        for name, value in vars(result.counters).items():
            unit = "B" if "bytes" in name else "rows" if "rows" in name else "packets"
            rows.append(base | {"metric": name, "value": value, "unit": unit})
    return rows


def git_commit(folder: Path) -> str:
    """The commit of the working tree, short; `unknown` outside of one."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_rows(path: Path, rows: Iterable[Row], command: str, more: Sequence[str] = ()) -> None:
    """Write rows as CSV, under a header that says when, what and how."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(f"# date: {datetime.date.today()}; device: none, simulated; commit: {git_commit(Path(__file__).parent)}\n")
        file.write(f"# command: {command}\n")
        writer = csv.DictWriter(file, [*COLUMNS, *EXTRA, *more], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
