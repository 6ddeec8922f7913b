"""The figure of each data file: those that are there, and the missing ones drawn from their data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from results.data_files import ON_HOST, SIMULATED, TIMELINE, DataFile


def figures(folder: Path, files: Sequence[DataFile]) -> tuple[list[tuple[Path, DataFile]], list[str]]:
    """Pictures of `files` in `folder`, in order, and what could not be drawn, and why. Draws what is missing.

    Files whose measurement has no drawing have none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found, problems = [], []
    for file in files:
        path = folder / f"{file.path.stem}.png"
        try:
            if path.exists() or draw(file, path):
                found.append((path, file))
        except Exception as error:  # a drawing that expects rows which this file lacks costs its figure, not the page
            problems.append(f"{path.name} cannot be drawn ({type(error).__name__}: {error})")
    return found, problems


def draw(file: DataFile, target: Path) -> bool:
    """Draw one file. Returns False where nothing draws such a measurement."""
    from results import layer_tables, plot_collectives, plot_layer_times, plot_simulated, plot_stage_timeline, speed_up_tables

    if file.source == ON_HOST:
        return False  # its counts are a table, and its times mean nothing
    if file.source == SIMULATED:
        plot_simulated.FIGURES[file.part](file.path, target)
    elif file.measurement == TIMELINE:
        plot_stage_timeline.draw(file.path, target)
    elif file.measurement == "speed_ups":
        speed_up_tables.figure(file.path, target)
    elif file.measurement == "collectives" and any(row.get("rank_port_gbps") for row in file.rows):
        plot_collectives.draw(file.path, target)  # it sets paced ports beside free ones
    elif file.measurement == "moe_layer" and any(row["implementation"] == "grouped_mm" for row in file.rows):
        layer_tables.figure(file.path, target)
    elif file.measurement in plot_layer_times.AXES:
        plot_layer_times.draw(file.path, target)
    else:
        return False
    return True
