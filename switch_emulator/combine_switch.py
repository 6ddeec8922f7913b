"""INC All-to-All-Combine, switch side: pulls the partial sums of each rank that is ready, adds them, returns the sums.

Waits on: `plan_arrived` of the dispatch switches of its tokens, then `partial_sums_ready` of every rank, in order of
arrival (in rank order when sums must not depend on timing). Signals: `token_sums_arrived` on every rank. Reads:
`expert_rows` of the expert ranks, by get. Writes: `token_sums` on the token ranks. Sums in float32, returns rows.
Rank side: `inc_runtime/collectives/inc_all_to_all.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from inc_runtime.collectives.microbatch import planes_that_meet
from inc_runtime.config import SumOrder
from inc_runtime.one_sided import Awaited, Flag, OneSided, Piece, Segment
from inc_runtime.protocol import Tag, signal_word, slot_of
from switch_emulator.combine_plan import CombinePlan
from switch_emulator.serving import in_order_of_arrival


def serve_microbatch(pe: OneSided, magic: int) -> None:
    """Sum and return one microbatch. Raises Stopped instead when all ranks have stopped."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    planes = planes_that_meet(dims, dims.world.plane_of(pe.pe))
    names = [dims.world.name_of(dims.world.dispatch_switch(p)) for p in planes]
    plans = [Awaited(Flag("plan_arrived", (slot, p)), magic, name) for p, name in zip(planes, names, strict=True)]
    for _ in in_order_of_arrival(pe, plans, Tag.COMBINE_PLAN, magic):
        pass
    plan = CombinePlan(pe, magic)
    owners = range(dims.num_ranks)
    pe.memory["accumulators"][...] = 0
    ready = [Awaited(Flag("partial_sums_ready", (slot, r)), magic, f"rank {r}") for r in owners]
    for expert_rank in ready_ranks(pe, ready):
        pull_and_add(pe, plan, expert_rank, owners)
    return_sums(pe, plan, owners)


def ready_ranks(pe: OneSided, ready: Sequence[Awaited]) -> Iterator[int]:
    """Yield positions in `ready` in order of arrival, or in rank order as they become ready."""
    pending = list(range(len(ready)))
    while pending:
        if pe.sum_order is SumOrder.RANK:
            pe.wait_until(ready[pending[0]], Tag.COMBINE_PARTIAL_SUMS)
            arrived = pending[:1]
        else:
            some = pe.wait_until_some([ready[i] for i in pending], Tag.COMBINE_PARTIAL_SUMS)
            arrived = [pending[i] for i in some]
        pending = [i for i in pending if i not in arrived]
        yield from arrived


def pull_and_add(pe: OneSided, plan: CombinePlan, expert_rank: int, owners: Sequence[int]) -> None:
    """Pull the partial sums of `expert_rank` for `owners` with one get, complete it, and add them."""
    pulls = plan.pulls(expert_rank, owners)
    if not pulls:
        return
    landing, pieces, landed = pe.memory["landing"], [], 0
    for pull in pulls:
        target = landing[landed : landed + pull.count]
        pieces.append(Piece("expert_rows", (plan.slot, slice(pull.start, pull.start + pull.count)), target))
        landed += pull.count
    pe.get(expert_rank, pieces, magic=plan.magic)
    pe.quiet()
    with pe.stage("accumulate", plan.magic, rows=landed):
        place = np.empty(pe.world.num_ranks, np.int64)
        place[list(owners)] = np.arange(len(owners))
        for pull, piece in zip(pulls, pieces, strict=True):
            # An (owner, token) pair occurs once per expert rank, so that the indexed += adds every row.
            pe.memory["accumulators"][place[pull.owners], pull.tokens] += piece.target.astype("f4")


def return_sums(pe: OneSided, plan: CombinePlan, owners: Sequence[int]) -> None:
    """Send each owner its finished rows in one packet, or a signal alone. Clears nothing: the caller zeroes first.

    The word has a payload where the owner has tokens, also if they all stay at home. The quiet completes the puts of the
    previous sums, which still read `sums_out`.
    """
    dims = pe.layout.dims
    plane = dims.world.plane_of(pe.pe)
    pe.quiet()
    for position, owner in enumerate(owners):
        runs = plan.runs_to_return(owner)
        flag = Flag("token_sums_arrived", (plan.slot, plane))
        word = signal_word(plan.magic, plan.num_tokens(owner) > 0)
        if not runs:
            pe.signal(owner, flag, word, magic=plan.magic)
            continue
        first, segments = plan.token_range.start, []
        for run in runs:
            sums = pe.memory["sums_out"][position, run]
            sums[...] = pe.memory["accumulators"][position, run].astype(sums.dtype)
            segments.append(Segment(sums, "token_sums", (plan.slot, slice(first + run.start, first + run.stop))))
        pe.put_signal(owner, segments, flag, word, magic=plan.magic)
