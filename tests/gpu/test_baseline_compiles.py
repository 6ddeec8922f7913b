"""The Baseline's kernels compile for Hopper, fit their registers and spill none of them. nvcc is needed, a GPU is not."""

from __future__ import annotations

import shutil

import pytest

from inc_runtime.compile_cache import Built, build
from inc_runtime.config import CommunicationModel
from megakernel.launch_baseline import HEADERS, MOVER_THREADS, MOVERS, SOURCE, STREAM_THREADS, STREAMS
from megakernel.relayed_exchange import SOURCE as RELAYED_SOURCE

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: the kernels cannot be compiled here")
REGISTERS_OF_SM = 65_536


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INC_CACHE_FOLDER", str(tmp_path_factory.mktemp("cache")))
        return build(SOURCE, headers=HEADERS)


@pytest.mark.parametrize("kernel", [*MOVERS, *STREAMS])
def test_no_register_is_spilled_and_a_block_fits_an_sm(built: Built, kernel: str) -> None:
    found = {entry.kernel: entry for entry in built.resources}[kernel]
    assert (found.stack_bytes, found.spill_bytes) == (0, 0)
    assert found.registers * (MOVER_THREADS if kernel in MOVERS else STREAM_THREADS) <= REGISTERS_OF_SM


@pytest.mark.parametrize("defines", [[], ["INC_DIRECT"]], ids=["relays", "no switches"])
def test_the_one_sided_exchange_compiles_without_spills(tmp_path, monkeypatch, defines) -> None:
    monkeypatch.setenv("INC_CACHE_FOLDER", str(tmp_path))
    found = build(RELAYED_SOURCE, model=CommunicationModel.ALL_TO_ALL, defines=defines).resources
    assert {entry.kernel for entry in found} == {"relayed_dispatch", "relayed_combine"}
    assert all((entry.stack_bytes, entry.spill_bytes) == (0, 0) for entry in found)
