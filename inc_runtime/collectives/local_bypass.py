"""Local bypass, rank side: rows of a rank's own experts stay on it. Switched on by `Pipeline.local_bypass`.

Dispatch: the rank writes its own tokens that its own experts need straight into its `expert_rows`; the switch leaves
them out of its multicast. Combine: no switch pulls their partial sums; the rank adds its own to the sum that comes
back, in float32, last. So the order of a sum is: what the switch adds, in its order, rounded to a row, then the rank's
own. The plain models add all ranks in rank order as ever, their own in place.

Where: in-network collectives pack what comes through the switch from the first row of a plane on, W - 1 senders at
most, so the last run of the plane (stride: the tokens of one plane) is free for the rank; phased and relayed models
have a run for every sender. Token t stands at place t of its plane's run: no counting comes first, and a token without
an own expert leaves a gap. Records stand for all own tokens.

Why the run may be written again at the next push into its slot: the sums of the slot's last microbatch are back, which
the combine switch sends only once this rank too has published, hence after its experts have read the run; and the rank
itself has added its own partial sums, which it does before that push. No word is skipped: an expert rank waits for the
switch's word as before, and a rank publishes, requests and awaits its sums also where nothing of it crosses.
"""

from __future__ import annotations

import numpy as np

from inc_runtime.collectives.microbatch import ReceivedRows, RoutedTokens, membership_of_own_tokens, runs_of
from inc_runtime.heap_layout import Dims
from inc_runtime.one_sided import OneSided
from inc_runtime.protocol import slot_of


def places_of_own_tokens(dims: Dims, rank: int, tokens: np.ndarray) -> np.ndarray:
    """Where own tokens, numbers in the microbatch, stand in the slot of `rank` under an in-network model."""
    plane, within = np.divmod(tokens, dims.dispatch_plane_tokens)
    run = rank if dims.model.phased or dims.row_groups else dims.num_ranks - 1
    return (plane * dims.num_ranks + run) * dims.dispatch_plane_tokens + within


def keep_own_rows(pe: OneSided, magic: int, routed: RoutedTokens) -> None:
    """Write the records of all own tokens into this rank's run, and the rows that its own experts need."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    places = places_of_own_tokens(dims, pe.pe, np.arange(len(routed)))
    pe.memory["expert_rows_routing"][slot, places] = pe.memory["tokens_routing"][slot, : len(routed)]
    needed = np.flatnonzero(membership_of_own_tokens(pe, magic)[:, pe.pe])
    pe.memory["expert_rows"][slot, places[needed]] = routed.tokens[needed]


def with_own_rows(pe: OneSided, magic: int, received: ReceivedRows) -> ReceivedRows:
    """What came through the switch, then the own rows, in token order."""
    needed = np.flatnonzero(membership_of_own_tokens(pe, magic)[:, pe.pe])
    own = places_of_own_tokens(pe.layout.dims, pe.pe, needed)
    return ReceivedRows(received.rows, received.routing, np.concatenate([received.valid, own]))


def tokens_for_others(pe: OneSided, magic: int) -> np.ndarray:
    """Which own tokens some other rank needs: [n] bool. Only their rows go to the switch, and only their sums come back."""
    membership = membership_of_own_tokens(pe, magic)
    membership[:, pe.pe] = False
    return np.asarray(membership.any(axis=1))


def rows_to_put(pe: OneSided, magic: int, part: range) -> list[slice]:
    """Of the own tokens in `part`, the runs whose rows go to the switch, from its first: all, but for local bypass."""
    if not pe.layout.dims.local_bypass:
        return [slice(0, len(part))] if len(part) else []
    return runs_of(tokens_for_others(pe, magic)[part.start : part.stop])


def add_own_partial_sums(pe: OneSided, magic: int, num_tokens: int) -> np.ndarray:
    """The returned sums plus the own partial sums, float32, rounded once more: [num_tokens, H], a new array."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    returned, needed = tokens_for_others(pe, magic), np.flatnonzero(membership_of_own_tokens(pe, magic)[:, pe.pe])
    sums = np.zeros((num_tokens, dims.hidden_size), np.float32)
    sums[returned] += pe.memory["token_sums"][slot, :num_tokens][returned].astype(np.float32)
    sums[needed] += pe.memory["expert_rows"][slot, places_of_own_tokens(dims, pe.pe, needed)].astype(np.float32)
    return sums.astype(dims.row_dtype)
