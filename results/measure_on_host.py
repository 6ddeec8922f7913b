"""The comparison of `inc demo` as a data file: errors, rows, bytes, packets and steps of every implementation on every model.

    python -m results.measure_on_host [--small] [--output FILE]

The counts also become a table, beside the file or in results/tables: they are facts of the protocol. Times are those of processes
on a processor and say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

from inc_runtime.launch import run_through_ctrl_c
from inc_runtime.simulator.measured import COLUMNS
from results.data_files import read_data_file
from results.layer_tables import markdown_table
from results.provenance import ROOT, commit_name, header, write_data_file

MICROBATCH_TOKENS, TOKENS, DEPTH = 16, 64, 3
METRICS = {
    "time_us": ("layer_time", "us"),
    "relative_error": ("relative_error", "1"),
    "rows_sent_per_rank": ("rows_sent_per_rank", "rows"),
    "rows_received_per_rank": ("rows_received_per_rank", "rows"),
    "row_bytes": ("row_bytes", "B"),
    "wire_bytes": ("wire_bytes", "B"),
    "packets": ("packets", "packets"),
    "steps": ("steps", "transfers"),
    "rank_memory_bytes": ("rank_memory_bytes", "B"),
    "switch_memory_bytes": ("switch_memory_bytes", "B"),
}
"""Fields of the rows of `inc demo --json`, and what they are called in data files."""


def processor() -> str:
    """How many cores of which processor."""
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return f"{len(os.sched_getaffinity(0))} cores of {match[1] if match else platform.machine()}"


def data_rows(demo: list[dict]) -> list[dict[str, object]]:
    """Rows of the long format from those of `inc demo --json`; num_tokens becomes tokens per rank."""
    rows = []
    for line in demo:
        fixed = {key: line[key] for key in ("source", "placement", "implementation", "num_ranks", "collective")}
        fixed |= {"measurement": "moe_layer", "num_tokens": line["num_tokens"] // line["num_ranks"]}
        fixed |= {"microbatch_tokens": MICROBATCH_TOKENS, "depth": DEPTH}
        for key, (metric, unit) in METRICS.items():
            rows.append({**fixed, "metric": metric, "value": f"{line[key]:.9g}", "unit": unit})
    return rows


def _readable(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.2g}"


def table(path: Path) -> str:
    """The counts of a data file as Markdown, a line for each implementation and collective; times are left out."""
    file = read_data_file(path)
    metrics = [metric for metric, _ in METRICS.values() if metric != "layer_time"]
    units = {metric: ", B" if unit == "B" else "" for metric, unit in METRICS.values()}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in file.rows:
        lines.setdefault((row["implementation"], row["collective"]), {})[row["metric"]] = row["value"]
    cells = [[*names, *(_readable(float(found[metric])) for metric in metrics)] for names, found in lines.items()]
    head = ["implementation", "collective", *(f"{metric.replace('_', ' ')}{units[metric]}" for metric in metrics)]
    title = ["# What every implementation sends and holds, on processes", "", f"{file.provenance}. {file.command}", ""]
    return "\n".join([*title, *markdown_table(head, cells)])


def main() -> int:
    """Entry point. Returns the status of the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model instead of OLMoE's real shape")
    parser.add_argument("--commit", default=commit_name())
    parser.add_argument("--output", type=Path, help="default: results/data/moe_layer_host_COMMIT.csv")
    options = parser.parse_args()
    output = options.output or ROOT / "results" / "data" / f"moe_layer_host_{options.commit}.csv"
    with tempfile.TemporaryDirectory() as folder:
        json_file = Path(folder) / "rows.json"
        sizes = ["--tokens", str(TOKENS), "--microbatch", str(MICROBATCH_TOKENS), "--depth", str(DEPTH)]
        command = ["demo", *(["--small"] if options.small else []), *sizes]
        places = ["--output", folder, "--json", str(json_file)]
        status = run_through_ctrl_c([sys.executable, "-m", "inc_runtime", *command, *places])
        if status:
            return status
        rows = data_rows(json.loads(json_file.read_text(encoding="utf-8")))
    software = f"torch {importlib.metadata.version('torch')}, Python {platform.python_version()}"
    notes = header(
        device=processor(), placement="host", commit=options.commit, command=f"inc {' '.join(command)}", software=software
    )
    write_data_file(output, notes, [*COLUMNS, "collective", "depth"], rows)
    folder_of_table = output.parent if options.output else ROOT / "results" / "tables"
    (folder_of_table / f"{output.stem}.md").write_text(table(output), encoding="utf-8")
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
