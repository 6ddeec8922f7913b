"""The figure of each data file: those that are there, and the missing ones drawn from their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from results.data_files import SIMULATED, TIMELINE, DataFile


@dataclass(frozen=True)
class Figure:
    """A picture, and the files that it shows: all of one source, placement and commit."""

    path: Path
    files: tuple[DataFile, ...]


def figures(folder: Path, files: Sequence[DataFile]) -> list[Figure]:
    """Pictures of `files` in `folder`, in order; draws what is missing. Files whose measurement has no drawing have none."""
    folder.mkdir(parents=True, exist_ok=True)
    pools: dict[str, list[DataFile]] = {}
    for file in files:
        own = folder / f"{file.path.stem}.png"
        pooled = own.exists() or file.measurement == TIMELINE or file.source == SIMULATED
        pools.setdefault(file.path.stem if pooled else file.pool, []).append(file)
    found = []
    for stem, members in pools.items():
        path = folder / f"{stem}.png"
        if path.exists() or draw(members, path):
            found.append(Figure(path, tuple(members)))
    return found


def draw(files: Sequence[DataFile], target: Path) -> bool:
    """Draw files of one origin. Returns False where nothing draws such a measurement."""
    first = files[0]
    if first.source == SIMULATED:
        from results.plot_simulated import FIGURES

        FIGURES[first.part](first.path, target)
    elif first.measurement == TIMELINE:
        from results import plot_stage_timeline

        plot_stage_timeline.draw(first.path, target)
    elif first.measurement == "collectives":
        if not any(row.get("rank_port_gbps") for row in first.rows):
            return False  # its drawing sets paced ports beside free ones
        from results import plot_collectives

        plot_collectives.draw(first.path, target)
    else:
        from results import plot_layer_times

        if first.measurement not in plot_layer_times.AXES:
            return False
        plot_layer_times.draw(files, target)
    return True
