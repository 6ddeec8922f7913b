"""Data files of `results/data`: what each says of its origin, and which are refused because they are damaged or foreign.

A file is named `<measurement>_<placement>_<commit>[_<part>].csv`, or `simulated_layer_<question>_<commit>.csv`, and begins with
comments (#) that give date, device, placement, commit and command. All of its rows have one source and one placement, so that
measured and simulated numbers, or numbers of different placements, cannot meet in one file.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

from inc_runtime.errors import IncError
from inc_runtime.placement import PlacementKind
from inc_runtime.simulator.measured import COLUMNS

PUBLISHED, SIMULATED, ON_HOST, ON_GPU = "published", "simulated", "measured_host", "measured_gpu"
SOURCES = (PUBLISHED, SIMULATED, ON_HOST, ON_GPU)
TIMELINE = "stage_timeline"
TIMELINE_COLUMNS = ("stage", "microbatch", "first_begin_us", "last_end_us", "us_per_block")
NUMBERS = {"long": ("value",), TIMELINE: TIMELINE_COLUMNS[1:]}
PLACEMENTS = tuple(kind.value for kind in PlacementKind)
COMMIT = r"(?P<commit>[0-9a-f]{7,40}|uncommitted|published)"
NAME = re.compile(rf"(?P<measurement>[a-z_]+?)_(?P<placement>{'|'.join(PLACEMENTS)})_{COMMIT}(?:_(?P<part>\w+))?\.csv")
SIMULATED_NAME = re.compile(rf"(?P<measurement>simulated_layer)_(?P<part>[a-z_]+)_{COMMIT}\.csv")
NAMED_OTHERWISE = {"machine_figures": "machine", "post_figures": "post", "speed_ups": "moe_layer"}
"""What the rows of a file call its measurement, where that is not the beginning of its name."""


class BadDataFile(IncError):
    """A data file that is damaged, or whose origin is not known. The message names it."""


@dataclass(frozen=True)
class DataFile:
    """A file whose rows can be trusted to be of one `source` and one `placement`. `notes`: its comments."""

    path: Path
    measurement: str
    placement: str
    commit: str
    part: str
    source: str
    date: str
    device: str
    command: str
    notes: tuple[str, ...]
    rows: tuple[dict[str, str], ...]

    @property
    def kind(self) -> str:
        """What its rows call their measurement; speed_ups hold rows of moe_layer."""
        return NAMED_OTHERWISE.get(self.measurement, self.measurement)

    @property
    def provenance(self) -> str:
        """Source, placement, commit, date and device in one line."""
        where = "" if self.source == SIMULATED else f", placement {self.placement}"
        if self.source == PUBLISHED:
            return f"{self.source}{where}"
        seen = f", {self.device}" if self.source in (ON_HOST, ON_GPU) else ""
        return f"{self.source}{where}, commit {self.commit}, {self.date or 'no date'}{seen}"


def _refuse(path: Path, problem: str, remedy: str = "") -> BadDataFile:
    return BadDataFile(f"{path.name} is refused: {problem}. {remedy or 'Measure again, or remove the file.'}")


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1].strip() if match else ""


def read_data_file(path: Path) -> DataFile:
    """Read and check one file. Raises BadDataFile that names it, and says what is wrong."""
    name = NAME.fullmatch(path.name) or SIMULATED_NAME.fullmatch(path.name)
    if name is None:
        raise _refuse(path, "its name is not <measurement>_<placement>_<commit>.csv", "Rename it, or remove it.")
    parts = name.groupdict()
    measurement, commit = parts["measurement"], parts["commit"]
    placement = parts.get("placement") or SIMULATED
    lines = _lines_of(path)
    notes = tuple(line.lstrip("# ").rstrip() for line in lines if line.startswith("#"))
    kind = TIMELINE if measurement == TIMELINE else "long"
    rows = _rows_of(path, lines, kind)
    text = "\n".join(notes)
    source = _source_of(path, rows, kind, text, (measurement, placement, commit))
    date = _found(r"(\d{4}-\d{2}-\d{2}(?:T[\d:]+)?)", text)
    device = _found(r"device: ([^;\n]+)", text) or _found(r"(\d+ x [^,;\n]+)", text)
    command = _found(r"command: (.+)", text) or _found(r"(\w+\.py\b.*)", text)
    if not notes:
        raise _refuse(path, "it has no header that says where its numbers come from")
    if source != PUBLISHED:
        said = _found(r"commit:? ([0-9a-f]{7,40}|uncommitted)\b", text)
        if said != commit:
            raise _refuse(path, f"its header names the commit {said or '(none)'}, its name {commit}")
        there = {"date": date, "device": device, "command": command}
        if missing := [what for what, value in there.items() if not value]:
            raise _refuse(path, f"its header lacks {', '.join(missing)}")
        if source != SIMULATED and _found(r"placement:? (\w+)", text) != placement:
            raise _refuse(path, f"its header does not name the placement {placement}")
    return DataFile(
        path, measurement, placement, commit, parts["part"] or "", source, date, device, command, notes, tuple(rows)
    )


def _lines_of(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise _refuse(path, "it is not text in UTF-8") from None
    except OSError as error:
        raise _refuse(path, f"it cannot be read ({error.strerror})") from None
    if not text.strip() or "\0" in text:
        raise _refuse(path, "it is empty, or holds zero bytes")
    if not text.endswith("\n"):
        raise _refuse(path, "its last line is cut off")
    return [line for line in text.splitlines() if line.strip()]


def _rows_of(path: Path, lines: list[str], kind: str) -> list[dict[str, str]]:
    """Rows with as many cells as there are columns, and numbers where numbers belong."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if not line.startswith("#")]
    reader = csv.reader(line for _, line in numbered)
    columns = next(reader, [])
    wanted = TIMELINE_COLUMNS if kind == TIMELINE else COLUMNS
    if tuple(columns[: len(wanted)]) != tuple(wanted):
        raise _refuse(path, f"its columns are {', '.join(columns[:12]) or '(none)'}; expected {', '.join(wanted)}")
    rows = []
    for (number, _), cells in zip(numbered[1:], reader, strict=False):
        if len(cells) != len(columns):
            raise _refuse(path, f"line {number} has {len(cells)} cells for {len(columns)} columns")
        row = dict(zip(columns, cells, strict=True))
        for column in NUMBERS[kind]:
            if not _is_number(row[column]):
                raise _refuse(path, f"line {number}: {column} = {row[column]!r} is not a number")
        rows.append(row)
    if not rows:
        raise _refuse(path, "it has no rows")
    return rows


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _source_of(path: Path, rows: list[dict[str, str]], kind: str, text: str, name: tuple[str, str, str]) -> str:
    """The one source of all rows. Raises BadDataFile where rows differ, or do not belong under this `name`."""
    measurement, placement, commit = name
    if kind == TIMELINE:
        found = {_found(r"source: (\w+)", text)}
    else:
        found = {row["source"] for row in rows}
        own = NAMED_OTHERWISE.get(measurement, measurement)
        if foreign := {row["measurement"] for row in rows} - {own}:
            raise _refuse(path, f"it holds rows of {', '.join(sorted(foreign))} under the name of {measurement}")
        wrong = {row["placement"] for row in rows} - {placement}
        if wrong and placement != SIMULATED:
            raise _refuse(path, f"it holds rows of placement {', '.join(sorted(wrong))}; placements never share a file")
    expected = SIMULATED if placement == SIMULATED else PUBLISHED if commit == "published" else ON_GPU
    expected = ON_HOST if placement == "host" else expected
    if found != {expected}:
        seen = ", ".join(sorted(found)) or "(none)"
        raise _refuse(path, f"its rows say source {seen}, its name stands for {expected}; sources never share a file")
    return expected


def read_folder(folder: Path) -> tuple[list[DataFile], list[str]]:
    """All files of `folder`: those that can be trusted, by name, and why each other one is refused."""
    files, refused = [], []
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        try:
            files.append(read_data_file(path))
        except BadDataFile as problem:
            refused.append(str(problem))
    return files, refused
