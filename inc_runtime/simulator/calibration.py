"""The calibration: the few numbers of a machine that every simulated time follows from, and where they come from.

A calibration is a JSON file. `published_h200.json` is committed and is the default; `inc simulate --calibrate` writes others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from inc_runtime.errors import ConfigurationError
from inc_runtime.placement import FREE_SMS, SHARED_SWITCH_BLOCKS

MAY_BE_0 = ("_us", "_ns", "_sms", "interference")
"""How the names of those numbers end that may be 0."""
DEFAULT_PATH = Path(__file__).parent / "calibrations" / "published_h200.json"


@dataclass(frozen=True)
class Calibration:
    """One machine. `source` is `published`, or that of the data it was fitted to.

    Links: `latency_us`: one way between two PEs. `port_gbps`: GB/s of one port and direction. On emulated switches:
    `switch_overhead_us`: of one sender's work; `relay_efficiency`: share of a port that relays fill; `relay_us`: what a relay
    adds to the way of a message.
    Units: `matrix_tflops`: grouped MatMul on whole tiles, by a library. `memory_tbps`: TB/s of global memory.
    `communication_sms` of `total_sms` are reserved for transfers by the fused plain all-to-all; the INC forms reserve none.
    One kernel per stage (Baseline): `launch_us`: of a kernel; `vector_efficiency`: share of the memory that vector stages
    reach; `route_ns`: c, of one token's routing; `expert_us`: of one expert in a grouped product; `sustained_rate`: share of
    `matrix_tflops` that products keep when they run for longer than `BURST_US`; `exchange_us`: of a library's collective,
    besides its bytes.
    One kernel for the layer: `fused_rate`: share of `matrix_tflops` that its products reach; `matrix_overhead_us`,
    `vector_overhead_us`: o, the fixed cost of one stage and microbatch; `fused_vector_efficiency`: as above, by the few warps
    that run its vector stages; `fused_route_ns`: as above; `interference`: share of the time of vector stages by
    which the products beside them take longer. `fit`: errors of the fit.
    """

    name: str
    source: str
    latency_us: float
    port_gbps: float
    matrix_tflops: float
    memory_tbps: float
    switch_overhead_us: float = 0.0
    relay_efficiency: float = 1.0
    relay_us: float = 0.0
    communication_sms: int = 8
    total_sms: int = 132
    tile_rows: int = 128
    launch_us: float = 5.0
    vector_efficiency: float = 1.0
    route_ns: float = 0.0
    expert_us: float = 0.0
    sustained_rate: float = 1.0
    exchange_us: float = 5.0
    fused_rate: float = 1.0
    matrix_overhead_us: float = 2.0
    vector_overhead_us: float = 2.0
    fused_vector_efficiency: float = 1.0
    fused_route_ns: float = 0.0
    interference: float = 0.0
    fit: dict[str, object] = field(default_factory=dict)
    data_files: tuple[str, ...] = ()

    def on_placement(self, placement: str, num_ranks: int) -> Calibration:
        """The share of the machine that one rank has: all of it (`native`), 1/W of SMs, memory and port (`scale_model`), or
        all but the SMs of the switches that run on the same device (`shared`: two switches on W devices)."""
        if placement in ("native", "simulated"):
            return self
        if placement == "scale_model":
            return replace(
                self,
                port_gbps=self.port_gbps / num_ranks,
                matrix_tflops=self.matrix_tflops / num_ranks,
                memory_tbps=self.memory_tbps / num_ranks,
                route_ns=self.route_ns * num_ranks,
                fused_route_ns=self.fused_route_ns * num_ranks,
            )
        if placement == "shared":
            taken = FREE_SMS + SHARED_SWITCH_BLOCKS * -(-2 // num_ranks)
            return replace(self, matrix_tflops=self.matrix_tflops * (1 - taken / self.total_sms))
        known = "native, scale_model and shared"
        raise ConfigurationError(f"placement = {placement}: the simulator models {known} alone. Drop those rows.")


def load_calibration(path: Path | None = None) -> Calibration:
    """Read a calibration file, or a committed one by its name; the default without a path. Raises ConfigurationError."""
    path = path or DEFAULT_PATH
    if not path.suffix and not path.exists():
        path = DEFAULT_PATH.parent / f"{path}.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigurationError(
            f"calibration {path}: {error}. Write one with: inc simulate --calibrate DATA.csv --output FILE.json"
        ) from None
    known = {f.name for f in fields(Calibration)}
    unknown = set(values) - known
    missing = {"name", "source", "latency_us", "port_gbps", "matrix_tflops", "memory_tbps"} - set(values)
    if unknown or missing:
        raise ConfigurationError(
            f"calibration {path}: unknown fields {sorted(unknown)}, missing fields {sorted(missing)}. Fields: {sorted(known)}."
        )
    values["data_files"] = tuple(values.get("data_files", ()))
    calibration = Calibration(**values)
    for f in fields(Calibration):
        value = getattr(calibration, f.name)
        if isinstance(value, (int, float)) and (value < 0 or (value == 0 and not f.name.endswith(MAY_BE_0))):
            raise ConfigurationError(f"calibration {path}: {f.name} = {value}; it must be positive. Refit it.")
    return calibration


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration file."""
    path.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")
