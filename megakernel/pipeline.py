"""The order in which a rank takes the stages of its microbatches: one stage group behind another, D sets in flight.

While the experts of microbatch m run, m + 1 is in its dispatch and m - 1 in its combine (depth 3). A deeper ring moves the
groups further apart. Source: post, Pipelining and three-way overlap.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator


class StageGroup(enum.Enum):
    """Stages that a rank runs without waiting in between."""

    SEND = "route, pack and put"
    EXPERTS = "receive, group, MatMul, SwiGLU, MatMul, reduce, publish"
    FINISH = "receive the sums, global reduce, copy to the output"


def schedule(num_microbatches: int, depth: int) -> Iterator[tuple[StageGroup, int]]:
    """Yield (stage group, microbatch) in the order in which a rank runs them.

    Microbatch m is sent after m - depth has finished, so that the ring has a free slot set; never more than `depth`
    microbatches are between their send and their finish.
    """
    experts_lag, finish_lag = (depth - 1) // 2, depth - 1
    for step in range(num_microbatches + finish_lag):
        for group, lag in ((StageGroup.SEND, 0), (StageGroup.EXPERTS, experts_lag), (StageGroup.FINISH, finish_lag)):
            if 0 <= step - lag < num_microbatches:
                yield group, step - lag
