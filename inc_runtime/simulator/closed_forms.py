"""Counters of a layer in closed form, from the rows that the routing asks for. One plane, no local bypass.

Exact for every communication model and any W. One sum depends on time: the pulls of a phased INC combine with 1 < G < W count
the expert ranks of each phase's owners, which come in order of request; the form here takes every rank, as dense routing does.
The credits of a relay are not counted: it gives back several cells with one word, as many as timing lets it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inc_runtime.op_trace import Counters
from inc_runtime.protocol import CHUNK_FIELDS, HEADER_FIELDS
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads

WORD = 8
HEADER = HEADER_FIELDS * 8
CHUNK = CHUNK_FIELDS * 8


@dataclass
class _Totals:
    """Per rank, in rank order: rows, row bytes and wire bytes, sent and received; and the packets of the layer."""

    num_ranks: int

    def __post_init__(self) -> None:
        self.sent, self.received = np.zeros((3, self.num_ranks), np.int64), np.zeros((3, self.num_ranks), np.int64)
        self.dispatch_sent, self.combine_received = np.zeros((2, self.num_ranks), np.int64)
        self.dispatch = self.combine = self.chunks = self.control = 0


def layer_counters(plan: LayerPlan, loads: Callable[[int], MicrobatchLoads]) -> Counters:
    """Counters of the whole layer; `loads(magic)`, magic from 1."""
    num_ranks, model = plan.scenario.num_ranks, plan.scenario.model
    totals = _Totals(num_ranks)
    for magic in range(1, plan.num_microbatches + 1):
        add = _add_in_network if model.in_network else _add_relayed
        add(totals, plan, loads(magic))
        if model.phased:
            _add_phase_words(totals, plan)
    num_switches = plan.scenario.world.num_pes - num_ranks
    totals.sent[2] += WORD * num_switches
    totals.control += num_ranks * num_switches
    sent, received = (side.max(axis=1).tolist() for side in (totals.sent, totals.received))
    return Counters(
        sent[0],
        received[0],
        sent[1],
        received[1],
        sent[2],
        received[2],
        totals.dispatch,
        totals.combine,
        totals.chunks,
        totals.control,
        int(totals.dispatch_sent.max()),
        int(totals.combine_received.max()),
    )


def _add_in_network(totals: _Totals, plan: LayerPlan, loads: MicrobatchLoads) -> None:
    num, phased = plan.scenario.num_ranks, plan.scenario.model.phased
    out, back, record = plan.dispatch_row_bytes, plan.combine_row_bytes, plan.record_bytes
    tokens, received = loads.tokens, loads.received
    totals.sent += np.stack([tokens + received, tokens * out + received * back, tokens * (out + record) + received * back])
    totals.received += np.stack([received + tokens, received * out + tokens * back, received * (out + record) + tokens * back])
    totals.dispatch_sent += tokens
    totals.combine_received += tokens
    totals.sent[2] += HEADER + WORD
    totals.received[2] += WORD
    packets = loads.rows if phased else received[None]
    totals.received[2] += (WORD + HEADER * (packets > 0)).sum(axis=0)
    totals.dispatch += num + num * (num if phased else 1)
    group = plan.scenario.pipeline.ranks_per_phase if phased else num
    pulls = int((loads.rows > 0).sum()) if group == 1 else -(-num // group) * int((received > 0).sum())
    totals.combine += pulls + num
    if phased:
        totals.sent[2] += HEADER + tokens * record + WORD
        totals.control += num
    else:
        totals.sent[2] += WORD
        totals.control += num + 1


def _add_relayed(totals: _Totals, plan: LayerPlan, loads: MicrobatchLoads) -> None:
    num, per_chunk = plan.scenario.num_ranks, plan.scenario.layout.dims.rows_per_chunk
    for dispatch, rows in ((True, loads.rows), (False, loads.rows.T)):
        row_bytes = plan.dispatch_row_bytes if dispatch else plan.combine_row_bytes
        wire_row = row_bytes + plan.record_bytes * dispatch
        chunks = np.maximum(1, -(-rows // per_chunk))
        sent, received = rows.sum(axis=1), rows.sum(axis=0)
        first = HEADER * dispatch * (rows > 0).sum(axis=0)
        into = (CHUNK + HEADER * dispatch + WORD) * chunks.sum(axis=1)
        totals.sent += np.stack([sent, sent * row_bytes, sent * wire_row + into])
        totals.received += np.stack([received, received * row_bytes, received * wire_row + first + WORD * chunks.sum(axis=0)])
        totals.chunks += 2 * int(chunks.sum())
        if dispatch:
            totals.dispatch_sent += sent
            totals.dispatch += 2 * num * num
        else:
            totals.combine_received += received
            totals.combine += 2 * num * num


def _add_phase_words(totals: _Totals, plan: LayerPlan) -> None:
    """Requests and grants of the dispatch, the barrier, and for a relay the requests and openings of the combine."""
    num = plan.scenario.num_ranks
    barrier = int(plan.scenario.pipeline.barrier_after_dispatch)
    relayed = int(not plan.scenario.model.in_network)
    totals.sent[2] += WORD * (1 + barrier + relayed)
    totals.received[2] += WORD * (1 + barrier + relayed * num)
    totals.control += num * (2 + 2 * barrier + relayed * (1 + num))
