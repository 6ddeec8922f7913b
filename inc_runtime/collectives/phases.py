"""Credits of the phased collectives, rank side. The post withholds its implementation: this protocol is our own design.

A rank asks before it pushes, and pushes only once the switch has granted it one of G places; grants follow the requests in
order of arrival. The switch side is `switch_emulator/phases.py`.
"""

from __future__ import annotations

from inc_runtime.one_sided import Awaited, Flag, OneSided
from inc_runtime.protocol import Tag, signal_word


def request_grant(pe: OneSided, magic: int, plane: int) -> int:
    """Ask dispatch switch `plane` for a place, and wait for it. Returns the number of the place, 0 to G - 1."""
    dims = pe.layout.dims
    switch = dims.world.dispatch_switch(plane)
    pe.signal(switch, Flag("dispatch_requests", (pe.pe,)), signal_word(magic, True), magic=magic)
    name = dims.world.name_of(switch)
    places = [Awaited(Flag("dispatch_grants", (plane, g)), magic, name) for g in range(dims.ranks_per_phase)]
    return pe.wait_until_some(places, Tag.DISPATCH_GRANT)[0]


def join_barrier(pe: OneSided, magic: int) -> None:
    """The INC barrier: return once every rank holds all its rows of the microbatch, so that each expert runs one product.

    One word per rank needs no ring: a rank joins again only after its last barrier was released.
    """
    world = pe.layout.dims.world
    switch = world.dispatch_switch(0)
    pe.signal(switch, Flag("barrier_joined", (pe.pe,)), signal_word(magic, True), magic=magic)
    pe.wait_until(Awaited(Flag("barrier_released", (0,)), magic, world.name_of(switch)), Tag.DISPATCH_BARRIER)
