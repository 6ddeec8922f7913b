"""Table and figure of a measured layer: pure functions of a data file of `measure_moe_layer.py`."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from inc_runtime.config import Implementation
from megakernel.stages import TEN_STAGES, stored_tensors

COLUMNS = [
    *("measurement", "source", "placement", "implementation", "num_ranks", "num_tokens", "microbatch_tokens", "metric"),
    *("value", "unit", "shape", "routing", "num_experts", "top_k", "hidden", "intermediate", "stage"),
]
STYLES = {
    "grouped_mm": ("grouped_mm alone (no communication)", "#444444"),
    "deepgemm_fp8_mega_moe": ("DeepGEMM FP8 Mega MoE", "#c98a1b"),
    "baseline": ("Baseline, captured", "#1b6ca8"),
    "baseline_eager": ("Baseline", "#7fb2d8"),
    "baseline_counted": ("Baseline, counts first", "#6a4c93"),
}
Row = dict[str, str]


def read_rows(path: Path) -> tuple[list[str], list[Row]]:
    """The header's comments, and the rows. Raises ValueError where a row is not measured on GPUs."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    for row in rows:
        if row["source"] != "measured_gpu":
            raise ValueError(f"{path}: a row of source {row['source']} among measured ones; they never share a table.")
    return [line[2:] for line in lines if line.startswith("#")], rows


def by_case(rows: list[Row], metric: str) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Values of one metric: (shape, routing) -> implementation -> tokens."""
    result: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        if row["metric"] == metric:
            of_case = result.setdefault((row["shape"], row["routing"]), {})
            of_case.setdefault(row["implementation"], {})[int(row["num_tokens"])] = float(row["value"])
    return result


def markdown_table(header: list[str], lines: list[list[str]]) -> list[str]:
    """The lines of a Markdown table, and an empty one."""
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(line) + " |" for line in lines), ""]


def layer_table(rows: list[Row]) -> list[str]:
    """Milliseconds of each implementation, and its ratio to grouped_mm alone."""
    out = []
    for (shape, routing), of_case in by_case(rows, "layer_time").items():
        names = sorted(of_case, key=lambda name: list(STYLES).index(name) if name in STYLES else -1)
        floor, lines = of_case.get("grouped_mm", {}), []
        for tokens in sorted({n for values in of_case.values() for n in values}):
            cells = []
            for name in names:
                value = of_case[name].get(tokens)
                ratio = f" ({value / floor[tokens]:.2f})" if value and tokens in floor and name != "grouped_mm" else ""
                cells.append(f"{value / 1e3:.3f}{ratio}" if value else "")
            lines.append([f"{tokens:,}", *cells])
        out += [f"## {shape}, {routing} routing: milliseconds (and times grouped_mm alone)", ""]
        out += markdown_table(["tokens per rank", *(STYLES.get(name, (name,))[0] for name in names)], lines)
    return out


def stage_tables(rows: list[Row]) -> list[str]:
    """Time, floor and ratio of each stage of the Baseline, and the tensor that it stores."""
    times = {(r["shape"], int(r["num_tokens"]), r["stage"], r["metric"]): float(r["value"]) for r in rows if r["stage"]}
    out = []
    for shape, tokens in sorted({key[:2] for key in times}):
        lines = []
        for stage in TEN_STAGES:
            time, floor = (times[shape, tokens, stage.name, metric] for metric in ("stage_time", "stage_floor"))
            lines.append([stage.name, f"{time:.1f}", f"{floor:.1f}", f"{time / floor:.2f}", stage.stores])
        out += [f"## {shape}, {tokens:,} tokens per rank: stages of the Baseline, microseconds", ""]
        out += markdown_table(["stage", "time", "floor", "ratio", "stores in global memory"], lines)
    return out


def stored_table() -> list[str]:
    """Round trips of tensors through global memory, by implementation."""
    lines = []
    for implementation in Implementation:
        stored = stored_tensors(implementation)
        lines.append([implementation.value, str(len(stored)), ", ".join(stored)])
    header = ["implementation", "round trips", "tensors"]
    return ["## Tensors stored in global memory and read back", "", *markdown_table(header, lines)]


def ceilings_line(rows: list[Row]) -> str:
    """The ceilings that the floors rest on."""
    names = ("copy_peak", "product_peak", "link_peak", "launch", "dispatch_latency", "combine_latency")
    found = {row["metric"]: f"{float(row['value']):.4g} {row['unit']}" for row in rows if row["metric"] in names}
    return "Ceilings of the same run: " + ", ".join(f"{name} {value}" for name, value in found.items()) + "."


def table(path: Path) -> str:
    """The whole table as Markdown."""
    comments, rows = read_rows(path)
    out = ["# MoE layer, measured", "", "; ".join(comments), "", *layer_table(rows)]
    stages = stage_tables(rows)
    if stages:
        out += [ceilings_line(rows), "", *stages]
    return "\n".join([*out, *stored_table()])


def figure(path: Path, target: Path) -> None:
    """Layer time over grouped_mm alone against tokens per rank, a panel for each shape and routing."""
    comments, rows = read_rows(path)
    cases = by_case(rows, "layer_time")
    most = max(v / of_case["grouped_mm"][n] for of_case in cases.values() for own in of_case.values() for n, v in own.items())
    widths = [3 if len(of_case["grouped_mm"]) > 1 else 1.5 for of_case in cases.values()]
    figure_size, ratios = (2.1 * sum(widths) + 1, 4.2), {"width_ratios": widths}
    drawn, axes = plt.subplots(1, len(cases), figsize=figure_size, squeeze=False, sharey=True, gridspec_kw=ratios)
    for axis, ((shape, routing), of_case) in zip(axes[0], cases.items(), strict=True):
        floor = of_case["grouped_mm"]
        for name, values in of_case.items():
            if name == "grouped_mm":
                continue
            label, color = STYLES.get(name, (name, "#d1495b"))
            sizes = sorted(values)
            axis.plot(sizes, [values[n] / floor[n] for n in sizes], "-o", ms=4, color=color, label=label)
        axis.axhline(1, color="#444444", lw=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = sorted(floor)
        axis.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
        heights = [height for height in (1, 1.2, 1.5, 2, 2.5, 3, 4, 6, 8) if height < 1.2 * most]
        axis.set_yticks(heights, [f"{height:g}" for height in heights])
        axis.set_ylim(0.95, 1.1 * most)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.set(title=f"{shape}, {routing}", xlabel="tokens per rank")
    axes[0][0].set_ylabel("layer time over grouped_mm alone")
    axes[0][0].legend(fontsize=8)
    drawn.text(0.5, 0.005, "measured_gpu; " + comments[1], ha="center", fontsize=7, color="#555555")
    drawn.tight_layout(rect=(0, 0.03, 1, 1))
    drawn.savefig(target, dpi=140)
    plt.close(drawn)


def write_both(path: Path, folder: Path, table: Callable[[Path], str], figure: Callable[[Path, Path], None]) -> None:
    """Write the table and the figure of a data file into `folder`/tables and `folder`/figures."""
    for kind in ("tables", "figures"):
        (folder / kind).mkdir(exist_ok=True)
    (folder / "tables" / f"{path.stem}.md").write_text(table(path), encoding="utf-8")
    figure(path, folder / "figures" / f"{path.stem}.png")


def redraw(path: Path, folder: Path) -> None:
    """Table and figure of a measured layer."""
    write_both(path, folder, table, figure)
