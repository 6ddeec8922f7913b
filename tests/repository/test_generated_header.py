"""`inc_runtime/device/protocol.h` is current, and computes what `HeapLayout` and `protocol.py` compute."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

from inc_runtime import protocol
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.device import generate
from inc_runtime.heap_layout import REGIONS, Dims, HeapLayout
from inc_runtime.protocol import Role, World

WORLDS = (World(4), World(3, 2, 1), World(1, 1, 3), World(8, 3, 2))
SHAPES = ((2048, 8, 1024, 3), (64, 1, 7, 1), (40000, 5, 33, 4))
"""hidden_size (rows smaller and larger than a chunk), top_k, microbatch_tokens, depth."""

MODELS = tuple(CommunicationModel)
WORDS = (0, 1, 2, 3, 12345, 2**40 + 1)

PROGRAM = """\
#include <cstdio>
#include <cinttypes>
#include "protocol.h"
using namespace inc::protocol;

template <class Region>
void print_regions(const char* role, const Dims& d) {
    const Offsets<Region> all = offsets<Region>(d);
    std::printf("\\"%s\\": {\\"end\\": %" PRId64 ", \\"regions\\": {", role, all.end);
    bool first = true;
    for (int i = 0; i < static_cast<int>(Region::NUM_REGIONS); ++i) {
        const Region region = static_cast<Region>(i);
        if (!exists(region, d)) continue;
        const Shape s = shape(region, d);
        std::printf("%s\\"%s\\": [%" PRId64 ", %" PRId64 ", [", first ? "" : ", ", describe(region).name, offset(region, d),
                    num_bytes(region, d));
        for (int j = 0; j < s.num_dimensions; ++j) std::printf("%s%" PRId64, j ? ", " : "", s.size[j]);
        std::printf("], %d]", static_cast<int>(describe(region).kind));
        first = false;
    }
    std::printf("}}");
}

// All of it at compile time: device code may use it in constant expressions.
static_assert(signal_word(7, true) == 15 && arrival_threshold(7) == 14 && magic_of(15) == 7 && has_payload(15));
static_assert(heap_bytes(Dims{CommunicationModel::INC_ALL_TO_ALL, World{4, 1, 1}, 3, 16, 2048, 8, 4}) > 0);

int main() {
    int model;
    Dims d;
    while (std::scanf("%d %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64, &model,
                      &d.world.num_ranks, &d.world.num_dispatch_switches, &d.world.num_combine_switches, &d.depth,
                      &d.microbatch_tokens, &d.hidden_size, &d.top_k, &d.ranks_per_phase) == 9) {
        d.model = static_cast<CommunicationModel>(model);
        std::printf("{");
        print_regions<RankRegion>("COMPUTE_RANK", d);
        std::printf(", ");
        print_regions<DispatchSwitchRegion>("DISPATCH_SWITCH", d);
        std::printf(", ");
        print_regions<CombineSwitchRegion>("COMBINE_SWITCH", d);
        const int64_t k = d.top_k;
        const int64_t record[] = {RoutingRecord::num_bytes(k), RoutingRecord::token_offset(k), RoutingRecord::sender_offset(k),
                                  RoutingRecord::expert_ids_offset(k), RoutingRecord::weights_offset(k)};
        std::printf(", \\"heap_bytes\\": %" PRId64 ", \\"record\\": [", heap_bytes(d));
        for (int i = 0; i < 5; ++i) std::printf("%s%" PRId64, i ? ", " : "", record[i]);
        std::printf("], \\"pes\\": [");
        for (int64_t pe = 0; pe < d.world.num_pes(); ++pe)
            std::printf("%s[%d, %" PRId64 "]", pe ? ", " : "", static_cast<int>(d.world.role_of(pe)), d.world.plane_of(pe));
        std::printf("]}\\n");
    }
}
"""

KERNEL = """\
#include "protocol.h"
using namespace inc::protocol;
__global__ void raise_flag(char* heap, Dims d, uint64_t magic, uint64_t slot) {
    constexpr int header_words = Header::EDGE_TOKENS + 1;
    static_assert(header_words == HEADER_FIELDS);
    auto* flags = reinterpret_cast<uint64_t*>(heap + offset(RankRegion::expert_rows_arrived, d));
    flags[slot_of(magic, d.depth) * d.world.num_dispatch_switches + slot] = signal_word(magic, true);
}
"""


def compile_program(folder: Path, text: str, name: str, *command: str) -> Path:
    """Write and compile a program against the generated header."""
    source, program = folder / name, folder / "program"
    source.write_text(text)
    line = [*command, "-std=c++17", f"-I{generate.PATH.parent}", str(source), "-o", str(program)]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return program


def all_dims() -> list[Dims]:
    """Every model in worlds and shapes that reach each branch of the formulas."""
    result = []
    for model, world, (hidden, top_k, tokens, depth) in product(MODELS, WORLDS, SHAPES):
        shape = LayerShape(num_experts=64, top_k=top_k, hidden_size=hidden, intermediate_size=64)
        pipeline = Pipeline(tokens, tokens, depth, ranks_per_phase=max(1, world.num_ranks // 2))
        result.append(Dims.of(model, world, shape, pipeline))
    return result


def expected(dims: Dims) -> dict[str, object]:
    """What the C++ program must print, from the Python side."""
    layout, record = HeapLayout(dims), dims.routing_dtype
    result: dict[str, object] = {"heap_bytes": layout.heap_bytes}
    kinds = list(generate.Kind)
    for role, table in REGIONS.items():
        regions = {}
        for region in table:
            if region.when(dims.model):
                offset = -1 if region.private else layout.offset(role, region.name)
                regions[region.name] = [offset, region.num_bytes(dims), list(region.shape(dims)), kinds.index(region.kind)]
        result[role.name] = {"end": layout._ends[role], "regions": regions}
    assert record.fields is not None
    result["record"] = [record.itemsize, *(record.fields[n][1] for n in ("token", "sender", "expert_ids", "weights"))]
    roles = list(Role)
    world = dims.world
    result["pes"] = [[roles.index(world.role_of(pe)), world.plane_of(pe)] for pe in range(world.num_pes)]
    return result


def test_the_header_is_current():
    assert generate.PATH.read_text() == generate.render(), "run: python -m inc_runtime.device.generate"
    assert generate.main(["--check"]) == 0


def test_the_header_computes_the_offsets_of_the_heap_layout(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine (apt-get install g++): the header was not compiled")
    program = compile_program(tmp_path, PROGRAM, "regions.cpp", compiler, "-Wall", "-Wextra", "-Werror")
    dims = all_dims()
    lines = []
    for d in dims:
        w = d.world
        counts = (w.num_ranks, w.num_dispatch_switches, w.num_combine_switches)
        sizes = (d.depth, d.microbatch_tokens, d.hidden_size, d.top_k, d.ranks_per_phase)
        lines.append(" ".join(map(str, (MODELS.index(d.model), *counts, *sizes))))
    output = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    seen = [json.loads(line) for line in output.splitlines()]
    assert len(seen) == len(dims) == len(MODELS) * len(WORLDS) * len(SHAPES)
    for d, found in zip(dims, seen, strict=True):
        assert found == expected(d), d


def test_signal_words_of_the_header_are_those_of_the_protocol(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine (apt-get install g++): the header was not compiled")
    checks = []
    for n in WORDS:
        checks += [f"signal_word({n}u, {str(p).lower()}) == {protocol.signal_word(n, p)}u" for p in (False, True)]
        checks += [f"arrival_threshold({n}u) == {protocol.arrival_threshold(n)}u", f"magic_of({n}u) == {protocol.magic_of(n)}u"]
        checks += [
            f"has_payload({n}u) == {str(protocol.has_payload(n)).lower()}",
            f"slot_of({n}u, 3) == {protocol.slot_of(n, 3)}u",
        ]
    for number, model in enumerate(MODELS):
        for name in ("in_network", "phased", "selective"):
            checks.append(f"{name}(static_cast<CommunicationModel>({number})) == {str(getattr(model, name)).lower()}")
    body = "\n".join(f"static_assert({check});" for check in checks)
    compile_program(
        tmp_path, f'#include "protocol.h"\nusing namespace inc::protocol;\n{body}\nint main() {{}}', "words.cpp", compiler
    )


def test_device_code_can_include_the_header(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine: the header was not compiled for a GPU")
    compile_program(tmp_path, KERNEL, "kernel.cu", "nvcc", "-arch=sm_90a", "-cubin", "-Werror=all-warnings")
