"""INC AllGather-ReduceScatter, rank side: the programs of the INC all-to-all.

A rank does the same: one put per microbatch, one signal, one wait for each. What differs is the switch, which broadcasts
the concatenation of all microbatches to every rank, whatever the routing, and sums all rows of all ranks, zeros included
(`CommunicationModel.selective` is False). Its phased form shares `inc_all_to_all_phased.py` in the same way.
"""

from inc_runtime.collectives.inc_all_to_all import (
    publish_partial_sums,
    push_microbatch,
    wait_for_expert_rows,
    wait_for_token_sums,
)

__all__ = ["publish_partial_sums", "push_microbatch", "wait_for_expert_rows", "wait_for_token_sums"]
