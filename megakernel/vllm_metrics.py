"""What the layers of a serving rank cost: per layer, the time of each stage, waiting, bytes and rows. Imports no vLLM.

They go to a line of the log every INC_VLLM_LOG_S seconds and, where prometheus_client collects from several processes
(PROMETHEUS_MULTIPROC_DIR), to counters that vLLM's own /metrics shows. The first N steps with requests can leave every verb
in a file, with a picture of them for ui.perfetto.dev.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from inc_runtime.environment import Environment
from inc_runtime.op_trace import Event, OpTrace, save_events, write_perfetto
from inc_runtime.protocol import World

logger = logging.getLogger("vllm.inc_moe")

COUNTERS = {
    "stage_seconds": ("Time in one stage of the MoE layer", "stage"),
    "wait_seconds": ("Time that the rank waited for others in the MoE layer, by what it waited for", "tag"),
    "bytes_sent": ("Bytes that the rank sent in the MoE layer, headers and signals included", None),
    "rows": ("Token rows of the rank in the MoE layer: its own tokens, or received for its experts", "kind"),
    "calls": ("Calls of the MoE layer", None),
    "layer_seconds": ("Time in the MoE layer, waiting for others included", None),
}
"""Name, help and label of each counter; all have the labels rank and layer."""


@dataclass
class LayerTotals:
    """Sums over the calls of one layer; times in microseconds."""

    calls: int = 0
    time_us: float = 0.0
    stages_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes_sent: int = 0
    tokens: int = 0
    expert_rows: int = 0

    def add(self, events: Sequence[Event], time_us: float, tokens: int) -> None:
        """Add one call, by its events."""
        self.calls += 1
        self.time_us += time_us
        self.tokens += tokens
        for event in events:
            if event.kind == "stage":
                self.stages_us[event.name] += event.end_us - event.start_us
                self.expert_rows += event.rows if event.name == "group" else 0
            elif event.kind in ("wait", "library"):
                self.waits_us[event.name] += event.end_us - event.start_us
            if event.kind in ("put_signal", "signal", "library"):
                self.bytes_sent += event.wire_bytes

    def merge(self, other: LayerTotals) -> None:
        """Add the sums of another."""
        for name in ("calls", "time_us", "bytes_sent", "tokens", "expert_rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.stages_us, other.stages_us), (self.waits_us, other.waits_us)):
            for name, value in theirs.items():
                mine[name] += value

    def sentence(self) -> str:
        """Means per call, in words."""
        calls = max(self.calls, 1)
        stages = ", ".join(f"{name} {value / calls / 1000:.2f}" for name, value in self.stages_us.items())
        waits = ", ".join(f"{name} {value / calls / 1000:.2f}" for name, value in self.waits_us.items())
        return (
            f"{self.time_us / calls / 1000:.2f} ms (stages: {stages or 'none'}; waiting: {waits or 'none'}), "
            f"{self.tokens / calls:.1f} tokens, {self.expert_rows / calls:.1f} expert rows, {self.bytes_sent / calls:,.0f} B sent"
        )


class StepMetrics:
    """Collects what one rank does, layer by layer. The trace of a layer is emptied after each call."""

    def __init__(self, rank: int, world: World, environment: Environment) -> None:
        self.rank, self.world = rank, world
        self.totals: dict[int, LayerTotals] = defaultdict(LayerTotals)
        self._log_s = environment.vllm_log_s
        self._logged = time.monotonic()
        self._prometheus = _prometheus_counters()
        self.trace_steps(environment.trace_steps, environment.trace_folder)

    def trace_steps(self, num_steps: int, folder: str) -> None:
        """Let the next `num_steps` steps in which this rank has tokens leave their verbs in `folder`."""
        self._steps_left, self._folder = num_steps, Path(folder)
        self._events: list[Event] = []
        self._tracing = False

    @contextmanager
    def layer(self, number: int, trace: OpTrace, tokens: int) -> Iterator[None]:
        """Measure one call of layer `number` with `tokens` real tokens."""
        if number == 0:
            self._step_begins(tokens)
        trace.events.clear()
        start = time.perf_counter()
        yield
        self._add(number, trace.events, (time.perf_counter() - start) * 1e6, tokens)
        if self._tracing:
            self._events += trace.events
        trace.events.clear()

    def finished_on_gpu(self, launches: Iterable[tuple[int, float]], tokens: int) -> None:
        """Layer and microseconds of launches that a GPU has finished; `tokens`: of the last step, nearly theirs."""
        for number, time_us in launches:
            if number == 0:
                self._log_when_due()
            self._add(number, (), time_us, tokens)

    def _add(self, number: int, events: Sequence[Event], time_us: float, tokens: int) -> None:
        one = LayerTotals()
        one.add(events, time_us, tokens)
        self.totals[number].merge(one)
        if self._prometheus:
            self._count(number, one)

    def _step_begins(self, tokens: int) -> None:
        if self._tracing:
            self._steps_left -= 1
            self._tracing = self._steps_left > 0
            if not self._tracing:
                self._save_trace()
        elif self._steps_left > 0 and tokens:
            self._tracing = True
        self._log_when_due()

    def _log_when_due(self) -> None:
        if self._log_s and self.totals and time.monotonic() - self._logged >= self._log_s:
            self.log()

    def _save_trace(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"events-{self.rank}.jsonl"
        save_events(path, self._events)
        write_perfetto(path.with_name(f"perfetto-{self.rank}.json"), self._events, self.world)
        logger.info("INC rank %d: trace of %d verbs in %s", self.rank, len(self._events), path)
        self._events = []

    def log(self) -> None:
        """Write one line for all layers and one for each, then begin anew."""
        everything = LayerTotals()
        for totals in self.totals.values():
            everything.merge(totals)
        seconds, self._logged = time.monotonic() - self._logged, time.monotonic()
        steps = max(totals.calls for totals in self.totals.values())
        logger.info(
            "INC rank %d: %d steps in %.1f s; a layer takes %s", self.rank, steps, seconds, everything.sentence()
        )
        for number in sorted(self.totals):
            logger.info("INC rank %d layer %d: %s", self.rank, number, self.totals[number].sentence())
        self.totals.clear()

    def _count(self, number: int, one: LayerTotals) -> None:
        labels = (str(self.rank), str(number))
        counters = self._prometheus
        for name, value in one.stages_us.items():
            counters["stage_seconds"].labels(*labels, name).inc(value / 1e6)
        for name, value in one.waits_us.items():
            counters["wait_seconds"].labels(*labels, name).inc(value / 1e6)
        counters["bytes_sent"].labels(*labels).inc(one.bytes_sent)
        counters["rows"].labels(*labels, "tokens").inc(one.tokens)
        counters["rows"].labels(*labels, "expert_rows").inc(one.expert_rows)
        counters["calls"].labels(*labels).inc(one.calls)
        counters["layer_seconds"].labels(*labels).inc(one.time_us / 1e6)


@cache
def _prometheus_counters() -> dict:
    """Counters that every process of the server shares by files, or none where nobody collects them."""
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return {}
    from prometheus_client import Counter

    return {
        name: Counter(f"inc_moe_{name}", text, ["rank", "layer", *([label] if label else [])])
        for name, (text, label) in COUNTERS.items()
    }
