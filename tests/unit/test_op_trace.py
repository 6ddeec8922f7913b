"""The verb trace: what is counted, and the files it is written to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from inc_runtime.op_trace import Event, OpTrace, count, load_events, save_events, write_perfetto
from inc_runtime.protocol import World

WORLD = World(2)
RANK0, RANK1, DISPATCH, COMBINE = range(4)


def put(pe: int, peer: int, name: str, rows: int = 0, extra: int = 8, part: int = 0) -> Event:
    kind, row_bytes = "put_signal" if rows else "signal", rows * 16
    return Event(pe, kind, name, 1, 10.0, 12.5, peer, rows, row_bytes, row_bytes + extra, rows > 0, part)


def get(pe: int, peer: int, rows: int) -> Event:
    return Event(pe, "get", "expert_rows", 1, 20.0, 22.0, peer, rows, rows * 16, rows * 16, True)


INC = [
    put(RANK0, DISPATCH, "tokens_arrived", 3, 100),
    put(RANK1, DISPATCH, "tokens_arrived", 5, 100),
    put(DISPATCH, RANK0, "expert_rows_arrived", 8, 50),
    put(DISPATCH, RANK1, "expert_rows_arrived"),
    put(DISPATCH, COMBINE, "plan_arrived"),
    put(RANK0, COMBINE, "partial_sums_ready"),
    get(COMBINE, RANK0, 8),
    put(COMBINE, RANK0, "token_sums_arrived", 3),
    put(COMBINE, RANK1, "token_sums_arrived", 5),
    Event(RANK0, "stage", "group", 1, 0.0, 5.0, rows=8),
    Event(RANK0, "wait", "token_sums", 1, 1.0, 9.0),
]


def test_totals_are_those_of_the_rank_that_has_most() -> None:
    totals = count(INC, WORLD)
    assert (totals.rows_sent, totals.rows_received) == (3 + 8, 8 + 3), "a pull counts as sent by the rank that is read"
    assert (totals.row_bytes_sent, totals.row_bytes_received) == (11 * 16, 11 * 16)
    assert totals.wire_bytes_sent == max(3 * 16 + 100 + 8 + 8 * 16, 5 * 16 + 100)
    assert totals.wire_bytes_received == (8 * 16 + 50) + (3 * 16 + 8)
    assert (totals.dispatch_rows_sent, totals.combine_rows_received) == (5, 5)


def test_packets_are_data_into_and_out_of_the_switches_and_the_rest_is_control() -> None:
    totals = count(INC, WORLD)
    assert (totals.dispatch_packets, totals.combine_packets, totals.control, totals.chunks) == (4, 3, 2, 0)


def test_chunks_of_one_message_are_one_packet() -> None:
    relayed = [put(RANK0, DISPATCH, "relay_arrived", 4, part=part) for part in range(3)]
    relayed += [put(DISPATCH, RANK1, "expert_chunk_arrived", 4, part=part) for part in range(3)]
    relayed += [put(RANK1, COMBINE, "relay_arrived", 4), put(COMBINE, RANK0, "partial_chunk_arrived", 4)]
    totals = count([*relayed, put(DISPATCH, RANK0, "relay_credits")], WORLD)
    assert (totals.dispatch_packets, totals.combine_packets, totals.chunks, totals.control) == (2, 2, 8, 1)
    assert (totals.dispatch_rows_sent, totals.combine_rows_received) == (12, 4)


def test_a_library_message_is_one_packet_in_and_one_out() -> None:
    message = Event(RANK0, "library", "dispatch", 1, 0, 1, RANK1, 4, 64, 64, True)
    totals = count([message, replace(message, name="combine"), replace(message, name="counts", rows=0)], WORLD)
    assert (totals.dispatch_packets, totals.combine_packets, totals.control) == (2, 2, 1)


def test_a_trace_that_is_off_holds_nothing() -> None:
    trace = OpTrace(0, enabled=False)
    trace.add(INC[0])
    assert trace.events == []


def test_events_survive_a_file(tmp_path: Path) -> None:
    save_events(tmp_path / "events.jsonl", INC)
    assert load_events(tmp_path / "events.jsonl") == INC


def test_a_perfetto_file_names_every_pe_and_puts_stages_verbs_and_waits_on_tracks_of_their_own(tmp_path: Path) -> None:
    write_perfetto(tmp_path / "trace.json", INC, WORLD)
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "dispatch switch 0", 3: "combine switch 0"}
    tracks = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert len(tracks) == 12
    spans = [row for row in rows if row["ph"] == "X"]
    assert len(spans) == len(INC) and min(span["ts"] for span in spans) == 0 and all(span["dur"] > 0 for span in spans)
    track_of = {span["name"]: tracks[span["pid"], span["tid"]] for span in spans}
    assert track_of["group"] == "stages" and track_of["token_sums"] == "waits"
    assert track_of["put_signal tokens_arrived"] == "verbs" == track_of["get expert_rows"]
    sent = next(span for span in spans if span["name"] == "put_signal tokens_arrived")
    assert (sent["ts"], sent["dur"]) == (10.0, 2.5)
    assert sent["args"] == {"magic": 1, "rows": 3, "wire_bytes": 148, "peer": "dispatch switch 0"}


def test_a_perfetto_file_of_an_empty_run_opens(tmp_path: Path) -> None:
    write_perfetto(tmp_path / "trace.json", [], WORLD)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
