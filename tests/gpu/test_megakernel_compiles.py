"""The expert products and the layer compile for Hopper as they were measured: no serialised products, no spills in them.

CPU only: nvcc is needed, a GPU is not. What the kernels compute is checked on a GPU by results/check_expert_matmul.py and
tests/gpu/megakernel_program.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from inc_runtime.compile_cache import Built, build
from inc_runtime.config import CommunicationModel as Model
from megakernel import expert_matmul, launch_megakernel
from megakernel.device_arguments import HEADERS


@dataclass(frozen=True)
class Variant:
    """A kernel as it is built. `registers`: 65,536 over 384 or 512 threads, in eights: what a block can start with.

    `spill_bytes`, stored and loaded: the vector warps of the layer, with 96 registers, keep what outlives a stage in memory;
    their loops over rows and the matrix warps spill nothing.
    """

    kernel: str
    source: Path
    registers: int
    spill_bytes: int
    model: Model | None = None
    defines: tuple[str, ...] = ()


PRODUCTS = [Variant(name, expert_matmul.SOURCE, 168, 0) for name in expert_matmul.KERNELS]
LAYER = launch_megakernel.SOURCE
BYPASS = ("INC_LOCAL_BYPASS",)
CUT_THROUGH = ("INC_CUT_THROUGH",)
VARIANTS = [
    *PRODUCTS,
    Variant("megakernel", LAYER, 128, 512, Model.INC_ALL_TO_ALL),
    Variant("megakernel", LAYER, 128, 768, Model.INC_ALL_TO_ALL, ("INC_COPIES_ROWS",)),
    Variant("megakernel", LAYER, 128, 768, Model.INC_ALL_TO_ALL_PHASED),
    Variant("megakernel", LAYER, 128, 1280, Model.ALL_TO_ALL),
    Variant("megakernel", LAYER, 128, 1536, Model.ALL_TO_ALL, ("INC_DIRECT",)),
    Variant("megakernel", LAYER, 128, 1792, Model.ALL_TO_ALL_PHASED),
    Variant("megakernel", LAYER, 128, 768, Model.INC_ALL_TO_ALL, BYPASS),
    Variant("megakernel", LAYER, 128, 768, Model.INC_ALL_TO_ALL, CUT_THROUGH),
    Variant("megakernel", LAYER, 128, 1024, Model.INC_ALL_TO_ALL, (*CUT_THROUGH, *BYPASS)),
    Variant("megakernel", LAYER, 128, 512, Model.INC_ALL_TO_ALL, ("INC_PLANES=2",)),
    Variant("megakernel", LAYER, 128, 768, Model.INC_ALL_TO_ALL_PHASED, BYPASS),
    Variant("megakernel", LAYER, 128, 1280, Model.ALL_TO_ALL, BYPASS),
    Variant("megakernel", LAYER, 128, 2304, Model.ALL_TO_ALL_PHASED, BYPASS),
]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: " ".join([v.kernel, v.model.value if v.model else "", *v.defines]))
def built(request: pytest.FixtureRequest) -> tuple[Variant, Built]:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH: the CUDA sources cannot be compiled here")
    variant: Variant = request.param
    return variant, build(variant.source, model=variant.model, headers=HEADERS, defines=variant.defines)


def test_it_fits_one_block_and_spills_no_more_than_it_says(built: tuple[Variant, Built]) -> None:
    variant, kernel = built
    [used] = [r for r in kernel.resources if r.kernel == variant.kernel]
    assert used.registers <= variant.registers
    assert used.spill_bytes <= variant.spill_bytes


def test_the_compiler_serialises_no_matrix_product_and_heeds_every_change_of_registers(built: tuple[Variant, Built]) -> None:
    _, kernel = built
    assert "serialized" not in kernel.report and "setmaxnreg" not in kernel.report, kernel.report


def test_machine_code_has_the_expected_instructions(built: tuple[Variant, Built]) -> None:
    variant, kernel = built
    if shutil.which("cuobjdump") is None:
        pytest.skip("cuobjdump is not installed: the machine code cannot be read here")
    dump = subprocess.run(["cuobjdump", "-sass", str(kernel.path)], capture_output=True, text=True, timeout=50)
    if dump.returncode != 0:
        pytest.skip(f"cuobjdump cannot disassemble here: {dump.stderr.strip()[:100]}")
    functions = re.split(r"Function : ", dump.stdout)
    code = next(text for text in functions if text.split(None, 1)[0] == variant.kernel)
    products = [match.start() for match in re.finditer(r"HGMMA\.64x128x16\.F32\.BF16", code)]
    assert len(products) == 8  # one K block of 64, one copy of the main loop
    assert not re.search(r"\b(?:LDL|STL)\b", code[products[0] : products[-1]]), "a spill in the main loop"
    assert len(re.findall(r"\bHMMA\b", code)) == 0
    assert len(re.findall(r"USETMAXREG", code)) == (3 if variant.kernel == "megakernel" else 2)
    assert len(re.findall(r"UTMASTG", code)) >= 2
