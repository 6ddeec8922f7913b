"""Which GPU each PE runs on, and how many blocks its persistent kernel may have. Pure data: nothing here touches a GPU.

Persistent kernels take their share of a GPU by their grid, one block per SM; library kernels take it by an MPS percentage. A few
SMs of a shared GPU stay free, for copies and memsets that run as kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from inc_runtime.errors import ConfigurationError
from inc_runtime.protocol import Role, World

SWITCH_BLOCKS = 16
"""Blocks of one switch at most: as many fill a link in both directions (results/data/collectives_scale_model_*.csv)."""

SHARED_SWITCH_BLOCKS = 8
"""Blocks of a switch that shares its GPU with ranks."""

FREE_SMS = 4


class PlacementKind(enum.Enum):
    """`native`: one GPU per PE. `scale_model`: the ranks share GPUs, the switches others. `shared`: one GPU per rank, the
    switches on a few SMs of the same GPUs. `one_gpu`: all on one, functional only. `host`: no GPU.
    """

    NATIVE = "native"
    SCALE_MODEL = "scale_model"
    SHARED = "shared"
    ONE_GPU = "one_gpu"
    HOST = "host"


@dataclass(frozen=True)
class Seat:
    """Where one PE runs. `num_blocks` is the grid of its persistent kernel; `percentage` the MPS share of its library kernels."""

    pe: int
    gpu: int | None
    num_blocks: int = 0
    percentage: int = 100


@dataclass(frozen=True)
class Placement:
    """All seats of a job."""

    kind: PlacementKind
    world: World
    seats: tuple[Seat, ...]

    def on_gpu(self, gpu: int) -> list[Seat]:
        return [seat for seat in self.seats if seat.gpu == gpu]

    @property
    def gpus(self) -> list[int]:
        return sorted({seat.gpu for seat in self.seats if seat.gpu is not None})

    @property
    def needs_mps(self) -> bool:
        """True where PEs share a GPU: without MPS they are time-sliced and a wait on the device never ends."""
        return any(len(self.on_gpu(gpu)) > 1 for gpu in self.gpus)

    def describe(self) -> str:
        """The plan, one line per GPU."""
        lines = [f"placement {self.kind.value}" + (", PEs share a GPU through MPS" if self.needs_mps else "")]
        for gpu in self.gpus:
            seats = ", ".join(f"{self.world.name_of(seat.pe)} ({seat.num_blocks} blocks)" for seat in self.on_gpu(gpu))
            lines.append(f"  GPU {gpu}: {seats}")
        return "\n".join(lines)


def choose(world: World, num_gpus: int) -> PlacementKind:
    """The best placement for the GPUs found."""
    if num_gpus >= world.num_pes:
        return PlacementKind.NATIVE
    return (PlacementKind.HOST, PlacementKind.ONE_GPU)[num_gpus] if num_gpus < 2 else PlacementKind.SCALE_MODEL


def place(kind: PlacementKind, world: World, num_sms: Sequence[int]) -> Placement:
    """Seat every PE. `num_sms`: SMs of each GPU found. Raises ConfigurationError where the GPUs do not suffice."""
    if kind is PlacementKind.HOST:
        return Placement(kind, world, tuple(Seat(pe, None) for pe in range(world.num_pes)))
    needed = {
        PlacementKind.NATIVE: world.num_pes,
        PlacementKind.SCALE_MODEL: 2,
        PlacementKind.SHARED: world.num_ranks,
        PlacementKind.ONE_GPU: 1,
    }[kind]
    if len(num_sms) < needed:
        best = choose(world, len(num_sms))
        raise ConfigurationError(
            f"placement = {kind.value}: {world.num_pes} PEs need {needed} GPUs, found {len(num_sms)}. "
            f"Use --placement {best.value}."
        )
    gpu_of = _gpus_of_pes(kind, world, len(num_sms))
    seats = []
    for pe in range(world.num_pes):
        mates = [other for other in range(world.num_pes) if gpu_of[other] == gpu_of[pe]]
        blocks = _num_blocks(world, pe, mates, num_sms[gpu_of[pe]])
        if blocks < 1:
            raise ConfigurationError(
                f"placement = {kind.value}: {len(mates)} PEs on GPU {gpu_of[pe]} leave no SM for {world.name_of(pe)}. "
                "Start fewer ranks."
            )
        seats.append(Seat(pe, gpu_of[pe], blocks, 100 // len(mates)))
    return Placement(kind, world, tuple(seats))


def _gpus_of_pes(kind: PlacementKind, world: World, num_gpus: int) -> list[int]:
    """GPU of every PE. Neighbouring PEs share; the scale model gives the switches the upper half of the GPUs."""
    switches = world.num_pes - world.num_ranks
    if kind is PlacementKind.NATIVE:
        return list(range(world.num_pes))
    if kind is PlacementKind.ONE_GPU:
        return [0] * world.num_pes
    if kind is PlacementKind.SHARED:
        return list(range(world.num_ranks)) + [switch * world.num_ranks // switches for switch in range(switches)]
    half = num_gpus // 2
    return [rank * half // world.num_ranks for rank in range(world.num_ranks)] + [
        half + switch * (num_gpus - half) // switches for switch in range(switches)
    ]


def _num_blocks(world: World, pe: int, mates: list[int], num_sms: int) -> int:
    """Blocks of a PE: the switches take their few, the ranks share the rest."""
    ranks = [mate for mate in mates if world.role_of(mate) is Role.COMPUTE_RANK]
    switches = len(mates) - len(ranks)
    if len(mates) == 1:
        return num_sms if ranks else SWITCH_BLOCKS
    free = num_sms - FREE_SMS
    per_switch = min(SHARED_SWITCH_BLOCKS if ranks else SWITCH_BLOCKS, free // switches) if switches else 0
    return (free - per_switch * switches) // len(ranks) if pe in ranks else per_switch
