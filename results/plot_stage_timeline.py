"""Draw which stage of the megakernel ran when, from the data file of a traced launch: a pure function of that file.

    python results/plot_stage_timeline.py [results/data/stage_timeline_scale_model_COMMIT.csv] [--output FOLDER]

A bar reaches from the first block that begins a stage of a microbatch to the last that ends it; its number is the microbatch.
What the network does lies between `dispatch` and `group`, and between `reduce` and `combine`.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).resolve().parent
ROWS = ("route", "dispatch", "group", "matmul_gate_up", "matmul_down", "reduce", "combine")
COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#c98a1b", "#6a4c93", "#4f8fc0", "#b05d7e", "#7a7a7a")


def read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The comment lines and the rows of a data file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    notes = [line[2:] for line in lines if line.startswith("#")]
    return notes, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def draw(path: Path, target: Path) -> None:
    """Draw the figure of a data file."""
    notes, rows = read(path)
    figure, axes = plt.subplots(figsize=(12, 4.2))
    for row in rows:
        if row["stage"] not in ROWS:
            continue
        begin, end, number = float(row["first_begin_us"]), float(row["last_end_us"]), int(row["microbatch"])
        height = ROWS.index(row["stage"])
        axes.barh(height, end - begin, left=begin, height=0.72, color=COLORS[number % len(COLORS)], alpha=0.75)
        axes.text((begin + end) / 2, height, str(number), ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(len(ROWS)), [f"{name} (matrix)" if "matmul" in name else f"{name} (vector)" for name in ROWS])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds since the launch, rank 0; numbers are microbatches")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    title = next(note for note in notes if note.startswith("source:"))
    figure.suptitle(f"Stages of the megakernel: {title.removeprefix('source: ')}", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="*", help="default: all that are committed")
    parser.add_argument("--output", type=Path, default=FOLDER / "figures", help="folder (default: results/figures)")
    options = parser.parse_args()
    for path in options.data or sorted((FOLDER / "data").glob("stage_timeline_*.csv")):
        target = options.output / f"{path.stem}.png"
        draw(path, target)
        print(target)


if __name__ == "__main__":
    main()
