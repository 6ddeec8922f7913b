"""The figures of the post beside ours. Ours are computed here from data files; each line has one source, placement and commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from inc_runtime.config import Implementation
from megakernel.stages import stored_tensors
from results.data_files import ON_GPU, ON_HOST, SIMULATED, TIMELINE, DataFile, read_data_file

POST_FILE = Path(__file__).resolve().parent.parent / "data" / "post_figures_native_published.csv"
PAIRS = (
    ("baseline", "megakernel"),
    ("megakernel", "megakernel_inc_phased"),
    ("megakernel_inc_phased", "megakernel_inc"),
    ("megakernel", "megakernel_inc"),
    ("baseline", "megakernel_inc_phased"),
    ("megakernel_phased", "megakernel"),
)
"""What is divided by what: time of the first over that of the second."""

PRODUCTS = {
    ("megakernel", "megakernel_inc"): (PAIRS[1], PAIRS[2]),
    ("baseline", "megakernel_inc_phased"): (PAIRS[0], PAIRS[1]),
}
"""Speed-ups that the post gives in two steps."""

SIZES = tuple(1024 << i for i in range(7))
Pair = tuple[str, str]


@dataclass(frozen=True)
class Line:
    """Speed-ups of one `pair` by tokens per rank, and where they come from."""

    pair: Pair
    origin: str
    values: dict[int, float]


@dataclass(frozen=True)
class Fact:
    """One further figure of the post, and ours: each a value and its origin."""

    what: str
    post: str
    ours: tuple[tuple[str, str], ...]


def post_lines(post: DataFile) -> list[Line]:
    """The speed-ups of the layer that the post tabulates, and their products."""
    values: dict[Pair, dict[int, float]] = defaultdict(dict)
    for row in post.rows:
        if row["metric"] == "speed_up":
            values[row["over"], row["implementation"]][int(row["num_tokens"])] = float(row["value"])
    lines = [Line(pair, f"post: {post.provenance}, W = 4, G = 1", of_pair) for pair, of_pair in values.items()]
    for pair, (first, second) in PRODUCTS.items():
        product = {n: value * values[second][n] for n, value in values[first].items()}
        lines.append(Line(pair, f"post, product of two of its columns: {post.provenance}, W = 4, G = 1", product))
    return lines


def our_lines(files: Iterable[DataFile]) -> list[Line]:
    """The same from our layer times, file by file: measured on GPUs, and simulated. Times of processes are no measurement."""
    pools: dict[str, list[dict[str, str]]] = defaultdict(list)
    for file in files:
        if file.kind == "moe_layer" and file.source == ON_GPU:
            pools[f"{file.provenance} ({file.path.stem})"] += file.rows
        elif file.source == SIMULATED and file.part == "best_microbatch":
            plain = [row for row in file.rows if row["implementation"] == "megakernel"]
            for switch in ("real", "emulated"):
                own = [row for row in file.rows if row["implementation"] == "megakernel_inc" and row["switch"] == switch]
                calibration = file.rows[0]["calibration"]
                pools[f"{file.provenance}, calibration {calibration}, INC on {switch} switches"] += plain + own
    return [line for origin, rows in pools.items() for line in _lines_of(origin, rows)]


def _lines_of(origin: str, rows: list[dict[str, str]]) -> list[Line]:
    """Speed-ups of the pairs, each implementation at the best of the microbatches that were tried."""
    best: dict[tuple[str, str, str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        olmoe = row.get("shape", "olmoe") in ("olmoe", "") and row.get("routing", "uniform") in ("uniform", "")
        if row["metric"] == "layer_time" and olmoe:
            group = row.get("ranks_per_phase", "") if row["implementation"].endswith("_phased") else ""
            port = row.get("rank_port_gbps", "")
            times, tokens = best[row["implementation"], row["num_ranks"], port, group], int(row["num_tokens"])
            times[tokens] = min(times.get(tokens, float("inf")), float(row["value"]))
    lines = []
    for slow, fast in PAIRS:
        for (name, ranks, port, group), times in best.items():
            for (other, other_ranks, other_port, other_group), fast_times in best.items():
                same_group = not (group and other_group) or group == other_group
                if (name, other) != (slow, fast) or (ranks, port) != (other_ranks, other_port) or not same_group:
                    continue
                values = {n: time / fast_times[n] for n, time in times.items() if n in fast_times}
                phases = f", G = {group or other_group}" if group or other_group else ""
                ports = f", ports of {port} GB/s" if port else ""
                if values:
                    lines.append(Line((slow, fast), f"{origin}, W = {ranks}{phases}{ports}", values))
    return lines


def busy_shares(file: DataFile) -> dict[str, str]:
    """Shares of a traced launch in which the matrix and the vector warps of a block work, on average over the blocks.

    The time of `reduce` holds its waits for the products, so that for the vector warps there are only bounds.
    """
    begin = min(float(row["first_begin_us"]) for row in file.rows)
    span = max(float(row["last_end_us"]) for row in file.rows) - begin
    spent = {"matrix": 0.0, "vector": 0.0, "reduce": 0.0}
    for row in file.rows:
        if row["stage"] != "wait":
            unit = "matrix" if row["stage"].startswith("matmul") else "reduce" if row["stage"] == "reduce" else "vector"
            spent[unit] += 100 * float(row["us_per_block"]) / span
    most = spent["vector"] + spent["reduce"]
    vector = f"between {spent['vector']:.0f} % (without reduce) and {most:.0f} % (reduce with its waits for the products)"
    return {"matrix": f"{spent['matrix']:.0f} %", "vector": vector}


def facts(files: Sequence[DataFile], post: DataFile) -> list[Fact]:
    """Every figure of the post that is not a speed-up of the layer by size; without ours where nothing was measured."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in files:
        if file.measurement == TIMELINE:
            for unit, share in busy_shares(file).items():
                found[f"busy_{unit}"].append((share, file.provenance))
        if file.measurement == "collectives":
            means = sorted({float(row["value"]) for row in file.rows if row["metric"] == "rows_per_token"})
            if means:
                found["ranks_per_token"].append((f"{means[0]:.2f} to {means[-1]:.2f}", file.provenance))
        if file.source == ON_HOST and file.measurement == "moe_layer":
            for row in file.rows:
                if row["metric"] == "packets" and row["collective"] in ("all_to_all", "inc_all_to_all"):
                    microbatches = -(-int(row["num_tokens"]) // int(row["microbatch_tokens"]))
                    each = float(row["value"]) / (2 * microbatches)
                    found[f"packets_{row['implementation']}"].append((f"{each:.0f}", file.provenance))
        if file.kind == "moe_layer" and file.source == ON_GPU:
            found["best_microbatch_megakernel_inc"] += _best_microbatches(file)
            if depths := sorted({row["depth"] for row in file.rows if row.get("depth")}):
                found["depth"].append((", ".join(depths), file.provenance))
    for line in our_lines(files):
        ends = sorted({f"{value:.2f}" for value in (min(line.values.values()), max(line.values.values()))})
        found[f"speed_up_range_{line.pair[1]}_{line.pair[0]}"].append((" to ".join(ends), line.origin))
    for implementation in (Implementation.BASELINE, Implementation.MEGAKERNEL, Implementation.MEGAKERNEL_INC):
        count = str(len(stored_tensors(implementation)))
        found[f"stored_tensors_{implementation.value}"] = [(count, "counted in megakernel/stages.py")]
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in post.rows:
        if row["metric"] not in ("speed_up",):
            groups[row["metric"], row["implementation"], row["scope"] + row["over"]].append(row)
    return [_fact(rows, found) for rows in groups.values()]


def _best_microbatches(file: DataFile) -> list[tuple[str, str]]:
    """Where several microbatches were tried: the best of them."""
    tried: dict[int, dict[int, float]] = defaultdict(dict)
    for row in file.rows:
        if row["implementation"] == "megakernel_inc" and row["metric"] == "layer_time":
            tried[int(row["num_tokens"])][int(row["microbatch_tokens"])] = float(row["value"])
    out = []
    for tokens, times in sorted(tried.items()):
        if len(times) > 1:
            sizes = ", ".join(f"{size:,}" for size in sorted(times))
            out.append((f"{min(times, key=times.__getitem__):,} at {tokens:,} tokens, of {sizes}", file.provenance))
    return out


def _fact(rows: list[dict[str, str]], found: dict[str, list[tuple[str, str]]]) -> Fact:
    first = rows[0]
    metric, name = first["metric"], first["implementation"]
    scope = "" if first["scope"] == "layer" else f", model in {first['scope']}" if first["scope"] != "both" else ", whole model"
    over = f" over {first['over']}" if first["over"] else ""
    unit = "" if first["unit"] == "1" else f" {first['unit']}"
    if first["bound"]:
        low, high = (next(row["value"] for row in rows if row["bound"] == bound) for bound in ("low", "high"))
        text = f"{low} to {high}{unit}"
    else:
        text = "; ".join(f"{row['value']}{unit}{_at(row)}" for row in rows)
    keys = [f"{metric}_{name}_{first['over']}"] if first["over"] and not scope else [f"{metric}_{name}", metric]
    ours = next((found[key] for key in keys if found.get(key)), [])
    what = f"{metric.replace('_', ' ')}{scope}{f': {name}' if name else ''}{over}"
    return Fact(what, text, tuple(ours))


def _at(row: dict[str, str]) -> str:
    return f" at {int(row['num_tokens']):,} tokens" if row["num_tokens"] else ""


def read_post() -> DataFile:
    """The figures of the post. They belong to the repository, wherever the results go."""
    return read_data_file(POST_FILE)
