"""Table and figure of speed-ups: pure functions of a data file of `measure_speed_ups.py`."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from inc_runtime.config import Implementation
from results.layer_tables import COLUMNS as LAYER_COLUMNS
from results.layer_tables import Row, markdown_table, read_rows, write_both

COLUMNS = [*LAYER_COLUMNS, "depth", "ranks_per_phase", "rank_port_gbps", "edge_tokens", "local_bypass"]
BYPASS = ", local bypass"
"""Ends the name of a series whose rows of own experts stay on their rank. Such rows are never compared with others."""
GROUPED_MM = "grouped_mm"
STYLES = {
    Implementation.BASELINE: ("Baseline", "#444444"),
    Implementation.MEGAKERNEL: ("MegaKernel", "#1b6ca8"),
    Implementation.MEGAKERNEL_PHASED: ("MegaKernel Phased", "#7fb2d8"),
    Implementation.MEGAKERNEL_INC: ("MegaKernel INC", "#d1495b"),
    Implementation.MEGAKERNEL_INC_PHASED: ("MegaKernel INC Phased", "#e9a3ac"),
}
SPEED_UPS = (
    (Implementation.BASELINE, Implementation.MEGAKERNEL),
    (Implementation.MEGAKERNEL, Implementation.MEGAKERNEL_INC_PHASED),
    (Implementation.MEGAKERNEL_INC_PHASED, Implementation.MEGAKERNEL_INC),
    (Implementation.BASELINE, Implementation.MEGAKERNEL_INC),
)


def series_of(row: Row) -> str:
    """The implementation, and how rows of own experts travel."""
    return row["implementation"] + BYPASS * bool(row.get("local_bypass"))


def best(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """For each series and number of tokens the row of its shortest layer time."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = series_of(row), int(row["num_tokens"])
        if row["metric"] == "layer_time" and (key not in found or float(row["value"]) < float(found[key]["value"])):
            found[key] = row
    return found


def how(row: Row) -> str:
    """How the best point was cut."""
    if row["implementation"] in (Implementation.BASELINE.value, GROUPED_MM):
        return ""
    group = f", G {row['ranks_per_phase']}" if row["ranks_per_phase"] else ""
    edge = f", edge {row['edge_tokens']}" if row.get("edge_tokens") else ""
    return f" (m_b {int(row['microbatch_tokens']):,}{edge}{group})"


def table(path: Path) -> str:
    """Milliseconds of every implementation at its best cut, then the speed-ups, as Markdown."""
    comments, rows = read_rows(path)
    found = best(rows)
    sizes = sorted({tokens for _, tokens in found})
    ends = sorted({BYPASS * name.endswith(BYPASS) for name, _ in found if name != GROUPED_MM}) or [""]
    names = [GROUPED_MM, *(implementation.value + end for end in ends for implementation in STYLES)]
    times = []
    for name in names:
        cells = [found.get((name, n)) for n in sizes]
        times.append([name, *(f"{float(row['value']) / 1e3:.3f}{how(row)}" if row else "" for row in cells)])
    ratios = []
    for end, (slow, fast) in itertools.product(ends, SPEED_UPS):
        of_pair = []
        for n in sizes:
            pair = found.get((slow.value + end, n)), found.get((fast.value + end, n))
            of_pair.append(f"{float(pair[0]['value']) / float(pair[1]['value']):.2f}" if pair[0] and pair[1] else "")
        ratios.append([f"{STYLES[slow][0]} to {STYLES[fast][0]}{end}", *of_pair])
    over = [name for name in names if name != GROUPED_MM]
    floors = []
    for name in over:
        pairs = [(found.get((name, n)), found.get((GROUPED_MM, n))) for n in sizes]
        floors.append([name, *(f"{float(a['value']) / float(b['value']):.2f}" if a and b else "" for a, b in pairs)])
    header = ["tokens per rank", *(f"{n:,}" for n in sizes)]
    out = ["# The layer in five implementations, measured_gpu", "", "; ".join(comments), ""]
    out += ["## Milliseconds, each at its best microbatch", "", *markdown_table(header, times)]
    out += ["## Speed-ups", "", *markdown_table(header, ratios)]
    return "\n".join([*out, "## Times grouped_mm alone, all ranks at once", "", *markdown_table(header, floors)])


def figure(path: Path, target: Path) -> None:
    """Layer time against tokens per rank, both in powers of two."""
    comments, rows = read_rows(path)
    found = best(rows)
    drawn, axis = plt.subplots(figsize=(6.4, 4.6))
    for end, (implementation, (label, color)) in itertools.product(("", BYPASS), STYLES.items()):
        series = implementation.value + end
        sizes = sorted(n for name, n in found if name == series)
        times = [float(found[series, n]["value"]) / 1e3 for n in sizes]
        if sizes or not end:
            axis.plot(sizes, times, "--o" if end else "-o", ms=4, color=color, label=label + end)
    sizes = sorted(n for name, n in found if name == GROUPED_MM)
    axis.plot(sizes, [float(found[GROUPED_MM, n]["value"]) / 1e3 for n in sizes], ":", color="#888888", label="grouped_mm alone")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    ticks = sorted({n for _, n in found})
    axis.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    axis.grid(alpha=0.25)
    axis.set(xlabel="tokens per rank", ylabel="milliseconds, slowest rank", title="One MoE layer of OLMoE, measured_gpu")
    axis.legend(fontsize=8)
    origin = textwrap.fill(next(c for c in comments if c.startswith("device")), 130)
    drawn.text(0.5, 0.005, origin, ha="center", fontsize=6, color="#555555")
    drawn.tight_layout(rect=(0, 0.05, 1, 1))
    drawn.savefig(target, dpi=140)
    plt.close(drawn)


def redraw(path: Path, folder: Path) -> None:
    """Table and figure of speed-ups."""
    write_both(path, folder, table, figure)
