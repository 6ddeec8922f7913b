"""From what the PEs left in a run's folder to one table, its JSON rows, a timeline picture and a Perfetto trace.

A run's folder holds one folder per case, with `output-R.npy`, `times-R.json` and `events-P.jsonl` of every rank R and PE P.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from inc_runtime.op_trace import Event, load_events
from inc_runtime.protocol import World


@dataclass(frozen=True)
class Row:
    """One line of the table. Counts are of one call of the layer; per rank they are the maximum over the ranks.

    `rows_sent_per_rank` counts the token rows that a rank sends in the dispatch, `rows_received_per_rank` those that it
    receives in the combine. `row_bytes` (logical) and `wire_bytes` count both directions of both collectives.
    `steps` are the transfers on the critical path of one microbatch. `time_us`: median over the iterations of the slowest rank.
    `rank_memory_bytes` and `switch_memory_bytes`: token rows that a rank, and the larger of the two switches, hold at the peak.
    """

    implementation: str
    collective: str
    source: str
    placement: str
    num_ranks: int
    num_tokens: int
    relative_error: float
    max_abs_error: float
    transformers_error: float | None
    rows_sent_per_rank: int
    rows_received_per_rank: int
    row_bytes: int
    wire_bytes: int
    packets: int
    steps: int
    time_us: float
    rank_memory_bytes: int
    switch_memory_bytes: int


def load_case(folder: Path, world: World) -> tuple[np.ndarray, float, list[Event]]:
    """Output of all ranks [num_tokens, H] float64, the median time in us, and the events of the last call of all PEs."""
    outputs = [np.load(folder / f"output-{rank}.npy") for rank in range(world.num_ranks)]
    output = np.concatenate(outputs).view(ml_dtypes.bfloat16).astype(np.float64)
    windows = [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(world.num_ranks)]
    slowest = np.max([window["times_us"] for window in windows], axis=0)
    start_us = min(window["start_us"] for window in windows)
    events = [event for path in sorted(folder.glob("events-*.jsonl")) for event in load_events(path)]
    events = [event for event in events if event.start_us >= start_us and event.name != "stop"]
    return output, float(np.median(slowest)), sorted(events, key=lambda event: event.start_us)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write the table as a JSON list of objects with the fields of `Row`."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def table(rows: list[Row]) -> str:
    """The rows as text."""
    heads = (
        ("implementation", "<", lambda r: r.implementation),
        ("collective", "<", lambda r: r.collective),
        ("rel. error", ">", lambda r: f"{r.relative_error:.1e}"),
        ("max error", ">", lambda r: f"{r.max_abs_error:.1e}"),
        ("vs transf.", ">", lambda r: "-" if r.transformers_error is None else f"{r.transformers_error:.1e}"),
        ("rows out", ">", lambda r: f"{r.rows_sent_per_rank}"),
        ("rows in", ">", lambda r: f"{r.rows_received_per_rank}"),
        ("logical KB", ">", lambda r: f"{r.row_bytes / 1e3:,.0f}"),
        ("wire KB", ">", lambda r: f"{r.wire_bytes / 1e3:,.0f}"),
        ("packets", ">", lambda r: f"{r.packets}"),
        ("rank KB", ">", lambda r: f"{r.rank_memory_bytes / 1e3:,.0f}"),
        ("switch KB", ">", lambda r: f"{r.switch_memory_bytes / 1e3:,.0f}"),
        ("steps", ">", lambda r: f"{r.steps}"),
        ("time ms", ">", lambda r: f"{r.time_us / 1e3:,.1f}"),
    )
    cells = [[text for text, _, _ in heads]] + [[render(row) for _, _, render in heads] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = [
        "  ".join(f"{text:{head[1]}{width}}" for text, head, width in zip(line, heads, widths, strict=True)) for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


LEGEND = """\
rows out: token rows that a rank sends in the dispatch; rows in: rows that it receives in the combine (maximum over ranks).
logical and wire KB: both directions of a rank, rows alone and with records, headers and signals. packets: into and out of the
switch, both collectives (ready signals, credits and grants apart). rank and switch KB: token rows held at the peak, by a rank
and by the larger of the two switches. steps: transfers on the critical path of one microbatch."""
