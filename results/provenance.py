"""The comments at the head of a data file: when, on what, at which commit, with which software and by which command."""

from __future__ import annotations

import csv
import datetime
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit_name() -> str:
    """The commit of the working tree, short; `uncommitted` outside of one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "uncommitted"


def header(*, device: str, placement: str, commit: str, command: str, software: str) -> list[str]:
    """The comments, without their #."""
    return [
        f"date: {datetime.datetime.now().isoformat(timespec='seconds')}",
        f"device: {device}; placement: {placement}",
        f"commit: {commit}",
        f"software: {software}",
        f"command: {command}",
    ]


def write_data_file(path: Path, notes: Sequence[str], columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Write comments, columns and rows; cells that a row lacks stay empty. Replaces the file at once, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {note}\n" for note in notes)
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)
