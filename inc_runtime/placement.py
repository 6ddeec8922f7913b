"""Which GPU each PE runs on, how many blocks its persistent kernel may have, and what a machine lacks for it.

Pure data: nothing here touches a GPU.

Persistent kernels take their share of a GPU by their grid, one block per SM; library kernels take it by an MPS percentage. A few
SMs of a shared GPU stay free, for copies and memsets that run as kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from inc_runtime.errors import ConfigurationError
from inc_runtime.machine import Machine, readable
from inc_runtime.protocol import Role, World

SWITCH_BLOCKS = 16
"""Blocks of one switch at most: as many fill a link in both directions (results/data/collectives_scale_model_*.csv)."""

SHARED_SWITCH_BLOCKS = 8
"""Blocks of a switch that shares its GPU with ranks."""

FREE_SMS = 4
SM_90A = (9, 0)
SMS_OF_SM_90A = 132
"""SMs of a GPU that the kernels are compiled for, where no one has asked the GPU."""

X86_64 = ("x86_64", "AMD64")


class PlacementKind(enum.Enum):
    """`native`: one GPU per PE. `dual_role`: one per rank and one per plane, whose dispatch and combine switch share it, so that
    its port is used in both directions. `scale_model`: the ranks share GPUs, the switches others. `shared`: one GPU per rank,
    the switches on a few SMs of the same GPUs. `one_gpu`: all on one, functional only. `host`: no GPU.
    """

    NATIVE = "native"
    DUAL_ROLE = "dual_role"
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


def num_gpus_needed(kind: PlacementKind, world: World) -> int:
    """GPUs that a placement takes at least."""
    return {
        PlacementKind.NATIVE: world.num_pes,
        PlacementKind.DUAL_ROLE: world.num_ranks + max(world.num_dispatch_switches, world.num_combine_switches),
        PlacementKind.SCALE_MODEL: 2,
        PlacementKind.SHARED: world.num_ranks,
        PlacementKind.ONE_GPU: 1,
        PlacementKind.HOST: 0,
    }[kind]


def place(kind: PlacementKind, world: World, num_sms: Sequence[int]) -> Placement:
    """Seat every PE. `num_sms`: SMs of each GPU found. Raises ConfigurationError where the GPUs do not suffice."""
    if kind is PlacementKind.HOST:
        return Placement(kind, world, tuple(Seat(pe, None) for pe in range(world.num_pes)))
    needed = num_gpus_needed(kind, world)
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
    if kind is PlacementKind.DUAL_ROLE:
        planes = [world.num_ranks + world.plane_of(switch) for switch in range(world.num_ranks, world.num_pes)]
        return [*range(world.num_ranks), *planes]
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


@dataclass(frozen=True)
class PlacementPlan:
    """Whether a placement can run on a machine. `places` says which PEs go where, `reasons` why not, `notes` what to know."""

    placement: str
    reasons: tuple[str, ...]
    places: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        """True where nothing stands in the way."""
        return not self.reasons


def plan_placements(machine: Machine, world: World) -> list[PlacementPlan]:
    """Every placement, in order of preference, with where the PEs would go or why not; dual roles only where there are planes."""
    dual = world.num_dispatch_switches > 1
    kinds = [kind for kind in PlacementKind if kind is not PlacementKind.HOST and (dual or kind is not PlacementKind.DUAL_ROLE)]
    on_gpus = [_gpu_plan(machine, world, kind) for kind in kinds]
    return [*on_gpus, _host_plan(machine, world)]


def gpu_reasons(machine: Machine) -> list[str]:
    """Why the GPUs that are there cannot run the kernels; empty if they can."""
    reasons = []
    for gpu in machine.gpus:
        if gpu.compute_capability != SM_90A:
            capability = ".".join(map(str, gpu.compute_capability))
            reasons.append(f"The kernels are compiled for sm_90a; GPU {gpu.index} has compute capability {capability}.")
        if gpu.mig:
            reasons.append(f"GPU {gpu.index} is split by MIG; its instances cannot reach each other's memory.")
        if gpu.compute_mode == "Prohibited":
            reasons.append(f"GPU {gpu.index} is in compute mode Prohibited.")
    return reasons


def _software_reasons(machine: Machine) -> list[str]:
    wanted = {
        "a CUDA build of torch": machine.torch.cuda,
        "the NVSHMEM wheel": machine.nvshmem,
        "nvshmem4py": machine.nvshmem4py,
        "cuda-core or CuPy": machine.kernel_loader,
        "nvcc for sm_90a": machine.nvcc.targets_sm_90a,
    }
    missing = ", ".join(name for name, there in wanted.items() if not there)
    reasons = [] if machine.gpu_backend else ["This version of the project has no GPU backend."]
    return [*reasons, f"Missing: {missing}."] if missing else reasons


def _gpu_plan(machine: Machine, world: World, kind: PlacementKind) -> PlacementPlan:
    needed, found = num_gpus_needed(kind, world), len(machine.gpus)
    for_whom = {
        PlacementKind.NATIVE: "one for each PE",
        PlacementKind.DUAL_ROLE: "one for each rank and each plane",
        PlacementKind.SCALE_MODEL: "one for the ranks and one for the switches",
        PlacementKind.SHARED: "one for each rank",
        PlacementKind.ONE_GPU: "for all PEs",
    }[kind]
    notes = {
        PlacementKind.SCALE_MODEL: ("A rank has its share of a GPU; latencies do not shrink with it.",),
        PlacementKind.SHARED: ("A switch takes a few SMs of a rank's GPU.",),
        PlacementKind.ONE_GPU: ("Functional only: no link is crossed.",),
    }.get(kind, ())
    there = f"there {'is' if found == 1 else 'are'} {found or 'none'}"
    reasons = [] if found >= needed else [f"It needs {needed} GPU{'s' * (needed > 1)}, {for_whom}; {there}."]
    try:
        placement = place(kind, world, [SMS_OF_SM_90A] * max(found, needed))
    except ConfigurationError as error:
        return PlacementPlan(kind.value, (*reasons, str(error)), (), notes)
    if machine.gpus:
        reasons += gpu_reasons(machine)
        if placement.needs_mps and not machine.mps.control:
            reasons.append("PEs that share a GPU need MPS, and nvidia-cuda-mps-control is missing.")
        reasons += _software_reasons(machine)
    if len(placement.gpus) > 1 and machine.unlinked_pairs:
        notes = (*notes, "Some GPUs are not linked by NVLink.")
    places = []
    for gpu in placement.gpus:
        index = machine.gpus[gpu].index if gpu < found else gpu
        places.append(f"GPU {index}: {', '.join(world.name_of(seat.pe) for seat in placement.on_gpu(gpu))}")
    return PlacementPlan(kind.value, tuple(reasons), tuple(places), notes)


def _host_plan(machine: Machine, world: World) -> PlacementPlan:
    reasons = []
    if machine.processor not in X86_64 or machine.system != "Linux":
        reasons.append(f"It needs Linux on x86-64; this is {machine.system} on {machine.processor}.")
    if machine.shared_memory.problem:
        wanted = readable(machine.shared_memory.wanted_bytes)
        reasons.append(f"{wanted} of shared memory cannot be had in {machine.shared_memory.folder}.")
    if machine.torch.problem or not machine.torch.gloo:
        reasons.append("torch with gloo is missing.")
    places = (f"{world.num_pes} processes over {machine.shared_memory.folder}",)
    return PlacementPlan("host", tuple(reasons), places, ("Functional only: times are those of a processor.",))
