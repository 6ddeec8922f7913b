"""The timeline picture: what each class of unit of every PE does, microbatch by microbatch. A function of the events alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inc_runtime.op_trace import Event
from inc_runtime.protocol import World

COLORS = {"in-network element": "#f2a33a", "vector units": "#5aa469", "matrix units": "#8064a2", "switch": "#d9762b"}
START_OF = {
    "tokens_arrived": "dispatch",
    "relay_arrived": "dispatch",
    "partial_sums_ready": "combine",
    "combine_requests": "combine",
}
END_OF = {"expert_rows": "dispatch", "token_sums": "combine"}


@dataclass(frozen=True)
class Span:
    """One box: a stage or a collective of one microbatch on one lane."""

    pe: int
    lane: str
    stage: str
    magic: int
    start_us: float
    end_us: float


def spans(events: Sequence[Event], world: World, unit_of_stage: Mapping[str, str]) -> list[Span]:
    """Boxes of all PEs. Tiles of one microbatch that touch are one box.

    A collective of a rank lasts from its put or signal to the end of its wait: the time in which the network, not the rank,
    works on the microbatch. `unit_of_stage` maps a stage to the class of unit that runs it.
    """
    boxes: list[Span] = []
    began: dict[tuple[int, str, int], float] = {}
    for event in events:
        if event.pe >= world.num_ranks:
            if event.kind in ("put_signal", "get", "stage"):
                boxes.append(Span(event.pe, "switch", event.name, event.magic, event.start_us, event.end_us))
        elif event.kind == "stage":
            lane = unit_of_stage.get(event.name, "vector units")
            boxes.append(Span(event.pe, lane, event.name, event.magic, event.start_us, event.end_us))
        elif event.kind == "library":
            boxes.append(Span(event.pe, "in-network element", event.name, event.magic, event.start_us, event.end_us))
        elif event.kind in ("put_signal", "signal") and event.name in START_OF:
            began.setdefault((event.pe, START_OF[event.name], event.magic), event.start_us)
        elif event.kind == "wait" and event.name in END_OF:
            stage = END_OF[event.name]
            start = began.get((event.pe, stage, event.magic))
            if stage == "combine" and start is None:
                start = max((b.end_us for b in boxes if (b.pe, b.magic) == (event.pe, event.magic)), default=event.start_us)
            if start is not None:
                boxes.append(Span(event.pe, "in-network element", stage, event.magic, start, event.end_us))
    return merge(boxes)


def merge(boxes: list[Span]) -> list[Span]:
    """Join boxes of one lane, unit and microbatch that overlap or nearly touch, so that tiles read as one."""
    total = max((b.end_us for b in boxes), default=0.0) - min((b.start_us for b in boxes), default=0.0)
    merged: list[Span] = []
    last: dict[tuple[int, str, int], int] = {}
    for box in sorted(boxes, key=lambda b: b.start_us):
        key = (box.pe, box.lane, box.magic)
        previous = merged[last[key]] if key in last else None
        same = previous is not None and (box.lane != "in-network element" or previous.stage == box.stage)
        if previous is not None and same and box.start_us - previous.end_us < 0.02 * total:
            joined = Span(*key[:2], previous.stage, box.magic, previous.start_us, max(previous.end_us, box.end_us))
            merged[last[key]] = joined
        else:
            last[key] = len(merged)
            merged.append(box)
    return merged


def draw_timeline(
    path: Path, events: Sequence[Event], world: World, unit_of_stage: Mapping[str, str], title: str
) -> None:
    """Write the picture: three lanes per rank (in-network element, vector units, matrix units) and one per switch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    boxes = spans(events, world, unit_of_stage)
    if not boxes:
        return
    lanes = [(pe, lane) for pe in range(world.num_ranks) for lane in list(COLORS)[:3]]
    lanes += [(pe, "switch") for pe in range(world.num_ranks, world.num_pes) if any(b.pe == pe for b in boxes)]
    origin = min(box.start_us for box in boxes)
    first_magic = min(box.magic for box in boxes if box.magic > 0)
    figure, axes = plt.subplots(figsize=(13, 0.32 * len(lanes) + 1.6))
    stacked = _stack(boxes)
    for box, level, levels in stacked:
        row = len(lanes) - 1 - lanes.index((box.pe, box.lane))
        height = 0.84 / levels
        bottom = row - 0.42 + level * height
        start, width = (box.start_us - origin) / 1e3, max(box.end_us - box.start_us, 1.0) / 1e3
        shade = 1.0 if (box.magic - first_magic) % 2 == 0 else 0.62
        axes.broken_barh([(start, width)], (bottom, height * 0.94), facecolors=COLORS[box.lane], alpha=shade, linewidth=0)
        middle = (start + width / 2, bottom + height / 2)
        axes.text(*middle, str(box.magic - first_magic), ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_yticks(range(len(lanes)))
    names = [f"{world.name_of(pe)} · {lane}" if lane != "switch" else world.name_of(pe) for pe, lane in lanes]
    axes.set_yticklabels(names[::-1])
    axes.tick_params(axis="y", labelsize=7, length=0)
    for rank in range(1, world.num_ranks + 1):
        axes.axhline(len(lanes) - 3 * rank - 0.5, color="#bbbbbb", linewidth=0.6)
    axes.set_xlabel("time (ms); the number in a box is its microbatch")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=color, label=lane) for lane, color in COLORS.items()]
    figure.legend(handles=handles, loc="upper right", ncols=4, fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _stack(boxes: list[Span]) -> list[tuple[Span, int, int]]:
    """Give boxes of one lane that overlap in time levels of their own: (box, level, levels of the lane)."""
    placed: list[tuple[Span, int]] = []
    levels: dict[tuple[int, str], int] = {}
    busy: dict[tuple[int, str], list[float]] = {}
    for box in sorted(boxes, key=lambda b: b.start_us):
        key = (box.pe, box.lane)
        ends = busy.setdefault(key, [])
        level = next((i for i, end in enumerate(ends) if end <= box.start_us), len(ends))
        if level == len(ends):
            ends.append(box.end_us)
        else:
            ends[level] = box.end_us
        placed.append((box, level))
        levels[key] = max(levels.get(key, 0), len(ends))
    return [(box, level, levels[box.pe, box.lane]) for box, level in placed]
