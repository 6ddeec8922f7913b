"""AllGather-ReduceScatter through a relay switch, rank side: the programs of the plain all-to-all, without selection.

Every rank sends its whole microbatch to every rank, and returns a row, zeros where it has no expert, for every token of
every rank (`CommunicationModel.selective` is False). It moves up to W times more rows than needed and needs no counts.
"""

from inc_runtime.collectives.all_to_all import (
    publish_partial_sums,
    push_microbatch,
    wait_for_expert_rows,
    wait_for_token_sums,
)

__all__ = ["publish_partial_sums", "push_microbatch", "wait_for_expert_rows", "wait_for_token_sums"]
