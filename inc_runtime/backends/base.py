"""What the backends that execute the role programs share: own memory, traces, flag rules, wait records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from inc_runtime.config import SumOrder
from inc_runtime.errors import Aborted, ProtocolViolation, WaitRecord
from inc_runtime.heap_layout import ERROR_BYTES, HeapLayout, Kind
from inc_runtime.one_sided import Awaited, Flag, Piece, Segment
from inc_runtime.op_trace import Event, OpTrace
from inc_runtime.protocol import Tag, World, magic_of, slot_of

SIGNAL_BYTES = 8


class BasePe:
    """One PE. A backend adds the clock, the copies and the waiting."""

    def __init__(
        self,
        pe: int,
        world: World,
        layout: HeapLayout,
        memory: dict[str, np.ndarray],
        *,
        traced: bool,
        sum_order: SumOrder,
    ) -> None:
        self.pe = pe
        self.world = world
        self.layout = layout
        self.sum_order = sum_order
        self.role = world.role_of(pe)
        self.name = world.name_of(pe)
        self.memory = {**memory, **layout.private(self.role)}
        self.num_layers = 0
        self.trace = OpTrace(pe, enabled=traced)

    def now_us(self) -> float:
        raise NotImplementedError

    def wait_until_some(
        self, awaited: Sequence[Awaited], tag: Tag, *, microbatch: int = -1, idle: bool = False
    ) -> list[int]:
        raise NotImplementedError

    def wait_until(self, awaited: Awaited, tag: Tag, *, microbatch: int = -1) -> int:
        self.wait_until_some([awaited], tag, microbatch=microbatch)
        return self.word(awaited.flag)

    def word(self, flag: Flag) -> int:
        return int(self.memory[flag.region][flag.index])

    def _target(self, peer_memory: dict[str, np.ndarray], peer: int, region: str, index: tuple) -> np.ndarray:
        if region not in peer_memory:
            self.layout.offset(self.world.role_of(peer), region)
        return peer_memory[region][index]

    def _copy(self, peer_memory: dict[str, np.ndarray], peer: int, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if segment.num_rows:
                self._target(peer_memory, peer, segment.region, segment.index)[...] = segment.read()

    def _raise_flag(self, peer_memory: dict[str, np.ndarray], peer: int, flag: Flag, word: int) -> None:
        words = self._target(peer_memory, peer, flag.region, ())
        if flag.region != "abort" and int(words[flag.index]) >= word:
            raise ProtocolViolation(
                f"{self.name} raised {flag.region}{list(flag.index)} of {self.world.name_of(peer)} to word {word}, "
                f"but it holds {int(words[flag.index])}: words of a flag strictly increase and it has one writer."
            )
        words[flag.index] = word

    def _put_event(
        self, peer: int, segments: Sequence[Segment], flag: Flag, word: int, magic: int, part: int, start: float
    ) -> Event:
        target_role = self.world.role_of(peer)
        rows = row_bytes = wire_bytes = 0
        for segment in segments:
            wire_bytes += segment.num_bytes
            if self.layout.region(target_role, segment.region).kind is Kind.ROWS:
                rows += segment.num_rows
                row_bytes += segment.num_bytes
        kind = "put_signal" if segments else "signal"
        return Event(
            self.pe,
            kind,
            flag.region,
            magic,
            start,
            start,
            peer,
            rows,
            row_bytes,
            wire_bytes + SIGNAL_BYTES,
            bool(word & 1),
            part,
        )

    def _get_event(self, peer: int, pieces: Sequence[Piece], magic: int, start: float) -> Event:
        rows = sum(len(piece.target) for piece in pieces)
        num_bytes = sum(piece.target.nbytes for piece in pieces)
        return Event(self.pe, "get", pieces[0].region, magic, start, start, peer, rows, num_bytes, num_bytes, True)

    def _record_wait(self, awaited: Sequence[Awaited], tag: Tag, start: float) -> None:
        magic = max(a.magic for a in awaited)
        self.trace.add(Event(self.pe, "wait", tag.name.lower(), magic, start, self.now_us()))

    def _wait_record(
        self, awaited: Sequence[Awaited], tag: Tag, microbatch: int, waited_s: float, cause: str = ""
    ) -> WaitRecord:
        owed = [a for a in awaited if not a.optional] or list(awaited)
        first = owed[0]
        missing = list(dict.fromkeys(a.sender for a in owed if self.word(a.flag) < a.threshold))
        seen: dict[str, int] = {}
        for a in owed:
            seen[a.sender] = min(self.word(a.flag), seen.get(a.sender, self.word(a.flag)))
        return WaitRecord(
            self.name,
            tag.name,
            microbatch if microbatch >= 0 else first.magic - 1,
            slot_of(first.magic, self.layout.dims.depth),
            first.magic,
            first.threshold,
            seen,
            missing,
            waited_s,
            cause,
        )

    def _check_abort(self, peer_memories: Sequence[dict[str, np.ndarray]]) -> None:
        word = int(self.memory["abort"][0])
        if word:
            peer = magic_of(word) - 1
            report = bytes(peer_memories[peer]["error_record"]).rstrip(b"\0").decode(errors="replace")
            raise Aborted(f"{self.name} stopped: {self.world.name_of(peer)} raised the abort word. It reports: {report}")

    def _write_error_record(self, message: str) -> None:
        data = message.encode()[: ERROR_BYTES - 1]
        self.memory["error_record"][:] = 0
        self.memory["error_record"][: len(data)] = np.frombuffer(data, np.uint8)

    @contextmanager
    def stage(self, stage: str, magic: int, *, rows: int = 0) -> Iterator[None]:
        start = self.now_us()
        yield
        self._spend(stage, int(rows))
        self.trace.add(Event(self.pe, "stage", stage, magic, start, self.now_us(), rows=int(rows)))

    def _spend(self, stage: str, rows: int) -> None:
        """Let a virtual clock advance by the cost of local work; real time passes by itself."""
