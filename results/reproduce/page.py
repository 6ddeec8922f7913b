"""One page of everything that is known: what ran, the post beside ours, figures, tables, data, each with its origin."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from results.data_files import SIMULATED, TIMELINE_COLUMNS, DataFile, read_folder
from results.reproduce import html
from results.reproduce.figures import figures
from results.reproduce.post import PAIRS, SIZES, facts, our_lines, post_lines, read_post
from results.reproduce.repeat import ALLOWED, compare
from results.reproduce.runner import Places, duration
from results.reproduce.state import State
from results.reproduce.steps import NO_STEP, Missing, Step

PAGE_NAME = "reproduction.html"
TITLE = "In-network-computing all-to-all: the evaluation"
RULES = (
    "Every number names its source (measured_gpu, measured_host, simulated, published), its placement and its commit. Numbers of "
    "different placements, and measured and simulated ones, share no line and no series. Times of placement host are those of "
    "processes on a processor and are compared with nothing."
)


@dataclass(frozen=True)
class Standing:
    """What is known of the steps on this machine."""

    steps: Sequence[Step]
    missing: Mapping[str, Missing]
    done: set[str]
    state: State


def write_page(places: Places, standing: Standing) -> tuple[Path, list[str]]:
    """Write the page from whatever is in the results. Returns its path, and why each refused data file is refused."""
    files, refused = read_folder(places.data)
    before, _ = read_folder(places.previous / "data")
    key = standing.state.key
    sections = [
        html.heading(1, TITLE),
        html.paragraph(
            f"Written by inc reproduce on {datetime.date.today()}, commit {key.commit}{' with changes' * bool(key.changes)}, "
            f"on {key.machine}. {RULES}"
        ),
        *_refused(refused),
        *_not_run(standing),
        *_post(files),
        *_two_runs(before, files),
        *_figures(places, files),
        *_tables(places, files),
        *_data(files),
        *_ran(standing),
    ]
    path = places.output / PAGE_NAME
    unfinished = path.with_suffix(".new")
    unfinished.write_text(html.page(TITLE, sections), encoding="utf-8")
    unfinished.replace(path)
    return path, refused


def _refused(refused: Sequence[str]) -> list[str]:
    if not refused:
        return []
    return [html.heading(2, "Refused data files"), *(html.paragraph(problem, "bad") for problem in refused)]


def _ran(standing: Standing) -> list[str]:
    lines = []
    for step in standing.steps:
        progress = standing.state.steps.get(step.name)
        status = "done" if step.name in standing.done else progress.status if progress else "to do"
        if progress is None or (step.name in standing.missing and step.name not in standing.done):
            continue
        lines.append([step.name, step.shows, status, progress.started, duration(progress.seconds), "\n".join(progress.files)])
    out = [html.heading(2, "Steps that ran on this machine at this commit")]
    if not lines:
        return [*out, html.paragraph("None: everything on this page was committed, or measured elsewhere.")]
    return [*out, html.table(["step", "shows", "state", "started", "took", "files"], lines)]


def _not_run(standing: Standing) -> list[str]:
    steps_of: dict[tuple[str, str], list[str]] = {}
    for step in standing.steps:
        progress = standing.state.steps.get(step.name)
        if step.name in standing.done:
            continue
        if why := standing.missing.get(step.name):
            reason = why.reason, why.remedy or "-"
        elif progress is not None and progress.problem:
            reason = f"It failed: {progress.problem}", f"See run/logs/{step.name}.log"
        else:
            reason = "It has not been run here yet.", "inc reproduce"
        steps_of.setdefault(reason, []).append(f"{step.name}: {step.shows}")
    out = [html.heading(2, "What was not run on this machine, and why")]
    lines = [["\n".join(names), *reason] for reason, names in steps_of.items()]
    out += [html.table(["steps", "reason", "remedy"], lines)] if lines else [html.paragraph("Every step has run.")]
    out += [html.heading(3, "What no step measures")]
    return [*out, html.table(["part of the evaluation", "reason"], [list(line) for line in NO_STEP])]


def _post(files: Sequence[DataFile]) -> list[str]:
    """The post's figures beside ours."""
    post = read_post()
    out = [html.heading(2, "The post's figures beside ours"), html.paragraph("; ".join(post.notes), "from")]
    lines = [*post_lines(post), *our_lines(files)]
    for slow, fast in PAIRS:
        of_pair = [line for line in lines if line.pair == (slow, fast)]
        if not of_pair:
            continue
        cells = [[line.origin, *(_ratio(line.values.get(size)) for size in SIZES)] for line in of_pair]
        title = f"Speed-up of the MoE layer, {slow} over {fast}, by tokens per rank"
        out.append(html.table(["origin", *(f"{size // 1024}k" for size in SIZES)], cells, title))
    lines_of_facts = []
    for fact in facts(files, post):
        values = "\n".join(f"{value} ({origin})" for value, origin in fact.ours) or "not measured"
        lines_of_facts.append([fact.what, fact.post, values])
    return [*out, html.table(["figure", "post (published, native, W = 4)", "ours"], lines_of_facts, "Further figures")]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _two_runs(before: Sequence[DataFile], now: Sequence[DataFile]) -> list[str]:
    out = [html.heading(2, "Two runs of the same command")]
    repeated = compare(before, now)
    if not repeated:
        text = "No measurement on GPUs was run twice at this commit on this machine: inc reproduce --again does that."
        return [*out, html.paragraph(text)]
    lines = []
    for item in repeated:
        verdict = f"{'within' if item.within else 'beyond'} {100 * ALLOWED[item.metric]:.0f} %"
        lines.append([item.origin, item.metric, str(item.count), f"{100 * item.largest:.1f} %", item.where, verdict])
    head = ["origin", "metric", "ratios", "largest difference", "of", "verdict"]
    return [*out, html.table(head, lines, "Ratios of two implementations, this run against the one before")]


def _figures(places: Places, files: Sequence[DataFile]) -> list[str]:
    out = [html.heading(2, "Figures")]
    shown, problems = figures(places.output / "figures", files)
    out += [html.figure(path, _origin(file)) for path, file in shown]
    out += [html.paragraph(problem, "bad") for problem in problems]
    known = {path.name for path, _ in shown}
    strangers = sorted(path.name for path in (places.output / "figures").glob("*.png") if path.name not in known)
    if strangers:
        out.append(html.paragraph(f"Not shown, because their data are not here or were refused: {', '.join(strangers)}.", "bad"))
    return out


def _origin(file: DataFile) -> str:
    calibration = f", calibration {file.rows[0]['calibration']}" if file.source == SIMULATED else ""
    return f"{file.provenance}{calibration}; data {file.path.name}"


def _tables(places: Places, files: Sequence[DataFile]) -> list[str]:
    """Tables of the results that belong to a data file here, or name their own."""
    origins = {file.path.stem: _origin(file) for file in files}
    out = [html.heading(2, "Tables")]
    for path in sorted((places.output / "tables").glob("*.md")):
        origin = origins.get(path.stem, "its own first lines name its data" if path.stem == "predicted" else "")
        if origin:
            out += [html.markdown(path.read_text(encoding="utf-8")), html.paragraph(f"{path.name}: {origin}", "from")]
        else:
            out.append(html.paragraph(f"Not shown, because its data are not here or were refused: {path.name}", "bad"))
    return out


def _data(files: Sequence[DataFile]) -> list[str]:
    """Every number, folded, with what all rows of a file have in common above them."""
    out = [html.heading(2, "Data")]
    for file in files:
        columns = list(file.rows[0])
        common = {c: file.rows[0][c] for c in columns if c not in TIMELINE_COLUMNS and len({r[c] for r in file.rows}) == 1}
        varying = [column for column in columns if column not in common]
        said = ", ".join(f"{column} = {value}" for column, value in common.items() if value)
        content = html.paragraph("; ".join(file.notes), "from") + html.paragraph(f"All rows: {said}." if said else "", "from")
        content += html.table(varying, [[row[column] for column in varying] for row in file.rows])
        out.append(html.folded(f"{file.path.name}: {file.provenance}, {len(file.rows)} rows", content))
    return out
