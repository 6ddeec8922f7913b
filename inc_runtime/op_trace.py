"""The verb trace: what every PE did and when; counters and a Perfetto file follow from it.

Times are microseconds of one clock: CLOCK_MONOTONIC of the machine on the host backend, virtual time in the simulator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from inc_runtime.protocol import World


@dataclass(slots=True)
class Event:
    """One verb or one stage of local work of one PE.

    `kind` is put_signal, signal, get, quiet, wait, barrier, stage, or library for a message of a library collective; `name`
    the region of the flag or of the first piece, the tag of a wait, or the name of the stage. `rows` and `row_bytes` count
    token rows alone (logical), `wire_bytes` everything that crosses the link: rows, records, headers, signal words. `part`
    numbers the chunks of one message.
    """

    pe: int
    kind: str
    name: str
    magic: int
    start_us: float
    end_us: float
    peer: int = -1
    rows: int = 0
    row_bytes: int = 0
    wire_bytes: int = 0
    has_payload: bool = False
    part: int = 0


@dataclass
class OpTrace:
    """Events of one PE, in the order in which it issued them."""

    pe: int
    enabled: bool = True
    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if self.enabled:
            self.events.append(event)


def save_events(path: Path, events: Iterable[Event]) -> None:
    """Write events, one JSON object a line."""
    with open(path, "w", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps(asdict(event)) + "\n")


def load_events(path: Path) -> list[Event]:
    """Read what `save_events` wrote."""
    with open(path, encoding="utf-8") as file:
        return [Event(**json.loads(line)) for line in file]


@dataclass(frozen=True)
class Counters:
    """Totals of one trace. Rows and bytes are per compute rank: the maximum over ranks of each rank's total.

    `dispatch_packets` and `combine_packets` count every put or signal that a rank sends into a switch, or a switch to a
    rank, and that carries or stands for data, and every pull. A message that a relay streams in chunks is one packet each
    way; a message of a library collective is one into and one out of the fabric's switch. `chunks` counts the pieces,
    `control` the rest: ready signals, plans, requests, grants, credits, barrier and stop words. `dispatch_rows_sent` and
    `combine_rows_received` are the rows of one rank that the post counts.
    """

    rows_sent: int
    rows_received: int
    row_bytes_sent: int
    row_bytes_received: int
    wire_bytes_sent: int
    wire_bytes_received: int
    dispatch_packets: int
    combine_packets: int
    chunks: int
    control: int
    dispatch_rows_sent: int = 0
    combine_rows_received: int = 0


DATA_FLAGS_OF_DISPATCH = {"tokens_arrived", "expert_rows_arrived", "group_arrived", "expert_group_arrived"}
DATA_FLAGS_OF_COMBINE = {"token_sums_arrived"}
DISPATCH_NAMES = {"dispatch", "tokens_arrived", "group_arrived", "relay_arrived"}
COMBINE_NAMES = {"combine", "token_sums_arrived", "partial_chunk_arrived"}
CHUNK_FLAGS = {"relay_arrived", "expert_chunk_arrived", "partial_chunk_arrived"}


def count(events: Sequence[Event], world: World) -> Counters:
    """Counters of a whole run; divide by the number of microbatches for figures per microbatch.

    What a PE tells itself crosses nothing and is left out. A pull counts as sent by the rank that is read. Combine packets
    into the switch are the pulls; the ready signals that announce them are control.
    """
    num = world.num_ranks
    sent, received = [[0, 0, 0] for _ in range(num)], [[0, 0, 0] for _ in range(num)]
    dispatch_sent, combine_received = [0] * num, [0] * num
    dispatch = combine = chunks = control = 0
    dispatch_switches = range(num, num + world.num_dispatch_switches)
    for event in events:
        if event.kind not in ("put_signal", "signal", "get", "library"):
            continue
        source, target = (event.peer, event.pe) if event.kind == "get" else (event.pe, event.peer)
        if source == target and event.kind != "library":
            continue
        if source < num and event.name in DISPATCH_NAMES:
            dispatch_sent[source] += event.rows if _to_dispatch(event, dispatch_switches) else 0
        if target < num and event.name in COMBINE_NAMES:
            combine_received[target] += event.rows
        for side in ((sent[source],) if source < num else ()) + ((received[target],) if target < num else ()):
            side[0] += event.rows
            side[1] += event.row_bytes
            side[2] += event.wire_bytes
        if event.kind == "library":
            dispatch += 2 * (event.name == "dispatch")
            combine += 2 * (event.name == "combine")
            control += event.name not in ("dispatch", "combine")
        elif event.kind == "get" or event.name in DATA_FLAGS_OF_COMBINE:
            combine += 1
        elif event.name in DATA_FLAGS_OF_DISPATCH:
            dispatch += 1
        elif event.name in CHUNK_FLAGS:
            chunks += 1
            through_dispatch = source in dispatch_switches or target in dispatch_switches
            dispatch += event.part == 0 and through_dispatch
            combine += event.part == 0 and not through_dispatch
        else:
            control += 1
    top_sent, top_received = ([max(column) for column in zip(*side, strict=True)] for side in (sent, received))
    return Counters(
        top_sent[0],
        top_received[0],
        top_sent[1],
        top_received[1],
        top_sent[2],
        top_received[2],
        dispatch,
        combine,
        chunks,
        control,
        max(dispatch_sent),
        max(combine_received),
    )


def _to_dispatch(event: Event, dispatch_switches: range) -> bool:
    return event.kind == "library" or event.peer in dispatch_switches


def write_perfetto(path: Path, events: Sequence[Event], world: World) -> None:
    """A trace that ui.perfetto.dev opens: one process per PE, one track for stages, one for verbs, one for waits."""
    tracks = {"stage": 0, "wait": 2, "barrier": 2}
    origin = min((event.start_us for event in events), default=0.0)
    rows: list[dict[str, object]] = []
    for pe in range(world.num_pes):
        rows.append({"ph": "M", "pid": pe, "name": "process_name", "args": {"name": world.name_of(pe)}})
        for tid, label in enumerate(("stages", "verbs", "waits")):
            rows.append({"ph": "M", "pid": pe, "tid": tid, "name": "thread_name", "args": {"name": label}})
    for event in events:
        args = {"magic": event.magic, "rows": event.rows, "wire_bytes": event.wire_bytes}
        if event.peer >= 0:
            args["peer"] = world.name_of(event.peer)  # type: ignore[assignment]
        rows.append(
            {
                "ph": "X",
                "pid": event.pe,
                "tid": tracks.get(event.kind, 1),
                "name": event.name if event.kind in tracks else f"{event.kind} {event.name}",
                "ts": round(event.start_us - origin, 3),
                "dur": round(max(event.end_us - event.start_us, 0.001), 3),
                "args": args,
            }
        )
    path.write_text(json.dumps({"traceEvents": rows}), encoding="utf-8")
