"""Writes `protocol.h`: the words and places of the protocol for device code, from `protocol.py` and `heap_layout.py`.

    python -m inc_runtime.device.generate            rewrite the header
    python -m inc_runtime.device.generate --check    exit with 1 if it is out of date

Formulas come from the Python functions themselves, which run on symbols (`symbolic.py`); the regions come from the
tables of `heap_layout.py`. Names are the Python names, so that a search finds both sides.
"""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from inc_runtime import protocol
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.device.symbolic import Expression, SymbolicDims, SymbolicWorld, formula, plain
from inc_runtime.heap_layout import ALIGNMENT, ERROR_BYTES, F32, REGIONS, Dims, Kind, Region
from inc_runtime.protocol import Chunk, Header, Role, Tag, World

MAX_COLUMNS = 130
PATH = Path(__file__).with_name("protocol.h")

ELEMENTS: dict[np.dtype, str] = {
    F32: "FLOAT32",
    np.dtype("<u8"): "UINT64",
    np.dtype("<i8"): "INT64",
    np.dtype("<i4"): "INT32",
    np.dtype("<u1"): "UINT8",
}
ROW, ROUTING = "ROW", "ROUTING_RECORD"
"""Elements whose size depends on `Dims`: a token row is bfloat16 or float32, a record grows with top_k."""

REGION_ENUMS = {
    Role.COMPUTE_RANK: "RankRegion",
    Role.DISPATCH_SWITCH: "DispatchSwitchRegion",
    Role.COMBINE_SWITCH: "CombineSwitchRegion",
}
assert set(REGION_ENUMS) == set(REGIONS), "every role has a table of regions"

SIGNAL_WORDS: tuple[tuple[str, str, Callable[..., object], tuple[tuple[str, str], ...]], ...] = (
    ("uint64_t", "signal_word", protocol.signal_word, (("uint64_t", "magic"), ("bool", "has_payload"))),
    ("uint64_t", "arrival_threshold", protocol.arrival_threshold, (("uint64_t", "magic"),)),
    ("uint64_t", "magic_of", protocol.magic_of, (("uint64_t", "word"),)),
    ("bool", "has_payload", protocol.has_payload, (("uint64_t", "word"),)),
    ("uint64_t", "slot_of", protocol.slot_of, (("uint64_t", "magic"), ("uint64_t", "depth"))),
)

PREAMBLE = """\
// Generated from inc_runtime/protocol.py and inc_runtime/heap_layout.py by `python -m inc_runtime.device.generate`.
// Do not edit: change those files and run it again; a test fails when this file is out of date.
//
// The words of the protocol (roles, tags, headers, signal words) and its places (the regions of the symmetric heap of each
// role, with shapes and byte offsets). Plain C++17, for host and device. Sizes are int64_t, signal words uint64_t.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define INC_HOST_DEVICE __host__ __device__
#else
#define INC_HOST_DEVICE
#endif

namespace inc::protocol {

INC_HOST_DEVICE constexpr int64_t ceil_div(int64_t dividend, int64_t divisor) { return (dividend + divisor - 1) / divisor; }

INC_HOST_DEVICE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
"""

PLACES = """\
// A region of the role that the enum belongs to. `models` has a bit for each communication model that has the region.
// A private region is memory of its PE outside of the heap: it has a shape and no offset.
struct Description {
    const char* name;
    Kind kind;
    Element element;
    uint32_t models;
    bool is_private;
};

struct Shape {
    int num_dimensions;
    int64_t size[MAX_DIMENSIONS];

    INC_HOST_DEVICE constexpr int64_t num_elements() const {
        int64_t product = 1;
        for (int i = 0; i < num_dimensions; ++i) product *= size[i];
        return product;
    }
};
"""

OFFSETS = """\
template <class Region>
INC_HOST_DEVICE constexpr bool exists(Region region, const Dims& d) {
    return (describe(region).models >> static_cast<int>(d.model)) & 1u;
}

// Bytes of a region; 0 where the communication model has no such region.
template <class Region>
INC_HOST_DEVICE constexpr int64_t num_bytes(Region region, const Dims& d) {
    if (!exists(region, d)) return 0;
    return shape(region, d).num_elements() * element_bytes(describe(region).element, d);
}

// Byte offset of every region in the heap of its role; -1 for one that is private or that the model does not have.
// `end` is where the role's regions end. Compute it once on the host and pass it to kernels by value.
template <class Region>
struct Offsets {
    int64_t of[static_cast<int>(Region::NUM_REGIONS)];
    int64_t end;

    INC_HOST_DEVICE constexpr int64_t operator[](Region region) const { return of[static_cast<int>(region)]; }
};

template <class Region>
INC_HOST_DEVICE constexpr Offsets<Region> offsets(const Dims& d) {
    Offsets<Region> result{};
    for (int i = 0; i < static_cast<int>(Region::NUM_REGIONS); ++i) {
        const Region region = static_cast<Region>(i);
        const bool placed = exists(region, d) && !describe(region).is_private;
        result.of[i] = placed ? result.end : -1;
        if (placed) result.end += ceil_div(num_bytes(region, d), ALIGNMENT) * ALIGNMENT;
    }
    return result;
}

template <class Region>
INC_HOST_DEVICE constexpr int64_t offset(Region region, const Dims& d) {
    return offsets<Region>(d)[region];
}
"""


def _numbered(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, number) for number, name in enumerate(names)]


def _enum(name: str, members: Iterable[tuple[str, int]]) -> str:
    return "\n".join([f"enum class {name} : int {{", *(f"    {member} = {value}," for member, value in members), "};\n"])


def _indices(name: str, fields: type[enum.IntEnum]) -> str:
    """An unscoped enum in a struct: `header[Header::NUM_ROWS]` needs no cast."""
    body = ", ".join(f"{field.name} = {field.value}" for field in fields)
    return f"struct {name} {{\n    enum Field : int {{ {body} }};\n}};\n"


def _switch(result: str, name: str, enum_name: str, cases: Iterable[tuple[str, str]], *, otherwise: str, more: str = "") -> str:
    """A function from a member of an enum to a value; `more` declares a second parameter, `otherwise` is for no member."""
    lines = [f"INC_HOST_DEVICE constexpr {result} {name}({enum_name} member{more}) {{", "    switch (member) {"]
    lines += [f"        case {enum_name}::{member}: return {value};" for member, value in cases]
    return "\n".join([*lines, "        default: return " + otherwise + ";", "    }", "}\n"])


def _words() -> str:
    names = ("MAX_CHUNK_BYTES", "RELAY_CELLS", "MIN_RELAY_CELLS", "HEADER_FIELDS", "CHUNK_FIELDS")
    constants = {name: getattr(protocol, name) for name in names} | {"ALIGNMENT": ALIGNMENT, "ERROR_BYTES": ERROR_BYTES}
    parts = [
        "\n".join(f"inline constexpr int64_t {name} = {value};" for name, value in constants.items()) + "\n",
        _enum("Role", _numbered(role.name for role in Role)),
        _enum("Tag", ((tag.name, tag.value) for tag in Tag)),
        _switch("const char*", "name_of", "Tag", ((tag.name, f'"{tag.name}"') for tag in Tag), otherwise='"?"'),
        "// int64 fields in front of the rows of a put.\n" + _indices("Header", Header),
        "// int64 fields in front of a relayed chunk.\n" + _indices("Chunk", Chunk),
    ]
    for result, name, function, parameters in SIGNAL_WORDS:
        symbols = [Expression(parameter) for _, parameter in parameters]
        parts.append(_function(result, name, parameters, formula(partial(function, *symbols))))
    return "\n".join(parts)


def _function(
    result: str, name: str, parameters: Iterable[tuple[str, str]], text: str, *, indent: str = "", suffix: str = ""
) -> str:
    arguments = ", ".join(" ".join(parameter) for parameter in parameters)
    head = f"{indent}INC_HOST_DEVICE constexpr {result} {name}({arguments}){suffix} {{"
    line = f"{head} return {plain(text)}; }}\n"
    if len(line) <= MAX_COLUMNS:
        return line
    branches = plain(text).replace(" : ", f"\n{indent}        : ").replace(" ? ", f"\n{indent}        ? ")
    return f"{head}\n{indent}    return {branches};\n{indent}}}\n"


def _mask(holds: Callable[[CommunicationModel], bool]) -> str:
    return f"0x{sum(1 << bit for bit, model in enumerate(CommunicationModel) if holds(model)):02x}u"


def _models() -> str:
    parts = [_enum("CommunicationModel", _numbered(model.name for model in CommunicationModel))]
    for name, member in vars(CommunicationModel).items():
        if isinstance(member, property):
            text = f"(({_mask(member.fget)} >> static_cast<int>(model)) & 1u) != 0"  # type: ignore[arg-type]
            parts.append(_function("bool", name, (("CommunicationModel", "model"),), text))
    return "\n".join(parts)


Signatures = Mapping[str, tuple[str, tuple[tuple[str, str], ...]]]


def _methods(owner: type, symbols: object, signatures: Signatures) -> list[str]:
    """The properties of `owner` that are integers, and the methods in `signatures`, as C++ methods."""
    lines = []
    for name, member in vars(owner).items():
        getter = member.fget if isinstance(member, property) else None
        if getter and getter.__annotations__["return"] == "int":
            text = formula(partial(getter, symbols))
            lines.append(_function("int64_t", name, (), text, indent="    ", suffix=" const"))
        elif name in signatures:
            result, parameters = signatures[name]
            arguments = [Expression(parameter) for _, parameter in parameters]
            text = formula(partial(member, symbols, *arguments))
            lines.append(_function(result, name, parameters, text, indent="    ", suffix=" const"))
    return lines


def _world() -> str:
    pe, plane = (("int64_t", "pe"),), (("int64_t", "plane"),)
    signatures: Signatures = {
        "role_of": ("Role", pe),
        "plane_of": ("int64_t", pe),
        "dispatch_switch": ("int64_t", plane),
        "combine_switch": ("int64_t", plane),
    }
    fields = [f"    int64_t {name};" for name in World.__dataclass_fields__]
    head = "// PEs in order: the compute ranks, then the dispatch switches, then the combine switches.\nstruct World {"
    return "\n".join([head, *fields, "", "".join(_methods(World, SymbolicWorld(""), signatures)) + "};\n"])


def _dims() -> str:
    types = {"model": "CommunicationModel", "world": "World", "local_bypass": "bool"}
    fields = []
    for name, field in Dims.__dataclass_fields__.items():
        default = "" if field.default is MISSING else f" = {str(field.default).lower()}"
        fields.append(f"    {types.get(name, 'int64_t')} {name}{default};")
    head = "// The sizes that every shape is made of. `ranks_per_phase` is num_ranks where the model is not phased."
    return "\n".join([head, "struct Dims {", *fields, "", "".join(_methods(Dims, SymbolicDims(""), {})) + "};\n"])


@cache
def _some_dims(top_k: int) -> Dims:
    shape = LayerShape(num_experts=1024, top_k=top_k, hidden_size=64, intermediate_size=64)
    return Dims.of(CommunicationModel.INC_ALL_TO_ALL, World(2), shape, Pipeline(bound_tokens=8, microbatch_tokens=8))


def _linear_in_top_k(quantity: Callable[[np.dtype], int]) -> str:
    """A quantity of the routing record as `a + b * top_k`, checked for every k up to 128."""
    values = {k: quantity(_some_dims(k).routing_dtype) for k in range(1, 129)}
    slope = values[2] - values[1]
    start = values[1] - slope
    if any(value != start + slope * k for k, value in values.items()):
        raise ValueError("the routing record does not grow linearly with top_k: teach this function its form")
    return f"{start} + {slope} * top_k" if slope else str(start)


def _field_offset(name: str, dtype: np.dtype) -> int:
    fields: Any = dtype.fields
    return fields[name][1]


def _routing_record() -> str:
    lines = ["// The routing record of one row. Fields: " + _record_fields() + ".", "struct RoutingRecord {"]
    for name in _some_dims(1).routing_dtype.names or ():
        text = _linear_in_top_k(partial(_field_offset, name))
        argument = "int64_t top_k" if "top_k" in text else "int64_t /*top_k*/"
        lines.append(f"    INC_HOST_DEVICE static constexpr int64_t {name}_offset({argument}) {{ return {text}; }}")
    text = _linear_in_top_k(lambda dtype: dtype.itemsize)
    lines.append(f"    INC_HOST_DEVICE static constexpr int64_t num_bytes(int64_t top_k) {{ return {text}; }}")
    return "\n".join([*lines, "};\n"])


def _record_fields() -> str:
    fields: dict[str, Any] = dict(_some_dims(3).routing_dtype.fields or {})
    words = []
    for name, (dtype, *_) in fields.items():
        words.append(f"{dtype.base.name} {name}" + ("[top_k]" if dtype.shape else ""))
    return ", ".join(words)


def _element_name(region: Region) -> str:
    dtype, wide = region.dtype(_some_dims(3)), region.dtype(replace(_some_dims(3), row_element_bytes=4))
    if dtype != wide:
        return ROW
    return ROUTING if dtype.names else ELEMENTS[dtype]


def _elements() -> str:
    names = [*ELEMENTS.values(), ROW, ROUTING]
    sizes = [(name, str(dtype.itemsize)) for dtype, name in ELEMENTS.items()]
    sizes += [(ROW, "d.row_element_bytes"), (ROUTING, "RoutingRecord::num_bytes(d.top_k)")]
    return "\n".join(
        [
            _enum("Kind", _numbered(kind.name for kind in Kind)),
            _enum("Element", _numbered(names)),
            _switch("int64_t", "element_bytes", "Element", sizes, otherwise="0", more=", const Dims& d"),
        ]
    )


def _describe(region: Region) -> str:
    private = "true" if region.private else "false"
    return f'{{"{region.name}", Kind::{region.kind.name}, Element::{_element_name(region)}, {_mask(region.when)}, {private}}}'


def _shape(region: Region) -> str:
    dims: Any = SymbolicDims("d.")
    sizes = [plain(formula(partial(lambda i: region.shape(dims)[i], i))) for i in range(_num_dimensions(region))]
    return f"{{{len(sizes)}, {{{', '.join(sizes)}}}}}"


def _regions(role: Role) -> str:
    name, table = REGION_ENUMS[role], REGIONS[role]
    described = [(region.name, _describe(region)) for region in table]
    shapes = [(region.name, _shape(region)) for region in table]
    lines = [f"// Regions of a {role.value}, in the order of the heap: who writes; who reads.", f"enum class {name} : int {{"]
    lines += [f"    {region.name} = {i},  // {region.writer}; {region.reader}" for i, region in enumerate(table)]
    nothing = '{"?", Kind::CONTROL, Element::UINT8, 0u, true}'
    return "\n".join(
        [
            *lines,
            f"    NUM_REGIONS = {len(table)},",
            "};\n",
            _switch("Description", "describe", name, described, otherwise=nothing),
            _switch("Shape", "shape", name, shapes, otherwise="{0, {}}", more=", const Dims& d"),
        ]
    )


def _num_dimensions(region: Region) -> int:
    return len(region.shape(_some_dims(3)))


def _heap_bytes() -> str:
    ends = [f"offsets<{name}>(d).end" for name in REGION_ENUMS.values()]
    text = ends[0]
    for end in ends[1:]:
        text = f"larger({text}, {end})"
    head = "// Bytes of the symmetric heap on every PE: the maximum over the roles.\n"
    return head + _function("int64_t", "heap_bytes", (("const Dims&", "d"),), text)


def render() -> str:
    """The text of `protocol.h`."""
    dimensions = max(_num_dimensions(region) for table in REGIONS.values() for region in table)
    parts = [
        PREAMBLE,
        _words(),
        _models(),
        _world(),
        _dims(),
        _routing_record(),
        _elements(),
        f"inline constexpr int MAX_DIMENSIONS = {dimensions};\n",
        PLACES,
        *(_regions(role) for role in REGIONS),
        OFFSETS,
        _heap_bytes(),
        "}  // namespace inc::protocol\n",
    ]
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the header, or say whether it is current. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m inc_runtime.device.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the header is out of date")
    check = parser.parse_args(arguments).check
    text = render()
    current = PATH.is_file() and PATH.read_text() == text
    if check:
        print(f"{PATH.name} is {'current' if current else 'out of date: run python -m inc_runtime.device.generate'}.")
        return 0 if current else 1
    if not current:
        PATH.write_text(text)
    print(f"{PATH}: {'rewritten' if not current else 'was current'}, {len(text.splitlines())} lines.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
