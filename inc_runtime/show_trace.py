"""`inc trace FOLDER`: counters, timeline picture and Perfetto file of one case, from the events that its run kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from inc_runtime.errors import ConfigurationError
from inc_runtime.op_trace import Event, count, load_events, save_events, write_perfetto
from inc_runtime.protocol import World
from inc_runtime.timeline import draw_timeline

EVENTS_FILE, ABOUT_FILE = "events.jsonl", "case.json"


def save_case(folder: Path, events: list[Event], world: World, unit_of_stage: dict[str, str]) -> None:
    """Keep what the pictures of one case are drawn from."""
    save_events(folder / EVENTS_FILE, events)
    (folder / ABOUT_FILE).write_text(json.dumps({"world": asdict(world), "unit_of_stage": unit_of_stage}))


def load_case_folder(folder: Path) -> tuple[list[Event], World, dict[str, str]]:
    """Events, world and units of a case. Raises ConfigurationError if the folder is not one."""
    try:
        about = json.loads((folder / ABOUT_FILE).read_text())
        return load_events(folder / EVENTS_FILE), World(**about["world"]), about["unit_of_stage"]
    except (FileNotFoundError, NotADirectoryError, TypeError, KeyError, ValueError) as error:
        raise ConfigurationError(
            f"{folder} is not the folder of a finished case ({error}). Run `inc demo`, then give a folder such as "
            "out/demo/megakernel_inc-inc_all_to_all."
        ) from error


def write_pictures(folder: Path) -> list[Path]:
    """Write `timeline.png` and `perfetto.json` beside the events. Returns their paths."""
    events, world, unit_of_stage = load_case_folder(folder)
    picture, perfetto = folder / "timeline.png", folder / "perfetto.json"
    draw_timeline(picture, events, world, unit_of_stage, f"{folder.name}: one call, every PE on one clock")
    write_perfetto(perfetto, events, world)
    return [picture, perfetto]


def show_trace(folder: Path) -> int:
    """Print the counters of a case and write its pictures."""
    events, world, _ = load_case_folder(folder)
    for name, value in asdict(count(events, world)).items():
        print(f"{name.replace('_', ' '):24} {value:,}")
    for path in write_pictures(folder):
        print(f"wrote {path} (open a Perfetto file at https://ui.perfetto.dev)" if path.suffix == ".json" else f"wrote {path}")
    return 0
