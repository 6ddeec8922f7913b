"""Draw the times of a measured data file against its size, on log2 axes: a pure function of that file.

    python -m results.plot_layer_times results/data/moe_layer_scale_model_COMMIT.csv

For `moe_layer`, layer time against tokens per rank, the best of the microbatches that were tried; for `expert_matmul`, time of
the products against rows, uniform routing.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from results.data_files import DataFile, read_data_file

FOLDER = Path(__file__).resolve().parent
COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#c98a1b", "#6a4c93", "#444444", "#4f8fc0")
AXES = {
    "moe_layer": ("layer_time", "num_tokens", "tokens per rank", "time of the MoE layer, us"),
    "expert_matmul": ("stage_time", "num_rows", "rows of a rank", "time of the expert products, us"),
}


def series_of(file: DataFile) -> dict[str, dict[int, float]]:
    """Label -> size -> best time in us. Forms that differ in G or in the ports are series of their own."""
    metric, size, *_ = AXES[file.measurement]
    series: dict[str, dict[int, float]] = defaultdict(dict)
    for row in file.rows:
        plain = row.get("distribution", "uniform") == "uniform" and row.get("routing", "uniform") in ("uniform", "")
        if row["metric"] != metric or not plain:
            continue
        group = row.get("ranks_per_phase", "") if row["implementation"].endswith("_phased") else ""
        port = row.get("rank_port_gbps", "")
        more = [f"G = {group}" if group else "", f"ports of {port} GB/s" if port else ""]
        more.append(row.get("shape", "").replace("olmoe", ""))
        label = ", ".join([row["implementation"], *filter(None, more)])
        x = int(row[size])
        series[label][x] = min(float(row["value"]), series[label].get(x, float("inf")))
    return series


def draw(path: Path, target: Path) -> None:
    """Write the figure of a data file. Raises BadDataFile for a damaged one."""
    file = read_data_file(path)
    _, _, x_label, y_label = AXES[file.measurement]
    drawn, axes = plt.subplots(figsize=(8, 5))
    sizes: set[int] = set()
    for number, (label, times) in enumerate(series_of(file).items()):
        xs = sorted(times)
        sizes |= set(xs)
        marker = "os^vDPX"[number // len(COLORS) % 7]
        axes.plot(xs, [times[x] for x in xs], f"-{marker}", ms=5, color=COLORS[number % len(COLORS)], label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(sizes), [f"{size:,}" for size in sorted(sizes)])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(fontsize=8)
    drawn.text(0.5, 0.005, file.provenance, ha="center", fontsize=7, color="#555555")
    drawn.tight_layout(rect=(0, 0.03, 1, 1))
    drawn.savefig(target, dpi=140)
    plt.close(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+")
    for path in parser.parse_args().data:
        draw(path, FOLDER / "figures" / f"{path.stem}.png")


if __name__ == "__main__":
    main()
