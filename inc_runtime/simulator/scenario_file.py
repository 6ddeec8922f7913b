"""Scenario files: TOML in, checked `Scenario` out; an error names the line and the remedy."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from inc_runtime.config import CommunicationModel, Implementation, LayerShape
from inc_runtime.errors import ConfigurationError
from inc_runtime.simulator.models import PUBLIC_MODELS, shape_of
from inc_runtime.simulator.scenario import Forwarding, NetworkSpec, Scenario, SwitchKind, TopologyKind, Wire
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec, load_trace

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[import-not-found, no-redef]

EXAMPLE = """\
# One MoE layer. Every line but [model] name may be left out; the values here are the defaults unless a comment says so.
name = "olmoe on a real switch"

[model]
name = "olmoe_1b_7b"              # or qwen3_235b_a22b, deepseek_v3, kimi_k2; or give the four sizes instead:
# num_experts = 64                # E
# top_k = 8                       # k
# hidden_size = 2048              # H
# intermediate_size = 1024        # I
replicas = 1                      # copies of every expert; needed when there are more ranks than experts

[ranks]
num_ranks = 4                     # W
tokens_per_rank = 4096            # N
placement = "simulated"           # scale_model: every rank has 1/W of a machine; shared: the switches run on a few of its SMs

[implementation]
name = "megakernel_inc"           # baseline, megakernel, megakernel_phased, megakernel_inc, megakernel_inc_phased
# communication_model = "inc_all_gather_reduce_scatter"   # default: the implementation's own
microbatch_tokens = 512           # m_b
edge_tokens = 0                   # of the first and the last microbatch; sizes double from there up to m_b; 0: all have m_b
depth = 5                         # D, microbatches in flight
ranks_per_phase = 1               # G, phased forms alone
barrier_after_dispatch = true     # phased forms alone

[network]
switch = "real"                   # a port per rank, one hop; "emulated": a PE with one port, two hops
forwarding = "cut_through"        # or store_and_forward
# port_gbps = 362.0               # of a rank, each direction; default: the calibration's
# switch_port_gbps = 362.0        # of an emulated switch; default: that of a rank
# latency_us = 1.23               # rank to rank through a real switch, rank to PE of an emulated one; default: the calibration's
packet_bytes = 4096
packet_header_bytes = 0
planes = 1                        # switches of each role
dual_role = false                 # the switches of a plane share one device
local_bypass = false              # rows for experts of their owner stay at home
dispatch_wire = "bf16"            # or fp8, with a float32 scale per 128 elements
combine_wire = "bf16"
# switch_memory_mib = 64.0        # refuse what does not fit

[topology]
kind = "one_switch"               # or leaf_spine, rails: then also
# ranks_per_leaf = 8
# uplink_gbps = 200.0             # of a leaf to the spine; of one rank's rail
# uplink_latency_us = 1.0

[routing]
kind = "uniform"                  # or zipf, hot_expert, hot_rank, recorded
exponent = 1.0                    # of Zipf's law
hot_factor = 16.0                 # how much hotter the hot experts are
seed = 0
# trace = "experts.npy"           # recorded: [num_tokens, k] expert ids
"""

MODEL_KEYS = ("num_experts", "top_k", "hidden_size", "intermediate_size")
_ENUMS: dict[str, type[enum.Enum]] = {
    "switch": SwitchKind,
    "forwarding": Forwarding,
    "dispatch_wire": Wire,
    "combine_wire": Wire,
}
_SCENARIO_KEYS = {
    "ranks": ("num_ranks", "tokens_per_rank", "placement"),
    "implementation": ("microbatch_tokens", "edge_tokens", "depth", "ranks_per_phase", "barrier_after_dispatch"),
}
_NETWORK_KEYS = tuple(
    f.name for f in fields(NetworkSpec) if f.name not in ("topology", "ranks_per_leaf", "uplink_gbps", "uplink_latency_us")
)
_TOPOLOGY_KEYS = ("kind", "ranks_per_leaf", "uplink_gbps", "uplink_latency_us")
_ROUTING_KEYS = tuple(f.name for f in fields(RoutingSpec))
_KNOWN = {
    "": ("name",),
    "model": ("name", "replicas", *MODEL_KEYS),
    "ranks": _SCENARIO_KEYS["ranks"],
    "implementation": ("name", "communication_model", *_SCENARIO_KEYS["implementation"]),
    "network": _NETWORK_KEYS,
    "topology": _TOPOLOGY_KEYS,
    "routing": _ROUTING_KEYS,
}


def lines_of_keys(text: str) -> dict[tuple[str, str], int]:
    """The line, from 1, of every `key =` of a TOML text, by (table, key)."""
    lines: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            table = match[1]
            lines.setdefault((table, ""), number)
        elif match := re.match(r"\s*([\w-]+)\s*=", line):
            lines[table, match[1]] = number
    return lines


def load_scenario(path: Path, overrides: dict[str, Any] | None = None) -> Scenario:
    """Read, complete and check a scenario file. `overrides`: values by `table.key`, which win over the file.

    Raises ConfigurationError: `file:line: key = value: limit. Remedy`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}. Write one with: inc simulate --example > scenario.toml") from None
    return parse_scenario(text, str(path), path.parent, overrides)


def parse_scenario(text: str, source: str, folder: Path = Path(), overrides: dict[str, Any] | None = None) -> Scenario:
    """As `load_scenario`, from text; `source` names it in errors, `folder` is where its relative paths begin."""
    lines = lines_of_keys(text)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).partition(" (at line ")
        line = place.split(",")[0] or str(max(1, len(text.splitlines())))
        raise ConfigurationError(f"{source}:{line}: {reason}. See inc simulate --example.") from None
    for dotted, value in (overrides or {}).items():
        table, _, key = dotted.rpartition(".")
        if key not in _KNOWN.get(table, ()):
            known = ", ".join(f"{name}.{keys[0]}" for name, keys in _KNOWN.items() if name)
            raise ConfigurationError(f"{dotted} = {value!r}: there is no such key. Give TABLE.KEY=VALUE, such as {known}.")
        if table and isinstance(tables.setdefault(table, {}), dict):
            tables[table][key] = value
        elif not table:
            tables[key] = value
        lines[table, key] = 0
    try:
        _refuse_unknown(tables)
        scenario = build_scenario(tables, folder)
        scenario.check()
        if scenario.routing.trace is not None:
            load_trace(scenario.routing.trace, scenario.shape)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}{_line_of(str(error), lines)}: {error}") from None
    return scenario


def _line_of(message: str, lines: dict[tuple[str, str], int]) -> str:
    table, _, key = message.split(" = ")[0].split(" ")[-1].rpartition(".")
    found = [n for place, n in lines.items() if place in ((table, key), (key, "")) or (not table and place[1] == key)]
    if not found:
        return ": not in the file, the default does not fit here"
    return f":{found[0]}" if found[0] else ": on the command line"


def _refuse_unknown(tables: dict[str, Any]) -> None:
    known = ", ".join(name for name in _KNOWN if name)
    for table, content in tables.items():
        if table == "name":
            if not isinstance(content, str):
                raise ConfigurationError(f"name = {content!r}: it must be text. Put it in quotes.")
            continue
        if table not in _KNOWN:
            raise ConfigurationError(f"{table} = ...: there is no such table or key. Tables: {known}.")
        if not isinstance(content, dict):
            raise ConfigurationError(f"{table} = {content!r}: it must be a table. Write [{table}] and its keys below.")
        for key in content if isinstance(content, dict) else ():
            if key not in _KNOWN[table]:
                known = ", ".join(_KNOWN[table])
                raise ConfigurationError(f"{key} = {content[key]!r}: [{table}] has no such key. Keys: {known}.")


def _enum(kind: Callable[[Any], Any], key: str, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)  # type: ignore[attr-defined]
        raise ConfigurationError(f"{key} = {value!r}: it must be one of {known}. Correct the word.") from None


def _typed(spec: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Refuse a word where a number stands, and the reverse, by the type of the default."""
    for key, value in values.items():
        default = getattr(spec, key)
        numeric = isinstance(default, (int, float)) or default is None
        if isinstance(value, bool) != isinstance(default, bool) or (numeric and not isinstance(value, (int, float))):
            kind = "true or false" if isinstance(default, bool) else "a number"
            raise ConfigurationError(f"{key} = {value!r}: it must be {kind}. Correct the value.")
        if isinstance(default, int) and not isinstance(default, bool) and not isinstance(value, int):
            raise ConfigurationError(f"{key} = {value!r}: it must be a whole number. Correct the value.")
    return values


def build_scenario(tables: dict[str, Any], folder: Path = Path()) -> Scenario:
    """A scenario from parsed tables, not yet checked."""
    model = dict(tables.get("model", {}))
    base = Scenario()
    given = {key: model[key] for key in MODEL_KEYS if key in model}
    if "name" in model and given:
        raise ConfigurationError(f"{next(iter(given))} = {next(iter(given.values()))}: [model] has a name as well. Drop one.")
    if given and len(given) < len(MODEL_KEYS):
        missing = ", ".join(key for key in MODEL_KEYS if key not in given)
        raise ConfigurationError(f"{next(iter(given))} = {next(iter(given.values()))}: give also {missing}, or a model name.")
    shape = LayerShape(**_typed(base.shape, given)) if given else shape_of(model.get("name", next(iter(PUBLIC_MODELS))))
    implementation = dict(tables.get("implementation", {}))
    values: dict[str, Any] = {"name": tables.get("name", base.name), "shape": shape}
    values |= _typed(base, {"replicas": model.get("replicas", 1)})
    ranks = dict(tables.get("ranks", {}))
    values["placement"] = _placement(ranks.pop("placement", base.placement))
    values |= _typed(base, ranks)
    values["implementation"] = _enum(Implementation, "implementation.name", implementation.pop("name", base.implementation.value))
    if (named := implementation.pop("communication_model", None)) is not None:
        values["communication_model"] = _enum(CommunicationModel, "communication_model", named)
    values |= _typed(base, implementation)
    network = {k: _enum(_ENUMS[k], k, v) if k in _ENUMS else v for k, v in tables.get("network", {}).items()}
    topology = dict(tables.get("topology", {}))
    kind = _enum(TopologyKind, "topology.kind", topology.pop("kind", "one_switch"))
    numbers = {k: v for k, v in network.items() if k not in _ENUMS} | topology
    _typed(base.network, numbers)
    values["network"] = replace(base.network, topology=kind, **network, **topology)
    routing = dict(tables.get("routing", {}))
    if "kind" in routing:
        routing["kind"] = _enum(RoutingKind, "routing.kind", routing["kind"])
    if "trace" in routing:
        if not isinstance(routing["trace"], str):
            raise ConfigurationError(f"trace = {routing['trace']!r}: it must be the name of a file. Correct the value.")
        routing["trace"] = folder / routing["trace"]
    _typed(base.routing, {k: v for k, v in routing.items() if k not in ("kind", "trace")})
    values["routing"] = replace(base.routing, **routing)
    return Scenario(**values)


def _placement(value: str) -> str:
    if value not in ("simulated", "native", "scale_model", "shared"):
        raise ConfigurationError(f"placement = {value!r}: it must be simulated, native, scale_model or shared. Correct the word.")
    return value
