"""The expert products compile for Hopper as they were measured: no spills, matrix instructions not serialised.

CPU only: nvcc is needed, a GPU is not. What the kernels compute is checked by results/measure_expert_matmul.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "megakernel" / "expert_matmul.cu"
KERNELS = ("expert_matmul", "expert_matmul_gather")
REGISTERS_AT_LAUNCH = 168  # 65,536 over 384 threads, rounded down to a multiple of 8; setmaxnreg redistributes them


def find_tool(name: str) -> str | None:
    beside_default = Path("/usr/local/cuda/bin") / name
    return shutil.which(name) or (str(beside_default) if beside_default.exists() else None)


@dataclass(frozen=True)
class Build:
    cubin: Path
    report: str  # of ptxas


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    nvcc = find_tool("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed: the CUDA sources cannot be compiled here")
    cubin = tmp_path_factory.mktemp("cubin") / "expert_matmul.cubin"
    target = "-gencode=arch=compute_90a,code=sm_90a"
    command = [nvcc, "-std=c++17", "-O3", target, "-Xptxas", "-v", "-cubin", "-o", str(cubin), str(SOURCE)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert finished.returncode == 0, finished.stderr
    return Build(cubin, finished.stderr)


def report_of(build: Build, kernel: str) -> str:
    found = re.search(rf"Function properties for {kernel}\n(.*\n.*)", build.report)
    assert found, build.report
    return found.group(1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_register_is_spilled(build: Build, kernel: str) -> None:
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report_of(build, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_registers_fit_one_block_of_384_threads(build: Build, kernel: str) -> None:
    used = re.search(r"Used (\d+) registers", report_of(build, kernel))
    assert used and int(used.group(1)) <= REGISTERS_AT_LAUNCH, report_of(build, kernel)


def test_compiler_neither_serialises_products_nor_ignores_register_hand_over(build: Build) -> None:
    assert "wgmma.mma_async instructions are serialized" not in build.report
    assert "setmaxnreg" not in build.report  # C7508: ignored


@pytest.mark.parametrize("kernel", KERNELS)
def test_machine_code_has_the_expected_instructions(build: Build, kernel: str) -> None:
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump is not installed: the machine code cannot be read here")
    dump = subprocess.run([cuobjdump, "-sass", str(build.cubin)], capture_output=True, text=True, timeout=50)
    if dump.returncode != 0:
        pytest.skip(f"cuobjdump cannot disassemble here: {dump.stderr.strip()[:100]}")
    functions = re.split(r"Function : ", dump.stdout)
    code = next(text for text in functions if text.split(None, 1)[0] == kernel)
    assert len(re.findall(r"HGMMA\.64x256x16\.F32\.BF16", code)) == 4  # one K block of 64, one copy of the main loop
    assert len(re.findall(r"\bHMMA\b", code)) == 0
    assert len(re.findall(r"USETMAXREG", code)) == 2
    assert len(re.findall(r"UTMALDG", code)) >= 6  # two boxes of weights each product, rows of the second
    assert len(re.findall(r"UTMASTG", code)) >= 2
    assert len(re.findall(r"\b(?:LDL|STL)\b", code)) == 0
