"""What the stages of one launch did, from the events that a kernel compiled with INC_TRACE notes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megakernel.device_arguments import TILE_ROWS, TRACE_EVENT, TRACED_STAGES, TRACED_UNITS
from megakernel.launch_megakernel import MegaKernel


@dataclass(frozen=True)
class DeviceTrace:
    """Events of one rank: `events` [num_blocks, units, length]; unused ones have end_ns = 0. Nanoseconds of the GPU's clock."""

    events: np.ndarray

    @classmethod
    def of(cls, kernel: MegaKernel) -> DeviceTrace:
        """The events of the launches since the last call, and forgets them. Call it when they have ended."""
        raw = kernel.trace.cpu().numpy().view(TRACE_EVENT)
        kernel.trace.zero_()
        return cls(raw.reshape(kernel.num_blocks, len(TRACED_UNITS), -1))

    @property
    def span_ns(self) -> tuple[int, int]:
        used = self.events[self.events["end_ns"] > 0]
        return int(used["begin_ns"].min()), int(used["end_ns"].max())

    def busy_share(self) -> dict[str, float]:
        """For each class of unit, the share of the span in which it works, mean over the blocks; waits do not count."""
        begin, end = self.span_ns
        spent = self.events["end_ns"].astype(np.int64) - self.events["begin_ns"].astype(np.int64)
        spent[(self.events["end_ns"] == 0) | (self.events["stage"] == TRACED_STAGES.index("wait"))] = 0
        return {unit.value: float(spent[:, i].sum(axis=1).mean()) / (end - begin) for i, unit in enumerate(TRACED_UNITS)}

    def stages(self) -> list[tuple[str, int, float, float, float]]:
        """Per stage and microbatch: name, number, first begin, last end, time spent per block; microseconds since the start."""
        start, _ = self.span_ns
        used = self.events[self.events["end_ns"] > 0]
        first = int(used["magic"].min())
        rows = []
        for stage, magic in sorted({(int(e["stage"]), int(e["magic"])) for e in used[["stage", "magic"]]}):
            these = used[(used["stage"] == stage) & (used["magic"] == magic)]
            begin, end = these["begin_ns"].astype(np.int64) - start, these["end_ns"].astype(np.int64) - start
            spent = float((end - begin).sum()) / len(self.events)
            rows.append((TRACED_STAGES[stage], magic - first, begin.min() / 1e3, end.max() / 1e3, spent / 1e3))
        return rows

    def write(self, path: Path, notes: Sequence[str]) -> None:
        """The stages as a data file for results/plot_stage_timeline.py. `notes` say where they come from; one is "source: "."""
        columns = ("stage", "microbatch", "first_begin_us", "last_end_us", "us_per_block")
        with path.open("w", newline="", encoding="utf-8") as file:
            file.writelines(f"# {note}\n" for note in notes)
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows((name, number, *(f"{us:.1f}" for us in times)) for name, number, *times in self.stages())

    def tiles(self) -> dict[str, tuple[float, float]]:
        """Per matrix stage: median microseconds and SM clocks of a whole tile of 128 rows."""
        whole = self.events[(self.events["end_ns"] > 0) & (self.events["rows"] == TILE_ROWS)]
        found = {}
        for name in ("matmul_gate_up", "matmul_down"):
            these = whole[whole["stage"] == TRACED_STAGES.index(name)]
            if len(these):
                spent = these["end_ns"].astype(np.int64) - these["begin_ns"].astype(np.int64)
                found[name] = float(np.median(spent)) / 1e3, float(np.median(these["clocks"]))
        return found
