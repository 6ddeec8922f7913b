"""The communication models, rank side: one module each, with the same four functions.

`push_microbatch`, `wait_for_expert_rows`, `publish_partial_sums`, `wait_for_token_sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inc_runtime.collectives import (
    all_gather_reduce_scatter,
    all_to_all,
    all_to_all_phased,
    inc_all_gather_reduce_scatter,
    inc_all_to_all,
    inc_all_to_all_phased,
)
from inc_runtime.collectives.microbatch import Call, ReceivedRows, RoutedTokens
from inc_runtime.config import CommunicationModel
from inc_runtime.one_sided import OneSided


@dataclass(frozen=True)
class RankPrograms:
    """What a rank does in one communication model."""

    push_microbatch: Callable[[OneSided, Call, int, RoutedTokens], None]
    wait_for_expert_rows: Callable[[OneSided, Call, int], ReceivedRows]
    publish_partial_sums: Callable[[OneSided, Call, int], None]
    wait_for_token_sums: Callable[[OneSided, Call, int, int], np.ndarray]


_MODULES = {
    CommunicationModel.ALL_GATHER_REDUCE_SCATTER: all_gather_reduce_scatter,
    CommunicationModel.ALL_TO_ALL: all_to_all,
    CommunicationModel.ALL_TO_ALL_PHASED: all_to_all_phased,
    CommunicationModel.INC_ALL_GATHER_REDUCE_SCATTER: inc_all_gather_reduce_scatter,
    CommunicationModel.INC_ALL_GATHER_REDUCE_SCATTER_PHASED: inc_all_to_all_phased,
    CommunicationModel.INC_ALL_TO_ALL: inc_all_to_all,
    CommunicationModel.INC_ALL_TO_ALL_PHASED: inc_all_to_all_phased,
}


def rank_programs(model: CommunicationModel) -> RankPrograms:
    """The four rank-side functions of a communication model."""
    module = _MODULES[model]
    return RankPrograms(
        module.push_microbatch,
        module.wait_for_expert_rows,
        module.publish_partial_sums,
        module.wait_for_token_sums,
    )
