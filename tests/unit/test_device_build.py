"""Every kernel compiles for sm_90a without spills, the cache keeps it, and its absence is explained. Needs nvcc, no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from inc_runtime import compile_cache
from inc_runtime.compile_cache import ROOT, Verbs, build
from inc_runtime.config import OLMOE_1B_7B, CommunicationModel, Pipeline
from inc_runtime.device.arguments import PLACES, header_text, heap_argument
from inc_runtime.device.heap_options import check_options
from inc_runtime.errors import BuildError, ConfigurationError
from inc_runtime.heap_layout import REGIONS, Dims, HeapLayout
from inc_runtime.protocol import Role, World

KERNELS = {
    "switch_emulator/device/switch_kernel.cu": {
        "dispatch_switch_kernel": 128,
        "combine_switch_kernel": 128,
        "combine_phased_kernel": 128,
        "dispatch_phased_kernel": 120,
        "dispatch_relay_kernel": 120,
        "combine_relay_kernel": 120,
    },
    "inc_runtime/device/exchange_kernel.cu": {"exchange_kernel": 128, "stop_kernel": 128},
    "inc_runtime/device/copy_peak.cu": {"copy_kernel": 64},
    "inc_runtime/device/clock.cu": {"clock_kernel": 64},
}
"""Registers that a thread may use, so that a block of the launch's size fits; a clerk is a warp more."""

DEFINES = (("INC_LOCAL_BYPASS",), ("INC_CUT_THROUGH",), ("INC_LOCAL_BYPASS", "INC_CUT_THROUGH"), ("INC_PLANES=2",))
"""Options of a heap that switches and ranks are compiled with."""


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INC_CACHE_FOLDER", str(folder))
        yield folder


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize(
    ("source", "defines"),
    [*((source, ()) for source in KERNELS), *((next(iter(KERNELS)), defines) for defines in DEFINES)],
)
def test_kernels_compile_for_hopper_without_spills(cache_folder, source, defines):
    found = {r.kernel: r for r in build(ROOT / source, Verbs.DIRECT, "sm_90a", defines=defines).resources}
    for kernel, most in KERNELS[source].items():
        print(f"{kernel}: {found[kernel].registers} registers")
        assert found[kernel].spill_bytes == 0 and found[kernel].stack_bytes == 0
        assert found[kernel].registers <= most


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("defines", [(), *DEFINES], ids=" ".join)
@pytest.mark.parametrize("model", [model for model in CommunicationModel if "all_to_all" in model.value], ids=lambda m: m.value)
def test_a_rank_compiles_for_every_model_without_spills(cache_folder, model, defines):
    if {"INC_CUT_THROUGH", "INC_PLANES=2"} & {*defines} and model is not CommunicationModel.INC_ALL_TO_ALL:
        pytest.skip("only one model has it")
    built = build(ROOT / "inc_runtime" / "device" / "exchange_kernel.cu", Verbs.DIRECT, "sm_90a", model, defines=defines)
    assert all(r.spill_bytes == 0 and r.stack_bytes == 0 and r.registers <= 128 for r in built.resources)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_a_second_build_comes_from_the_cache(cache_folder, monkeypatch):
    source = ROOT / "inc_runtime" / "device" / "copy_peak.cu"
    first = build(source)
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: pytest.fail("compiled twice"))
    assert build(source) == first


def test_a_changed_source_or_option_changes_the_key(tmp_path, monkeypatch):
    source = ROOT / "switch_emulator" / "device" / "switch_kernel.cu"

    def key(arch: str) -> str:
        return compile_cache._key(source, compile_cache._options(Verbs.DIRECT, arch, None, ()), Verbs.DIRECT, {})

    before = key("sm_90a")
    assert key("sm_100a") != before
    (tmp_path / "changed.cuh").write_text("// changed")
    monkeypatch.setattr(compile_cache, "DEVICE_FOLDERS", (*compile_cache.DEVICE_FOLDERS, tmp_path))
    assert key("sm_90a") != before


def test_a_machine_without_nvcc_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("INC_CACHE_FOLDER", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="nvcc is not on the PATH"):
        build(Path(ROOT / "inc_runtime" / "device" / "copy_peak.cu"))


def test_the_table_of_places_holds_the_offsets_and_strides_of_the_layout():
    layout = HeapLayout(Dims.of(CommunicationModel.INC_ALL_TO_ALL, World(4), OLMOE_1B_7B, Pipeline(64, 16)))
    heap = heap_argument(layout, 0, [0] * 6, wait_limit_s=1.0)
    names = [region.name for region in REGIONS[Role.COMPUTE_RANK]]
    place = heap[PLACES[Role.COMPUTE_RANK]][names.index("expert_rows")]
    assert place["offset"] == layout.offset(Role.COMPUTE_RANK, "expert_rows")
    view = layout.carve(Role.COMPUTE_RANK, np.zeros(layout.heap_bytes, np.uint8))["expert_rows"]
    assert list(place["stride"][:3]) == list(view.strides)


def test_the_generated_structures_name_every_field():
    text = header_text()
    assert "struct Heap {" in text and "uint64_t base[40];" in text and "static_assert(sizeof(Heap)" in text


@pytest.mark.parametrize(
    ("model", "options", "world", "words"),
    [
        (CommunicationModel.ALL_TO_ALL, {}, World(4, 2, 2), "2 planes, all_to_all"),
        (CommunicationModel.INC_ALL_TO_ALL, {"local_bypass": True}, World(4, 2, 2), "local_bypass, planes"),
        (CommunicationModel.INC_ALL_TO_ALL, {"depth": 40}, World(4, 2, 2), "depth = 40: the kernels take 32"),
    ],
)
def test_options_that_the_kernels_do_not_have_are_refused(model, options, world, words):
    dims = Dims.of(model, world, OLMOE_1B_7B, Pipeline(64, 16, **options))
    with pytest.raises(ConfigurationError, match=words):
        check_options(dims, Verbs.DIRECT)
    with pytest.raises(ConfigurationError, match="the direct verbs alone"):
        check_options(Dims.of(CommunicationModel.INC_ALL_TO_ALL_PHASED, World(4), OLMOE_1B_7B, Pipeline(64, 16)), Verbs.NVSHMEM)
