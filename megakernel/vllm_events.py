"""Times of our layers on a GPU under vLLM, by CUDA events around each launch. Imports no vLLM.

A captured graph that is replayed runs no host program, so its layers are not timed; `INC_VLLM_LOG_S` = 0 records no events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST_WAITING = 4096
"""Launches whose events may wait to be read, a bound on memory: more than a step has layers."""


class LayerEvents:
    """Begin and end of the launches that the GPU has not finished yet, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=MOST_WAITING)

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Time the launch of layer `number` in the block, on the current stream, unless it is being captured."""
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._waiting.append((number, begin, end))

    def finished(self) -> Iterator[tuple[int, float]]:
        """Layer and microseconds of the launches that the GPU has finished since the last time. Waits for nothing."""
        while self._waiting and self._waiting[0][2].query():
            number, begin, end = self._waiting.popleft()
            yield number, begin.elapsed_time(end) * 1e3
