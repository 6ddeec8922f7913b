"""`inc doctor`: what this machine can run, and what to do about what is missing."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from inc_runtime.config import OLMOE_1B_7B, CommunicationModel, Pipeline
from inc_runtime.environment import Environment
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.machine import Machine, Run, look, readable, run_command
from inc_runtime.placement import X86_64, PlacementPlan, gpu_reasons, plan_placements
from inc_runtime.protocol import World

DEMO_PIPELINE = Pipeline(bound_tokens=64, microbatch_tokens=16)
"""What `inc demo` runs by default, at the shape of OLMoE-1B-7B."""

PROCESS_BYTES = 400 << 20
"""Memory of one process of the demo besides its weights: Python with torch and transformers. An estimate."""


class Status(enum.Enum):
    """Whether a thing is there."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was `seen`, what that means for a job, and the remedy ("" where none is needed)."""

    name: str
    status: Status
    seen: str
    meaning: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All that the doctor says."""

    world: World
    findings: list[Finding]
    placements: list[PlacementPlan]
    num_gpus: int

    @property
    def best(self) -> PlacementPlan | None:
        """The first placement that can run; they are ordered from the truest measurement to none."""
        return next((plan for plan in self.placements if plan.possible), None)

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "world": dataclasses.asdict(self.world),
            "findings": [{**dataclasses.asdict(f), "status": f.status.value} for f in self.findings],
            "placements": [{**dataclasses.asdict(p), "possible": p.possible} for p in self.placements],
            "best": self.best.placement if self.best else None,
        }


def demo_heap_bytes(world: World) -> int:
    """Shared memory of all PEs of the demo: the largest heap of any communication model; only one is there at a time."""
    layouts = (HeapLayout(Dims.of(model, world, OLMOE_1B_7B, DEMO_PIPELINE)) for model in CommunicationModel)
    return world.num_pes * max(layout.heap_bytes for layout in layouts)


def demo_memory_bytes(world: World) -> int:
    """Memory of the demo, estimated: the layer's weights in bfloat16 and in float32, and the processes."""
    num_weights = 3 * OLMOE_1B_7B.num_experts * OLMOE_1B_7B.hidden_size * OLMOE_1B_7B.intermediate_size
    return num_weights * (2 + 4) + world.num_pes * PROCESS_BYTES


def examine(world: World | None = None, run: Run = run_command) -> list[Finding]:
    """Look at the machine and judge it for a job of this `world`. Never raises and never hangs."""
    return diagnose(world or World(4), run).findings


def diagnose(world: World, run: Run = run_command) -> Report:
    """Findings and placements for a job of this `world`."""
    machine = look(demo_heap_bytes(world), run)
    return Report(world, judge(machine, world), plan_placements(machine, world), len(machine.gpus))


def judge(machine: Machine, world: World) -> list[Finding]:
    """What the facts mean."""
    troubles = [
        Finding("look", Status.LIMITED, trouble, "This could not be examined.", "Report it, with the output of --json.")
        for trouble in machine.troubles
    ]
    return [
        _python(machine),
        _processor(machine),
        _cores(machine, world),
        _memory(machine, world),
        _shared_memory(machine),
        _environment(),
        _torch(machine),
        _gloo(machine),
        _model_packages(machine),
        _gpus(machine),
        _nvlink(machine),
        _mps(machine),
        _nvshmem(machine),
        _kernel_loader(machine),
        _nvcc(machine),
        _vllm(machine),
        *troubles,
    ]


def _python(machine: Machine) -> Finding:
    if tuple(int(part) for part in machine.python.split(".")[:2]) >= (3, 10):
        return Finding("python", Status.OK, machine.python, "New enough.")
    return Finding("python", Status.MISSING, machine.python, "The project needs 3.10 or later.", "Install a newer Python.")


def _processor(machine: Machine) -> Finding:
    if machine.processor in X86_64 and machine.system == "Linux":
        return Finding("processor", Status.OK, f"{machine.processor}, {machine.system}", "Runs the host backend.")
    return Finding(
        "processor",
        Status.LIMITED,
        f"{machine.processor}, {machine.system}",
        "The host backend needs Linux on x86-64, whose stores stay in order; the simulated backend runs anywhere.",
        "Use --backend simulated here, or an x86-64 machine with Linux.",
    )


def _cores(machine: Machine, world: World) -> Finding:
    seen = f"{machine.num_cores:g}"
    if machine.num_cores >= world.num_pes:
        return Finding("cores", Status.OK, seen, f"One for each of the {world.num_pes} processes of a job.")
    meaning = f"The {world.num_pes} processes of a job share them: results are right, times say little."
    return Finding("cores", Status.LIMITED, seen, meaning)


def _memory(machine: Machine, world: World) -> Finding:
    wanted = demo_memory_bytes(world)
    meaning = f"inc demo takes about {readable(wanted)} at OLMoE's real shape."
    if machine.memory_bytes >= wanted:
        return Finding("memory", Status.OK, f"{readable(machine.memory_bytes)} available", meaning)
    return Finding("memory", Status.LIMITED, f"{readable(machine.memory_bytes)} available", meaning, "Use inc demo --small.")


def _shared_memory(machine: Machine) -> Finding:
    shared = machine.shared_memory
    seen = f"{readable(shared.free_bytes)} free in {shared.folder}"
    if not shared.problem:
        meaning = f"The demo's heaps take {readable(shared.wanted_bytes)}, which could be allocated."
        return Finding("shared memory", Status.OK, seen, meaning)
    return Finding(
        "shared memory",
        Status.MISSING,
        seen,
        f"The demo's heaps take {readable(shared.wanted_bytes)}, which could not be allocated: {shared.problem}.",
        "Set INC_SHARED_MEMORY_FOLDER to a folder with room, or enlarge this one (mount -o remount,size=1g /dev/shm; docker run "
        "--shm-size=1g), or lower --microbatch or --depth.",
    )


def _environment() -> Finding:
    try:
        limit = Environment.read().wait_limit_s
    except ConfigurationError as error:
        return Finding("environment", Status.MISSING, str(error), "No command starts.", "Correct that variable.")
    return Finding("environment", Status.OK, f"INC_WAIT_LIMIT_S = {limit:g}", "How long a wait may last before it reports.")


def _torch(machine: Machine) -> Finding:
    torch = machine.torch
    if torch.problem:
        seen = f"{torch.version} {torch.problem}".strip()
        return Finding("torch", Status.MISSING, seen, "The layer and torchrun need it.", "Run make install.")
    build = f"{torch.version}, CUDA {torch.cuda}" if torch.cuda else f"{torch.version}, CPU build"
    if machine.gpus and not torch.cuda:
        remedy = f"pip install 'torch=={torch.version.split('+')[0]}' takes the CUDA build from PyPI."
        return Finding("torch", Status.LIMITED, build, "Runs the host placement; GPU placements need a CUDA build.", remedy)
    return Finding("torch", Status.OK, build, "Runs every placement." if torch.cuda else "Runs the host placement.")


def _gloo(machine: Machine) -> Finding:
    if machine.torch.gloo:
        return Finding("gloo", Status.OK, "in torch", "Collectives of Baseline, and start-up of every job.")
    remedy = "Install a build of torch with gloo: run make install in a fresh clone."
    return Finding("gloo", Status.MISSING, "not in torch", "Baseline and the start of a job need it.", remedy)


def _model_packages(machine: Machine) -> Finding:
    names = ("transformers", "tokenizers", "safetensors")
    seen = ", ".join(f"{name} {machine.packages.get(name, 'missing')}" for name in names)
    if all(name in machine.packages for name in names):
        return Finding("model packages", Status.OK, seen, "Checkpoints can be read and compared with transformers.")
    return Finding("model packages", Status.MISSING, seen, "inc demo reads checkpoints with them.", "Run make install.")


def _gpus(machine: Machine) -> Finding:
    if not machine.gpus:
        remedy = "Use a machine with NVIDIA GPUs and their driver; the host placement needs none."
        return Finding("GPUs", Status.MISSING, machine.gpu_problem, "No GPU placement can run.", remedy)
    seen = "; ".join(
        f"{gpu.index}: {gpu.name}, compute capability {'.'.join(map(str, gpu.compute_capability))}, {readable(gpu.memory_bytes)}"
        for gpu in machine.gpus
    )
    if reasons := gpu_reasons(machine):
        return Finding("GPUs", Status.LIMITED, seen, " ".join(reasons), "Use Hopper GPUs without MIG (H100, H200).")
    return Finding("GPUs", Status.OK, seen, "The kernels run on them.")


def _nvlink(machine: Machine) -> Finding:
    if len(machine.gpus) < 2:
        return Finding("NVLink", Status.MISSING, f"{len(machine.gpus)} GPUs", "Nothing to link: links cannot be measured here.")
    if not machine.unlinked_pairs:
        return Finding("NVLink", Status.OK, f"{len(machine.nvlinks)} pairs of GPUs, all linked", "Rows travel over it.")
    pairs = ", ".join(f"{a} and {b}" for a, b in machine.unlinked_pairs[:4])
    more = " and more" if len(machine.unlinked_pairs) > 4 else ""
    return Finding(
        "NVLink",
        Status.LIMITED,
        f"none between GPUs {pairs}{more}",
        "PEs on those GPUs meet over PCIe, if they can reach each other at all.",
        "Choose GPUs that are linked, with CUDA_VISIBLE_DEVICES (nvidia-smi topo -m shows them).",
    )


def _mps(machine: Machine) -> Finding:
    mps = machine.mps
    if not mps.control:
        remedy = "Install the compute utilities of the driver's own version, which hold nvidia-cuda-mps-control."
        meaning = "PEs cannot share a GPU."
        return Finding("MPS", Status.MISSING, "no nvidia-cuda-mps-control", meaning, remedy if machine.gpus else "")
    seen = f"{mps.control}, a daemon {'answers' if mps.running else 'does not run'} in {mps.pipe_folder}"
    if mps.running:
        return Finding("MPS", Status.OK, seen, "PEs can share a GPU; jobs use this daemon.")
    return Finding("MPS", Status.OK, seen, "PEs can share a GPU: a job that needs a daemon starts one of its own and stops it.")


def _nvshmem(machine: Machine) -> Finding:
    seen = f"NVSHMEM {machine.nvshmem or 'missing'}, nvshmem4py {machine.nvshmem4py or 'missing'}"
    if machine.nvshmem and machine.nvshmem4py:
        return Finding("NVSHMEM", Status.OK, seen, "Symmetric heap and verbs of the GPU placements.")
    wheels = [] if machine.nvshmem else ["nvidia-nvshmem-cu13"]
    wheels += [] if machine.nvshmem4py else ["nvshmem4py-cu13"]
    remedy = f"pip install {' '.join(wheels)} (cu12 with CUDA 12)." if machine.gpus else ""
    return Finding("NVSHMEM", Status.MISSING, seen, "GPU placements need both.", remedy)


def _kernel_loader(machine: Machine) -> Finding:
    if machine.kernel_loader:
        return Finding("kernel loader", Status.OK, machine.kernel_loader, "Loads and launches the compiled kernels.")
    remedy = "pip install cuda-core" if machine.gpus else ""
    return Finding("kernel loader", Status.MISSING, "neither cuda-core nor CuPy", "GPU placements need one of them.", remedy)


def _nvcc(machine: Machine) -> Finding:
    nvcc = machine.nvcc
    if not nvcc.path:
        remedy = "Install the CUDA toolkit, 12 or later, or set CUDA_HOME to where it is."
        return Finding("nvcc", Status.MISSING, "not found", "The kernels cannot be compiled here.", remedy)
    if not nvcc.targets_sm_90a:
        remedy = "Install the CUDA toolkit, 12 or later."
        return Finding("nvcc", Status.LIMITED, nvcc.version, "It does not know sm_90a.", remedy)
    return Finding("nvcc", Status.OK, f"{nvcc.version}, {nvcc.path}", "Compiles the kernels for sm_90a.")


def _vllm(machine: Machine) -> Finding:
    if version := machine.packages.get("vllm"):
        return Finding("vLLM", Status.OK, version, "Only serving a model needs it.")
    remedy = "pip install vllm, in an environment whose torch fits it, if you want to serve a model."
    return Finding("vLLM", Status.MISSING, "not installed", "Only serving a model needs it.", remedy)


def format_report(report: Report, width: int) -> str:
    """Text of the report, in lines of at most `width` columns."""
    lines = ["This machine"]
    for finding in report.findings:
        lines += _entry(f"  {finding.status.value:<9}{finding.name:<16}", f"{finding.seen}. {finding.meaning}", width)
        if finding.remedy and finding.status is not Status.OK:
            lines += _entry(" " * 27 + "> ", finding.remedy, width)
    world = report.world
    switches = f"{world.num_dispatch_switches} for dispatch, {world.num_combine_switches} for combine"
    lines += ["", f"Placements of a job with {world.num_ranks} ranks and its switches ({switches})"]
    for plan in report.placements:
        text = f"{'; '.join(plan.places)}. {' '.join(plan.notes)}" if plan.possible else " ".join(plan.reasons)
        lines += _entry(f"  {'yes' if plan.possible else 'no':<9}{plan.placement:<16}", text, width)
    best = report.best
    lines += ["", f"Best here: {best.placement}." if best else "Nothing can run processes here; --backend simulated may."]
    return "\n".join(lines)


def _entry(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 60), initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `inc doctor`."""
    parser.add_argument("--ranks", type=int, default=4, help="W, compute ranks of the job that you have in mind (default 4)")
    parser.add_argument("--dispatch-switches", type=int, default=1, help="(default 1)")
    parser.add_argument("--combine-switches", type=int, default=1, help="(default 1)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the report as JSON, to FILE or to the screen")


def run(args: argparse.Namespace) -> int:
    """`inc doctor`. Returns 0 if some placement can run here, else 1."""
    counts = (args.ranks, args.dispatch_switches, args.combine_switches)
    if min(counts) < 1:
        raise ConfigurationError(f"ranks and switches = {counts}: each must be at least 1.")
    if sys.stderr.isatty():
        print("Looking at this machine ...", file=sys.stderr)
    report = diagnose(World(*counts))
    text = json.dumps(report.as_dict(), indent=1)
    if args.json == "-":
        print(text)
    elif args.json:
        try:
            Path(args.json).write_text(text + "\n")
        except OSError as error:
            raise ConfigurationError(f"--json {args.json}: {error.strerror}. Name a file that can be written.") from error
    if args.json != "-":
        print(format_report(report, min(shutil.get_terminal_size((110, 24)).columns, 130)))
    return 0 if report.best else 1
