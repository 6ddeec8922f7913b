"""What a switch PE runs: its program for the communication model, microbatch after microbatch, until all ranks stop."""

from __future__ import annotations

from inc_runtime.one_sided import OneSided
from inc_runtime.protocol import Role
from switch_emulator import combine_switch, combine_switch_phased, dispatch_switch, dispatch_switch_phased
from switch_emulator.dispatch_switch_cut_through import CutThroughDispatch
from switch_emulator.relay_switch import RelaySwitch
from switch_emulator.serving import Stopped


def run_switch(pe: OneSided) -> None:
    """Serve any number of layers and microbatches on this heap. Returns once every rank has stopped.

    Raises: ArrivalTimeout, PeerDied, Aborted, Mismatch.
    """
    try:
        _serve(pe)
    except Stopped:
        return


def _serve(pe: OneSided) -> None:
    model = pe.layout.dims.model
    first_magic = int(pe.memory["magic"][0]) + 1
    if not model.in_network:
        RelaySwitch(pe, first_magic).serve()
    if model.phased and pe.role is Role.DISPATCH_SWITCH:
        dispatch_switch_phased.serve(pe, first_magic)
    if pe.layout.dims.row_groups and pe.role is Role.DISPATCH_SWITCH:
        CutThroughDispatch(pe, first_magic).serve()
    combine = combine_switch_phased if model.phased else combine_switch
    while True:
        magic = int(pe.memory["magic"][0]) + 1
        if pe.role is Role.DISPATCH_SWITCH:
            dispatch_switch.serve_microbatch(pe, magic)
        else:
            combine.serve_microbatch(pe, magic)
        pe.memory["magic"][0] = magic
