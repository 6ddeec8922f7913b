"""Baseline: one kernel per stage, whole tensors between them, library collectives (torch.distributed).

The ten stages run one after another over the whole batch. Counts are traded first, in an all-to-all of their own; the rows
then go in one all-to-all each way. Every intermediate tensor is stored.
"""

from __future__ import annotations

import numpy as np
import torch

from inc_runtime.collectives.microbatch import Call, ReceivedRows
from inc_runtime.config import CommunicationModel
from inc_runtime.routing import expert_rank_membership, rows_of_expert_ranks
from megakernel import experts as stage
from megakernel.experts import HostExperts
from megakernel.fused_layer import LayerInput
from megakernel.library_group import LibraryGroup


def run_baseline(
    library: LibraryGroup,
    call: Call,
    model: CommunicationModel,
    experts: HostExperts,
    given: LayerInput,
    output: np.ndarray,
) -> None:
    """Run the ten stages over the whole batch and fill `output` [N, H]."""
    num_tokens = len(given.tokens)
    with library.stage("route", num_tokens):
        routed = given.route(slice(None))
    with library.stage("pack", num_tokens):
        membership = expert_rank_membership(
            routed.expert_ids, call.shape.num_experts, library.num_ranks, selective=model.selective
        )
        rows_for = rows_of_expert_ranks(membership)
        records = routing_records(routed.expert_ids, routed.weights)
        packed = [routed.tokens[rows] for rows in rows_for]
        packed_records = [records[rows] for rows in rows_for]
    ranks = range(library.num_ranks)
    counts = np.zeros((library.num_ranks, 1), np.int64)
    library.exchange("counts", [[np.array([len(rows)])] for rows in rows_for], [[counts[r]] for r in ranks])
    first = np.concatenate([[0], np.cumsum(counts)])
    rows = np.empty((first[-1], output.shape[1]), output.dtype)
    routing = np.empty(first[-1], records.dtype)
    blocks = [slice(first[r], first[r + 1]) for r in ranks]
    to_send = [[packed[r], packed_records[r]] for r in ranks]
    library.exchange("dispatch", to_send, [[rows[block], routing[block]] for block in blocks])
    received = ReceivedRows(rows, routing, np.arange(len(rows)))
    run_experts(library, experts, received)
    returned = [np.empty((len(own), output.shape[1]), output.dtype) for own in rows_for]
    library.exchange("combine", [[rows[block]] for block in blocks], [[part] for part in returned])
    with library.stage("global_reduce", num_tokens):
        sums = np.zeros(output.shape, np.float32)
        for own, part in zip(rows_for, returned, strict=True):
            sums[own] += part.astype(np.float32)
        output[...] = sums.astype(output.dtype)


def routing_records(expert_ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Experts and weights of each token, as one array of records."""
    top_k = expert_ids.shape[1]
    records = np.empty(len(expert_ids), [("expert_ids", "<i4", (top_k,)), ("weights", "<f4", (top_k,))])
    records["expert_ids"], records["weights"] = expert_ids, weights
    return records


def run_experts(library: LibraryGroup, experts: HostExperts, received: ReceivedRows) -> None:
    """Stages 3 to 7 over the whole batch, one after another, each storing its tensor."""
    hidden = received.rows.shape[1]
    with library.stage("group", len(received)):
        grouped = stage.group(received, experts)
        tiles = stage.expert_tiles(grouped)
        rows = [stage.gather_tile(received, grouped, positions) for _, positions in tiles]
    num_rows = len(grouped.row)
    with library.stage("matmul_gate_up", num_rows):
        projections = [stage.matmul_gate_up(x, experts.gate_up[e]) for x, (e, _) in zip(rows, tiles, strict=True)]
    with library.stage("swiglu", num_rows):
        activations = [stage.swiglu(p, stage.format_of(received)) for p in projections]
    with library.stage("matmul_down", num_rows):
        outputs = [stage.matmul_down(a, experts.down[e]) for a, (e, _) in zip(activations, tiles, strict=True)]
    with library.stage("reduce", num_rows):
        partial = torch.zeros(len(received), hidden)
        for tile, (_, positions) in zip(outputs, tiles, strict=True):
            stage.reduce(partial, grouped, positions, tile[: positions.stop - positions.start])
        stage.write_partial_sums(received, partial)
