"""Figure of a measured collectives file: what each form moves through the switch, and through the port of a rank.

    python -m results.plot_collectives results/data/collectives_scale_model_522ba48.csv

Left, ports as fast as they are, against the plain copy of the same run; right, ports paced, against their bound. Draws
results/figures/<name of the data>.png from the data alone.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).resolve().parent
ORDER = ("megakernel", "megakernel_phased", "megakernel_inc", "megakernel_inc_phased")
LABELS = {
    "megakernel": "plain,\nrelayed",
    "megakernel_phased": "plain,\nG = {}",
    "megakernel_inc": "INC",
    "megakernel_inc_phased": "INC,\nG = {}",
}
SWITCH_BARS = (
    ("egress", "dispatch alone", "#1b6ca8", "out of the dispatch switch, alone"),
    ("egress", "both", "#8fb8de", "the same, both roles at once"),
    ("ingress", "combine alone", "#d1495b", "into the combine switch, alone"),
    ("ingress", "both", "#e8a5ad", "the same, both roles at once"),
)
PORT_BARS = (
    ("port_ingress", "dispatch alone", "#1b6ca8", "into a rank, dispatch alone"),
    ("port_egress", "combine alone", "#d1495b", "out of a rank, combine alone"),
    ("port_egress", "both", "#6a4c93", "out of a rank, both"),
    ("port_ingress", "both", "#b9a3d6", "into a rank, both"),
)
Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """Rows of the file. Raises ValueError where one was not measured on GPUs: such series are never drawn together."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    if wrong := {row["source"] for row in rows} - {"measured_gpu"}:
        raise ValueError(f"{path}: rows of source {', '.join(wrong)} among measured ones.")
    return rows


def forms_of(rows: list[Row]) -> list[tuple[str, str]]:
    """Implementation and G of every form in the file, in the order of the axis."""
    found = {(row["implementation"], row["ranks_per_phase"]) for row in rows if row["implementation"]}
    return sorted(found, key=lambda form: (ORDER.index(form[0]), form[1]))


def draw_bars(axis: Any, rows: list[Row], bars: tuple[tuple[str, ...], ...], rate: str) -> None:
    """A group of bars for every form; `rate`: the bound of the ports, "" for none."""
    forms = forms_of(rows)
    width = 0.8 / len(bars)
    values = {
        (row["implementation"], row["ranks_per_phase"], row["metric"], row["role"]): float(row["value"])
        for row in rows
        if row["implementation"] and row["rank_port_gbps"] == rate
    }
    for i, (metric, role, color, label) in enumerate(bars):
        heights = [values.get((*form, metric, role), np.nan) for form in forms]
        axis.bar(np.arange(len(forms)) + (i - 1.5) * width, heights, width, color=color, label=label)
    axis.set_xticks(range(len(forms)), [LABELS[name].format(group) for name, group in forms])
    axis.set_ylabel("GB/s")
    axis.grid(axis="y", alpha=0.25)


def draw(path: Path, target: Path) -> None:
    """Draw the figure of one file. Some of its rows must be paced."""
    rows = read_rows(path)
    rates = sorted({float(row["rank_port_gbps"]) for row in rows if row["rank_port_gbps"]})
    figure, (switch, port) = plt.subplots(1, 2, figsize=(13, 5))
    draw_bars(switch, rows, SWITCH_BARS, "")
    for row in rows:
        if row["metric"] == "copy_peak" and row["direction"] == "push":
            label = f"plain copy by {row['switch_blocks']} SMs"
            style = ":" if row["switch_blocks"] == "16" else "--"
            switch.axhline(float(row["value"]), ls=style, lw=1, color="#222222", label=label)
    switch.set_title("through the switch, ports as fast as they are")
    switch.set_ylim(0, 520)
    draw_bars(port, rows, PORT_BARS, f"{rates[0]:g}")
    port.axhline(rates[0], ls="--", lw=1, color="#444444")
    port.set_title(f"through the port of one rank, paced to {rates[0]:g} GB/s each way")
    port.set_ylim(0, 1.4 * rates[0])
    for axis in (switch, port):
        axis.legend(fontsize=8, ncols=2, loc="upper center")
    placement, tokens = rows[0]["placement"], next(row["microbatch_tokens"] for row in rows if row["role"] == "both")
    note = f"source: measured_gpu, placement {placement}, {tokens} tokens a rank and microbatch; own experts' rows included"
    figure.text(0.5, 0.01, note, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(target, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(Path(name), FOLDER / "figures" / f"{Path(name).stem}.png")
