"""All-to-All phased, rank side: the plain all-to-all over phases of G ranks. Switch side: the relay with `phases.py`.

Our own design, so that MegaKernel Phased differs from MegaKernel INC Phased only in the role of the switch. Dispatch: at most
G ranks send at once, granted in order of request. Combine: a rank asks the relay for its phase; the relay opens the phases
of at most G token ranks at once, in order of request, and every rank sends its partial sums when the phase opens.
"""

from __future__ import annotations

from inc_runtime.collectives import all_to_all
from inc_runtime.collectives.all_to_all import wait_for_token_sums
from inc_runtime.collectives.microbatch import Call, ReceivedRows, RoutedTokens
from inc_runtime.collectives.phases import join_barrier, request_grant
from inc_runtime.one_sided import Awaited, Flag, OneSided
from inc_runtime.protocol import Tag, signal_word, slot_of

__all__ = ["publish_partial_sums", "push_microbatch", "wait_for_expert_rows", "wait_for_token_sums"]


def push_microbatch(pe: OneSided, call: Call, magic: int, routed: RoutedTokens) -> None:
    """Send each rank its tokens once the relay has granted this rank a place."""
    all_to_all.push_microbatch(pe, call, magic, routed, before_plane=lambda plane: request_grant(pe, magic, plane))


def wait_for_expert_rows(pe: OneSided, call: Call, magic: int) -> ReceivedRows:
    """Wait for the messages of all ranks, then join the barrier if the call has one."""
    received = all_to_all.wait_for_expert_rows(pe, call, magic)
    if call.pipeline.barrier_after_dispatch:
        join_barrier(pe, magic)
    return received


def publish_partial_sums(pe: OneSided, call: Call, magic: int) -> None:
    """Ask for this rank's phase, and return partial sums to each token rank as its phase opens."""
    dims = pe.layout.dims
    slot = slot_of(magic, dims.depth)
    planes = range(dims.combine_planes)
    for plane in planes:
        relay = dims.world.combine_switch(plane)
        pe.signal(relay, Flag("combine_requests", (slot, pe.pe)), signal_word(magic, True), magic=magic)
    pending = [(plane, owner) for plane in planes for owner in range(dims.num_ranks)]
    while pending:
        phases = [
            Awaited(Flag("phase_opened", (slot, plane, owner)), magic, f"combine switch {plane} for rank {owner}")
            for plane, owner in pending
        ]
        opened = [pending[i] for i in pe.wait_until_some(phases, Tag.RELAY_PHASE)]
        for plane, owner in opened:
            all_to_all.return_partial_sums(pe, call, magic, owner, plane)
        pending = [phase for phase in pending if phase not in opened]
