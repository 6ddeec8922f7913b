"""The table of the best cuts (`megakernel/tuning.csv`) from measured speed-ups, and how the post's formula for m_b fares.

    python -m results.tune results/data/speed_ups_scale_model_0336aa8.csv [--output megakernel/tuning.csv]

The post models a layer of N tokens in microbatches of m as T(m) = (N / m + S - 1)(o + c m), with o the overhead of a microbatch,
c the cost of a token and S the stages of its pipeline, so that m* = sqrt(o N / ((S - 1) c)). o, c and S are fitted to the times
of each implementation, in relative error; m* stands beside the best m that was measured in a table that goes into results/tables.
Rows with an edge are left out of the fit; rows with paced ports or local bypass out of both.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megakernel.tuning import COLUMNS, TABLE, Cut
from results.layer_tables import Row, markdown_table, read_rows

FOLDER = Path(__file__).resolve().parent
STAGES = np.arange(1.05, 8.0, 0.05)
"""Values of S that the fit tries; the other two follow by least squares."""


@dataclass(frozen=True)
class PostModel:
    """T(m) = (N / m + S - 1)(o + c m), microseconds. `error`: root mean square of the relative error of the fit."""

    o: float
    c: float
    stages: float
    error: float

    def best_microbatch(self, num_tokens: int) -> float:
        return float(np.sqrt(self.o * num_tokens / ((self.stages - 1) * self.c))) if self.c > 0 else float("inf")


def layer_times(rows: list[Row]) -> list[Row]:
    """Rows of the fused implementations on ports as they are, without local bypass."""
    fused = [row for row in rows if row["metric"] == "layer_time" and row["implementation"].startswith("megakernel")]
    return [row for row in fused if not row.get("rank_port_gbps") and not row.get("local_bypass")]


def cut_of(row: Row) -> Cut:
    return Cut(
        placement=row["placement"],
        implementation=row["implementation"],
        rows_per_token=int(row["num_ranks"]) * int(row["top_k"]) / int(row["num_experts"]),
        num_tokens=int(row["num_tokens"]),
        microbatch_tokens=int(row["microbatch_tokens"]),
        edge_tokens=int(row.get("edge_tokens") or 0),
        ranks_per_phase=int(row["ranks_per_phase"] or 1),
        depth=int(row["depth"]),
        layer_time_us=float(row["value"]),
    )


def best_cuts(rows: list[Row]) -> list[Cut]:
    """The shortest of each placement, implementation and number of tokens, in the order in which they are measured."""
    found: dict[tuple[str, str, float, int], Cut] = {}
    for cut in map(cut_of, layer_times(rows)):
        key = cut.placement, cut.implementation, cut.rows_per_token, cut.num_tokens
        if key not in found or cut.layer_time_us < found[key].layer_time_us:
            found[key] = cut
    return list(found.values())


def fit(points: list[Cut]) -> PostModel:
    """o, c and S by least squares of the relative error."""
    tokens = np.array([point.num_tokens for point in points], float)
    sizes = np.array([point.microbatch_tokens for point in points], float)
    times = np.array([point.layer_time_us for point in points])
    fits = []
    for stages in STAGES:
        turns = tokens / sizes + stages - 1
        basis = np.stack([turns / times, turns * sizes / times], axis=1)
        (o, c), *_ = np.linalg.lstsq(basis, np.ones(len(points)), rcond=None)
        error = float(np.sqrt(np.mean((basis @ [o, c] - 1) ** 2)))
        if o > 0 and c > 0:
            fits.append(PostModel(float(o), float(c), float(stages), error))
    return min(fits, key=lambda model: model.error)


def formula_table(rows: list[Row]) -> str:
    """Per implementation o, c, S and the error of the fit, and m* beside the best m measured, as Markdown."""
    points = defaultdict(list)
    for cut in map(cut_of, layer_times(rows)):
        if not cut.edge_tokens and cut.microbatch_tokens < cut.num_tokens:
            points[cut.implementation, cut.ranks_per_phase].append(cut)
    lines = []
    for (name, group), cuts in points.items():
        model = fit(cuts)
        label = f"{name}, G = {group}" if name.endswith("phased") else name
        sizes = []
        for num_tokens in sorted({cut.num_tokens for cut in cuts}):
            best = min((cut for cut in cuts if cut.num_tokens == num_tokens), key=lambda cut: cut.layer_time_us)
            sizes.append(f"{num_tokens}: {model.best_microbatch(num_tokens):.0f} / {best.microbatch_tokens}")
        fitted = f"{model.o:.0f}", f"{model.c:.3f}", f"{model.stages:.2f}", f"{100 * model.error:.1f}"
        lines.append([label, *fitted, ", ".join(sizes)])
    columns = ["implementation", "o, us", "c, us a token", "S", "error of the fit, %", "N: m* / best m measured"]
    return "\n".join(markdown_table(columns, lines))


def write_table(cuts: list[Cut], comments: list[str], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write("# The best measured cuts; written by results/tune.py\n")
        file.writelines(f"# {comment}\n" for comment in comments)
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: getattr(cut, name) for name in COLUMNS} for cut in cuts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="data files of measure_speed_ups.py")
    parser.add_argument("--output", type=Path, default=TABLE, help="default: %(default)s")
    parser.add_argument("--tables", type=Path, default=FOLDER / "tables", help="where the comparison goes; default: %(default)s")
    options = parser.parse_args()
    read = [read_rows(path) for path in options.files]
    rows = [row for _, found in read for row in found]
    comments = [comment for found, _ in read for comment in found if comment.startswith(("date", "device", "commit"))]
    write_table(best_cuts(rows), comments, options.output)
    title = "# The post's best microbatch against the measured one, measured_gpu"
    text = "\n\n".join([title, "; ".join(comments), formula_table(rows)])
    (options.tables / f"best_microbatch_{options.files[0].stem}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
