"""INC All-to-All-Combine (Phased), switch side: one phase per G requests, so that only G microbatches are held.

Waits on: `combine_requests`, in order of arrival: each brings the routing of the rank's tokens and says that the rank's own
partial sums are ready. Signals: `token_sums_arrived` on the owners of the phase. Reads: `expert_rows` of the ranks that
hold experts of the phase's tokens, by get. Writes: `token_sums`. Our own design; rank side:
`collectives/inc_all_to_all_phased.py`.
"""

from __future__ import annotations

from inc_runtime.one_sided import Awaited, Flag, OneSided
from inc_runtime.protocol import Tag, slot_of
from switch_emulator.combine_plan import CombinePlan
from switch_emulator.combine_switch import pull_and_add, ready_ranks, return_sums
from switch_emulator.serving import in_order_of_arrival


def serve_microbatch(pe: OneSided, magic: int) -> None:
    """Serve the phases of one microbatch. Raises Stopped instead when all ranks have stopped."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    requests = [Awaited(Flag("combine_requests", (slot, r)), magic, f"rank {r}") for r in range(dims.num_ranks)]
    plan = CombinePlan(pe, magic)
    phase: list[int] = []
    served = 0
    for owner in in_order_of_arrival(pe, requests, Tag.COMBINE_REQUEST, magic):
        phase.append(owner)
        if len(phase) == min(dims.ranks_per_phase, dims.num_ranks - served):
            serve_phase(pe, plan, phase, requests)
            served += len(phase)
            phase = []


def serve_phase(pe: OneSided, plan: CombinePlan, owners: list[int], requests: list[Awaited]) -> None:
    """Pull from every rank that holds experts of the owners' tokens, add, and return the sums."""
    ranks = plan.holders(owners)
    pe.memory["accumulators"][...] = 0
    for position in ready_ranks(pe, [requests[rank] for rank in ranks]):
        pull_and_add(pe, plan, ranks[position], owners)
    return_sums(pe, plan, owners)
