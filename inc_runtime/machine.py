"""What this machine is: plain facts, gathered without changing anything. `doctor.py` judges them.

Every command that is run has a time limit, and a fact that cannot be had becomes an entry of `troubles`, not an exception.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from inc_runtime.environment import Environment

T = TypeVar("T")
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "vllm"),
    *("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "nvshmem4py-cu12", "nvshmem4py-cu13"),
    *("cuda-core", "cupy-cuda12x", "cupy-cuda13x"),
)
GPU_QUERY = "index,uuid,name,compute_cap,memory.total,compute_mode,mig.mode.current"
TORCH_PROBE = (
    "import json, torch, torch.distributed as d;"
    "print(json.dumps([torch.__version__, torch.version.cuda or '', d.is_available() and d.is_gloo_available()]))"
)


def readable(num_bytes: float) -> str:
    """`num_bytes` for people."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.3g} {unit}"


@dataclass(frozen=True)
class Output:
    """How a command ended. `status` is -1 where it could not be started or did not end in time."""

    status: int
    text: str


Run = Callable[..., Output]


def run_command(arguments: Sequence[str], *, stdin: str = "", limit_s: float = 10.0) -> Output:
    """Run a command for at most `limit_s`. Never raises, and never waits for a process that cannot be killed."""
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Output(-1, f"{arguments[0]}: {error.strerror}")
    try:
        text, _ = process.communicate(stdin, timeout=limit_s)
        return Output(process.returncode, text)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return Output(-1, f"{arguments[0]} did not answer within {limit_s:g} s")
    except OSError as error:
        return Output(-1, f"{arguments[0]}: {error.strerror}")


@dataclass(frozen=True)
class Gpu:
    """One GPU that the job may use. `index` is nvidia-smi's."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    compute_mode: str = "Default"
    mig: bool = False


@dataclass(frozen=True)
class SharedMemory:
    """The folder of the heaps. `problem` says why `wanted_bytes` could not be allocated there for a moment; "" if they could."""

    folder: str = "/dev/shm"
    free_bytes: int = 0
    wanted_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Torch:
    """The torch that a job would import. `cuda` is "" for a CPU build; `problem` says why it cannot be imported."""

    version: str = ""
    cuda: str = ""
    gloo: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Mps:
    """CUDA MPS. `control` is the path of nvidia-cuda-mps-control, "" if there is none."""

    control: str = ""
    running: bool = False
    pipe_folder: str = "/tmp/nvidia-mps"


@dataclass(frozen=True)
class Nvcc:
    """The CUDA compiler; `path` is "" if there is none."""

    path: str = ""
    version: str = ""
    targets_sm_90a: bool = False


@dataclass(frozen=True)
class Machine:
    """All facts. `nvlinks` holds pairs of GPU indices, lower first; `packages` maps distributions to versions."""

    python: str = ""
    system: str = ""
    processor: str = ""
    num_cores: float = 0.0
    memory_bytes: int = 0
    shared_memory: SharedMemory = field(default_factory=SharedMemory)
    packages: dict[str, str] = field(default_factory=dict)
    torch: Torch = field(default_factory=Torch)
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    nvlinks: frozenset[tuple[int, int]] = frozenset()
    mps: Mps = field(default_factory=Mps)
    nvcc: Nvcc = field(default_factory=Nvcc)
    gpu_backend: bool = False
    troubles: tuple[str, ...] = ()

    @property
    def nvshmem(self) -> str:
        """Version of the NVSHMEM wheel, or ""."""
        return self.packages.get("nvidia-nvshmem-cu13", "") or self.packages.get("nvidia-nvshmem-cu12", "")

    @property
    def nvshmem4py(self) -> str:
        """Version of NVSHMEM's Python bindings, or ""."""
        return self.packages.get("nvshmem4py-cu13", "") or self.packages.get("nvshmem4py-cu12", "")

    @property
    def kernel_loader(self) -> str:
        """The package that loads and launches compiled kernels, with its version, or ""."""
        found = (name for name in ("cuda-core", "cupy-cuda13x", "cupy-cuda12x") if name in self.packages)
        return next((f"{name} {self.packages[name]}" for name in found), "")

    @property
    def unlinked_pairs(self) -> list[tuple[int, int]]:
        """Pairs of GPUs without NVLink between them."""
        indices = sorted(gpu.index for gpu in self.gpus)
        return [(a, b) for a in indices for b in indices if a < b and (a, b) not in self.nvlinks]


def look(wanted_bytes: int = 0, run: Run = run_command) -> Machine:
    """Gather the facts. `wanted_bytes`: shared memory to allocate for a moment, to see whether it is really there."""
    troubles: list[str] = []

    def attempt(what: str, probe: Callable[[], T], default: T) -> T:
        try:
            return probe()
        except Exception as error:
            troubles.append(f"{what}: {type(error).__name__}: {error}")
            return default

    nothing: dict[str, str] = {}
    no_gpus: tuple[tuple[Gpu, ...], str] = ((), "they could not be listed")
    packages = attempt("packages", find_packages, nothing)
    gpus, gpu_problem = attempt("GPUs", lambda: find_gpus(run), no_gpus)
    return Machine(
        python=platform.python_version(),
        system=platform.system(),
        processor=platform.machine(),
        num_cores=attempt("cores", count_cores, float(os.cpu_count() or 1)),
        memory_bytes=attempt("memory", usable_memory, 0),
        shared_memory=attempt("shared memory", lambda: try_shared_memory(wanted_bytes), SharedMemory()),
        packages=packages,
        torch=attempt("torch", lambda: find_torch(packages, run), Torch()),
        gpus=gpus,
        gpu_problem=gpu_problem,
        nvlinks=attempt("NVLink", lambda: find_nvlinks(run) if len(gpus) > 1 else frozenset(), frozenset()),
        mps=attempt("MPS", lambda: find_mps(run), Mps()),
        nvcc=attempt("nvcc", lambda: find_nvcc(run), Nvcc()),
        gpu_backend=attempt("backends", lambda: importlib.util.find_spec("inc_runtime.backends.nvshmem") is not None, False),
        troubles=tuple(troubles),
    )


def find_packages() -> dict[str, str]:
    """Versions of the installed distributions that matter here."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def count_cores() -> float:
    """Cores that this process may use: its affinity, or its control group's quota where that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _control_group("cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def usable_memory() -> int:
    """Bytes of memory that are available now, or the rest of the control group's limit where that is less."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    limit = _control_group("memory.max").strip()
    if limit.isdigit():
        available = min(available, int(limit) - int(_control_group("memory.current") or 0))
    return available


def _control_group(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text()
    except OSError:
        return ""


def try_shared_memory(wanted_bytes: int) -> SharedMemory:
    """Free bytes of the shared-memory folder, and whether `wanted_bytes` can really be had; they are given back at once."""
    folder = Environment.read().shared_memory_folder
    problem, free = "", 0
    try:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        with tempfile.NamedTemporaryFile(dir=folder, prefix="inc-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, max(wanted_bytes, 4096))
    except OSError as error:
        problem = error.strerror or str(error)
    return SharedMemory(folder, free, wanted_bytes, problem)


def find_torch(packages: dict[str, str], run: Run) -> Torch:
    """Version and build of torch, from a process of its own: importing it takes seconds and can fail."""
    if "torch" not in packages:
        return Torch(problem="not installed")
    output = run([sys.executable, "-c", TORCH_PROBE], limit_s=90.0)
    lines = output.text.strip().splitlines() or [""]
    if output.status != 0:
        return Torch(packages["torch"], problem=lines[-1])
    version, cuda, gloo = json.loads(lines[-1])
    return Torch(version, cuda, gloo)


def find_gpus(run: Run) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, and why there are none, if there are none."""
    output = run(["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"])
    if output.status != 0:
        return (), (output.text.strip().splitlines() or ["nvidia-smi failed"])[-1]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if visible is None else [name.strip() for name in visible.split(",")]
    gpus = []
    for line in output.text.strip().splitlines():
        index, uuid, name, capability, mebibytes, mode, mig = (part.strip() for part in line.split(","))
        if chosen is not None and index not in chosen and not any(c and uuid.startswith(c) for c in chosen):
            continue
        major, minor = (int(part) for part in capability.split("."))
        gpus.append(Gpu(int(index), name, (major, minor), int(mebibytes) << 20, mode, mig == "Enabled"))
    hidden = f"CUDA_VISIBLE_DEVICES = {visible!r} hides them all" if chosen is not None else "nvidia-smi lists none"
    return tuple(gpus), "" if gpus else hidden


def find_nvlinks(run: Run) -> frozenset[tuple[int, int]]:
    """Pairs of GPUs that NVLink joins, from the matrix of `nvidia-smi topo -m`."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", run(["nvidia-smi", "topo", "-m"]).text)
    columns: list[int] = []
    pairs = set()
    for line in text.splitlines():
        words = line.split()
        if not columns:
            columns = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        elif words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            pairs |= {(row, column) for column, cell in zip(columns, words[1:], strict=False) if cell.startswith("NV")}
    return frozenset((a, b) for a, b in pairs if a < b)


def find_mps(run: Run) -> Mps:
    """The MPS control program, and whether a daemon answers in the pipe folder of this environment."""
    control = shutil.which("nvidia-cuda-mps-control") or ""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", Mps.pipe_folder)
    running = bool(control) and run([control], stdin="get_server_list\n", limit_s=5.0).status == 0
    return Mps(control, running, folder)


def find_nvcc(run: Run) -> Nvcc:
    """nvcc from PATH, CUDA_HOME or the usual folder; whether it can compile for Hopper's own instructions."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = shutil.which("nvcc") or next((p for h in homes if h and (p := shutil.which("nvcc", path=f"{h}/bin"))), "")
    if not path:
        return Nvcc()
    match = re.search(r"release [\d.]+, V([\d.]+)", run([path, "--version"]).text)
    dry_run = run([path, "--dryrun", "-arch=sm_90a", "-x", "cu", "-c", os.devnull, "-o", os.devnull])
    return Nvcc(path, match[1] if match else "unknown version", dry_run.status == 0)
