"""Which placements a machine can run, and where each PE would go: native, scale_model, shared, one_gpu, host."""

from __future__ import annotations

from dataclasses import dataclass

from inc_runtime.machine import Machine, readable
from inc_runtime.protocol import World

SM_90A = (9, 0)
X86_64 = ("x86_64", "AMD64")


@dataclass(frozen=True)
class PlacementPlan:
    """Whether a placement can run here. `places` says which PEs go where, `reasons` why not, `notes` what to know."""

    placement: str
    reasons: tuple[str, ...]
    places: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        """True where nothing stands in the way."""
        return not self.reasons


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


def plan_placements(machine: Machine, world: World) -> list[PlacementPlan]:
    """Every placement, in order of preference, with where the PEs would go or why it cannot run."""
    return [
        _native(machine, world),
        _scale_model(machine, world),
        _shared(machine, world),
        _one_gpu(machine, world),
        _host(machine, world),
    ]


def _gpu_plan(machine: Machine, placement: str, needed: int, for_whom: str, places: list[str], *notes: str) -> PlacementPlan:
    found = f"there {'is' if len(machine.gpus) == 1 else 'are'} {len(machine.gpus) or 'none'}"
    reasons = [] if len(machine.gpus) >= needed else [f"It needs {needed} GPU{'s' * (needed > 1)}, {for_whom}; {found}."]
    if machine.gpus:
        reasons += gpu_reasons(machine)
        if placement != "native" and not machine.mps.control:
            reasons.append("PEs that share a GPU need MPS, and nvidia-cuda-mps-control is missing.")
        reasons += _software_reasons(machine)
    if placement != "one_gpu" and machine.unlinked_pairs:
        notes = (*notes, "Some GPUs are not linked by NVLink.")
    return PlacementPlan(placement, tuple(reasons), tuple(places), notes)


def _gpu_name(machine: Machine, number: int) -> str:
    """The number-th usable GPU, by nvidia-smi's index where there is one."""
    return f"GPU {machine.gpus[number].index if number < len(machine.gpus) else number}"


def _switches(world: World) -> list[str]:
    return [world.name_of(pe) for pe in range(world.num_ranks, world.num_pes)]


def _native(machine: Machine, world: World) -> PlacementPlan:
    places = [f"{_gpu_name(machine, pe)}: {world.name_of(pe)}" for pe in range(world.num_pes)]
    return _gpu_plan(machine, "native", world.num_pes, "one for each PE", places)


def _scale_model(machine: Machine, world: World) -> PlacementPlan:
    places = [
        f"{_gpu_name(machine, 0)}: {world.num_ranks} ranks, 1/{world.num_ranks} of the SMs each",
        f"{_gpu_name(machine, 1)}: {', '.join(_switches(world))}",
    ]
    note = f"A rank has 1/{world.num_ranks} of a GPU; latencies do not shrink with it."
    return _gpu_plan(machine, "scale_model", 2, "one for the ranks and one for the switches", places, note)


def _shared(machine: Machine, world: World) -> PlacementPlan:
    residents = [[world.name_of(rank)] for rank in range(world.num_ranks)]
    for number, name in enumerate(_switches(world)):
        residents[number % world.num_ranks].append(name)
    places = [f"{_gpu_name(machine, number)}: {', '.join(names)}" for number, names in enumerate(residents)]
    return _gpu_plan(machine, "shared", world.num_ranks, "one for each rank", places, "A switch takes a few SMs of a rank's GPU.")


def _one_gpu(machine: Machine, world: World) -> PlacementPlan:
    places = [f"{_gpu_name(machine, 0)}: all {world.num_pes} PEs"]
    return _gpu_plan(machine, "one_gpu", 1, "for all PEs", places, "Functional only: no link is crossed.")


def _host(machine: Machine, world: World) -> PlacementPlan:
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
