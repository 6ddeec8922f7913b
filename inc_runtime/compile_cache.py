"""Builds a kernel file into a cubin with nvcc and nvlink, and keeps it by a hash of all that went in.

The key covers every device source of the project, the generated headers, the options and, where NVSHMEM's device library is
linked, its version. Entries are written under another name and renamed, under a lock, so that several processes of one job build
once. A linked cubin contains NVSHMEM code, which is proprietary: it stays in the cache of the machine that built it.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inc_runtime.config import CommunicationModel
from inc_runtime.device.arguments import header_text
from inc_runtime.environment import Environment
from inc_runtime.errors import BuildError

ROOT = Path(__file__).resolve().parent.parent
DEVICE_FOLDERS = (
    ROOT / "inc_runtime" / "device",
    ROOT / "switch_emulator" / "device",
    ROOT / "megakernel" / "device",
    ROOT / "megakernel" / "stages",
    ROOT / "megakernel" / "baseline_stages",
    ROOT / "megakernel",
)
NVSHMEM_PACKAGE = "nvidia-nvshmem-cu13"
BUILD_LIMIT_S = 600


class Verbs(enum.Enum):
    """`direct`: loads and stores on mapped peers. `nvshmem`: NVSHMEM's device API."""

    DIRECT = "direct"
    NVSHMEM = "nvshmem"


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel."""

    kernel: str
    registers: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Built:
    """A cubin and the report of its kernels."""

    path: Path
    report: str

    @property
    def resources(self) -> list[Resources]:
        pattern = (
            r"Function properties for (\w+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
            r".*?Used (\d+) registers"
        )
        found = re.findall(pattern, self.report)
        return [Resources(name, int(used), int(stack), int(stores) + int(loads)) for name, stack, stores, loads, used in found]


def nvshmem_folder() -> Path:
    """The `nvidia/nvshmem` folder of the installed wheel. Raises BuildError."""
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or () if spec else ():
        if (Path(base) / "nvshmem" / "include" / "nvshmem.h").exists():
            return Path(base) / "nvshmem"
    raise BuildError(f"NVSHMEM's headers were not found. Install them with: pip install {NVSHMEM_PACKAGE}")


def _options(verbs: Verbs, arch: str, model: CommunicationModel | None, defines: Sequence[str]) -> list[str]:
    """Options of nvcc. Code that calls NVSHMEM is relocatable, so that it can be linked with its library; in such code ptxas
    ignores setmaxnreg and serialises matrix products, so everything else is compiled whole."""
    target = f"-gencode=arch=compute_{arch[3:]},code={arch}"
    options = [*(f"-D{define}" for define in defines), "-std=c++17", "-O3", target, "-lineinfo", "-Xptxas", "-v"]
    options += ["-DINC_RELAYED"] * (model is not None and not model.in_network)
    options += ["-DINC_PHASED"] * (model is not None and model.phased)
    return [*options, "-rdc=true", "-DINC_VERBS_NVSHMEM"] if verbs is Verbs.NVSHMEM else options


def _key(source: Path, options: list[str], verbs: Verbs, headers: Mapping[str, str]) -> str:
    digest = hashlib.sha256(repr((source.name, options, sorted(headers.items()))).encode())
    if verbs is Verbs.NVSHMEM:
        digest.update(importlib.metadata.version(NVSHMEM_PACKAGE).encode())
    for folder in DEVICE_FOLDERS:
        for path in sorted(folder.glob("*.cu*")) + sorted(folder.glob("*.h")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def build(
    source: Path,
    verbs: Verbs = Verbs.DIRECT,
    arch: str = "sm_90a",
    model: CommunicationModel | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    defines: Sequence[str] = (),
) -> Built:
    """The cubin of `source`, from the cache or built now. Raises BuildError with the compiler's words.

    `model`: for a kernel of the ranks, whose collective (`collective.cuh`) is that of one communication model.
    `headers`: generated files that the source includes, by name, besides `arguments.h`. `defines`: macros, NAME or NAME=VALUE.
    """
    folder = Path(Environment.read().cache_folder)
    folder.mkdir(parents=True, exist_ok=True)
    options, texts = _options(verbs, arch, model, defines), {"arguments.h": header_text(), **(headers or {})}
    entry = folder / f"{source.stem}-{verbs.value}-{arch}-{_key(source, options, verbs, texts)}"
    cubin, report = entry.with_suffix(".cubin"), entry.with_suffix(".txt")
    with open(entry.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cubin.exists():
            _compile(source, options, verbs, arch, texts, cubin, report)
    return Built(cubin, report.read_text(encoding="utf-8"))


def _compile(
    source: Path, options: list[str], verbs: Verbs, arch: str, headers: Mapping[str, str], cubin: Path, report: Path
) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise BuildError(
            f"nvcc is not on the PATH and {cubin.name} is not in the cache. Install the CUDA toolkit (13.0), or copy the cache."
        )
    with tempfile.TemporaryDirectory(dir=cubin.parent) as folder:
        work = Path(folder)
        for name, text in headers.items():
            (work / name).write_text(text, encoding="utf-8")
        compiler = [nvcc, *options, f"-I{work}", *(f"-I{device}" for device in DEVICE_FOLDERS)]
        if verbs is Verbs.NVSHMEM:
            output = _run([*compiler, f"-I{nvshmem_folder() / 'include'}", "-dc", "-o", str(work / "kernel.o"), str(source)])
            nvlink = shutil.which("nvlink") or str(Path(os.path.realpath(nvcc)).with_name("nvlink"))
            library = [f"-L{nvshmem_folder() / 'lib'}", "-lnvshmem_device"]
            _run([nvlink, f"--arch={arch}", "-o", str(work / "kernel.cubin"), str(work / "kernel.o"), *library])
        else:
            output = _run([*compiler, "-cubin", "-o", str(work / "kernel.cubin"), str(source)])
        (work / "report.txt").write_text(output, encoding="utf-8")
        os.replace(work / "report.txt", report)
        os.replace(work / "kernel.cubin", cubin)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\nfailed with:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout + done.stderr
