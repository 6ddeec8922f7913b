"""The expert products and the layer compile for Hopper as they were measured: no spills, matrix instructions not serialised.

CPU only: nvcc is needed, a GPU is not. What the kernels compute is checked on a GPU by results/check_expert_matmul.py and
tests/gpu/megakernel_program.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from inc_runtime.compile_cache import Built, build
from megakernel import expert_matmul, launch_megakernel
from megakernel.device_arguments import HEADERS

REGISTERS = {"expert_matmul": 168, "expert_matmul_gather": 168, "megakernel": 128}
"""65,536 over 384 or 512 threads, rounded down to a multiple of 8: what a block can start with. setmaxnreg redistributes them."""
SOURCES = {kernel: expert_matmul.SOURCE for kernel in expert_matmul.KERNELS} | {"megakernel": launch_megakernel.SOURCE}


@pytest.fixture(scope="module")
def builds() -> dict[Path, Built]:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH: the CUDA sources cannot be compiled here")
    return {source: build(source, headers=HEADERS) for source in set(SOURCES.values())}


@pytest.mark.parametrize("kernel", SOURCES)
def test_no_register_is_spilled(builds, kernel: str) -> None:
    [used] = [r for r in builds[SOURCES[kernel]].resources if r.kernel == kernel]
    assert (used.spill_bytes, used.stack_bytes) == (0, 0)


@pytest.mark.parametrize("kernel", SOURCES)
def test_registers_fit_one_block(builds, kernel: str) -> None:
    [used] = [r for r in builds[SOURCES[kernel]].resources if r.kernel == kernel]
    assert used.registers <= REGISTERS[kernel]


@pytest.mark.parametrize("kernel", SOURCES)
def test_the_compiler_serialises_no_matrix_product_and_heeds_every_change_of_registers(builds, kernel: str) -> None:
    report = builds[SOURCES[kernel]].report
    assert "serialized" not in report and "setmaxnreg" not in report, report


@pytest.mark.parametrize("kernel", SOURCES)
def test_machine_code_has_the_expected_instructions(builds, kernel: str) -> None:
    if shutil.which("cuobjdump") is None:
        pytest.skip("cuobjdump is not installed: the machine code cannot be read here")
    command = ["cuobjdump", "-sass", str(builds[SOURCES[kernel]].path)]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=50)
    if dump.returncode != 0:
        pytest.skip(f"cuobjdump cannot disassemble here: {dump.stderr.strip()[:100]}")
    functions = re.split(r"Function : ", dump.stdout)
    code = next(text for text in functions if text.split(None, 1)[0] == kernel)
    assert len(re.findall(r"HGMMA\.64x128x16\.F32\.BF16", code)) == 8  # one K block of 64, one copy of the main loop
    assert len(re.findall(r"\bHMMA\b", code)) == 0
    assert len(re.findall(r"USETMAXREG", code)) == (3 if kernel == "megakernel" else 2)
    assert len(re.findall(r"UTMASTG", code)) >= 2
