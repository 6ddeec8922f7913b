"""The order in which a rank takes the stages of its microbatches: one stage group behind another, D sets in flight.

While the experts of microbatch m run, m + 1 is in its dispatch and m - 1 in its combine (depth 3). A deeper ring moves the
groups further apart. Source: post, Pipelining and three-way overlap.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


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


@dataclass(frozen=True)
class DeviceLags:
    """How many steps after its send the vector warps of the megakernel group, reduce and combine a microbatch."""

    group: int
    reduce: int
    combine: int


def device_lags(depth: int) -> DeviceLags:
    """The order of the stages on the device, where products run beside them: a rank groups microbatch m + 1 before it reduces m.

    As in `schedule`, a microbatch finishes `depth - 1` steps after its send. Never more than two steps lie between group and
    combine: three sets of grouped rows suffice then.
    """
    combine = depth - 1
    group = max(combine // 2, combine - 2)
    return DeviceLags(group, min(group + 1, combine), combine)
