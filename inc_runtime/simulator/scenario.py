"""A scenario: everything that one simulated layer depends on, besides the calibration. Read from a small TOML file.

`Scenario.check` refuses what contradicts itself; `scenario_file.py` adds the line of the file.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from inc_runtime.config import OLMOE_1B_7B, CommunicationModel, Implementation, LayerShape, Pipeline, check
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.protocol import Role, World
from inc_runtime.simulator.models import with_replicas
from inc_runtime.simulator.traffic import RoutingKind, RoutingSpec

MODEL_OF = {
    Implementation.BASELINE: CommunicationModel.ALL_TO_ALL,
    Implementation.MEGAKERNEL: CommunicationModel.ALL_TO_ALL,
    Implementation.MEGAKERNEL_PHASED: CommunicationModel.ALL_TO_ALL_PHASED,
    Implementation.MEGAKERNEL_INC: CommunicationModel.INC_ALL_TO_ALL,
    Implementation.MEGAKERNEL_INC_PHASED: CommunicationModel.INC_ALL_TO_ALL_PHASED,
}
FP8_BLOCK = 128
MAX_RANKS = 1024


class SwitchKind(enum.Enum):
    """REAL: a port per rank, multicast and sum in the forwarding path, one hop. EMULATED: a PE with one port, two hops."""

    REAL = "real"
    EMULATED = "emulated"


class Forwarding(enum.Enum):
    """Whether a switch acts on the first packet of a transfer or on the last."""

    CUT_THROUGH = "cut_through"
    STORE_AND_FORWARD = "store_and_forward"


class Wire(enum.Enum):
    """FP8 carries one byte per element and a float32 scale per 128 elements."""

    BF16 = "bf16"
    FP8 = "fp8"

    def row_bytes(self, hidden_size: int) -> int:
        return 2 * hidden_size if self is Wire.BF16 else hidden_size + 4 * -(-hidden_size // FP8_BLOCK)


class TopologyKind(enum.Enum):
    """LEAF_SPINE: switches in two levels, `uplink_gbps` between a leaf and the spine. RAILS: nodes of `ranks_per_leaf`
    ranks, each rank with a rail of `uplink_gbps` between the nodes, so that a node has that many in parallel."""

    ONE_SWITCH = "one_switch"
    LEAF_SPINE = "leaf_spine"
    RAILS = "rails"


@dataclass(frozen=True)
class NetworkSpec:
    """None means: the calibration's figure; for `switch_port_gbps`, the rank's port. Bandwidths in GB/s, one direction.

    `planes`: switches of each role, each serving a share of every microbatch. `dual_role`: a switch plays both roles for
    its share, so that its port is used in both directions. `local_bypass`: rows for experts of the owner stay at home.
    """

    switch: SwitchKind = SwitchKind.REAL
    forwarding: Forwarding = Forwarding.CUT_THROUGH
    port_gbps: float | None = None
    switch_port_gbps: float | None = None
    latency_us: float | None = None
    packet_bytes: int = 4096
    packet_header_bytes: int = 0
    planes: int = 1
    dual_role: bool = False
    local_bypass: bool = False
    dispatch_wire: Wire = Wire.BF16
    combine_wire: Wire = Wire.BF16
    switch_memory_mib: float | None = None
    topology: TopologyKind = TopologyKind.ONE_SWITCH
    ranks_per_leaf: int = 0
    uplink_gbps: float | None = None
    uplink_latency_us: float | None = None


@dataclass(frozen=True)
class Scenario:
    """One layer. Symbols as in `config.py`; `shape` is the model's, before `replicas`. Without `edge_tokens` all microbatches
    but the last have m_b.
    """

    name: str = "scenario"
    shape: LayerShape = OLMOE_1B_7B
    replicas: int = 1
    num_ranks: int = 4
    implementation: Implementation = Implementation.MEGAKERNEL_INC
    communication_model: CommunicationModel | None = None
    tokens_per_rank: int = 4096
    microbatch_tokens: int = 512
    edge_tokens: int = 0
    depth: int = 5
    ranks_per_phase: int = 1
    barrier_after_dispatch: bool = True
    network: NetworkSpec = field(default_factory=NetworkSpec)
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    placement: str = "simulated"

    @property
    def fused(self) -> bool:
        return self.implementation is not Implementation.BASELINE

    @cached_property
    def model(self) -> CommunicationModel:
        return self.communication_model or MODEL_OF[self.implementation]

    @cached_property
    def placed_shape(self) -> LayerShape:
        """The shape whose experts are the placed copies."""
        return with_replicas(self.shape, self.replicas)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The Baseline takes the whole batch at once: one microbatch, one slot set."""
        if not self.fused:
            return Pipeline(self.tokens_per_rank, self.tokens_per_rank, 1, self.ranks_per_phase)
        return Pipeline(
            self.tokens_per_rank,
            min(self.microbatch_tokens, self.tokens_per_rank),
            self.depth,
            self.ranks_per_phase,
            self.barrier_after_dispatch,
            edge_tokens=self.edge_tokens or None,
        )

    @cached_property
    def world(self) -> World:
        return World(self.num_ranks, self.network.planes, self.network.planes)

    @cached_property
    def layout(self) -> HeapLayout:
        return HeapLayout(Dims.of(self.model, self.world, self.placed_shape, self.pipeline))

    @property
    def ranks_per_leaf(self) -> int:
        return self.num_ranks if self.network.topology is TopologyKind.ONE_SWITCH else self.network.ranks_per_leaf

    @property
    def num_leaves(self) -> int:
        return -(-self.num_ranks // self.ranks_per_leaf)

    def switch_row_bytes(self) -> int:
        """Bytes of token rows that the larger of the two switches of a plane holds; both when it plays both roles."""
        sizes = [self.layout.row_bytes(role) for role in (Role.DISPATCH_SWITCH, Role.COMBINE_SWITCH)]
        return sum(sizes) if self.network.dual_role else max(sizes)

    def with_network(self, **changes: object) -> Scenario:
        return replace(self, network=replace(self.network, **changes))  # type: ignore[arg-type]

    def check(self) -> None:
        """Refuse a scenario that contradicts itself. Raises ConfigurationError: `key = value: limit. Remedy`."""
        net = self.network
        shape = self.shape
        for key in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
            require(getattr(shape, key) >= 1, key, getattr(shape, key), "at least 1", "Give the sizes of a model.")
        for key in ("replicas", "num_ranks", "tokens_per_rank", "microbatch_tokens", "depth", "ranks_per_phase"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1", "Give a count.")
        require(self.num_ranks <= MAX_RANKS, "num_ranks", self.num_ranks, f"at most {MAX_RANKS}", "More was never tried.")
        require(net.planes >= 1, "planes", net.planes, "at least 1", "Use one switch per role.")
        for key in ("port_gbps", "switch_port_gbps", "uplink_gbps", "switch_memory_mib"):
            value = getattr(net, key)
            fits = value is None or (value > 0 and math.isfinite(value))
            require(fits, key, value, "above 0, and finite", "Give a real link or memory, or drop the line.")
        for key in ("latency_us", "uplink_latency_us", "packet_header_bytes"):
            value = getattr(net, key)
            fits = value is None or (value >= 0 and math.isfinite(value))
            require(fits, key, value, "0 or more, and finite", "Correct it, or drop the line.")
        require(net.packet_bytes >= 1, "packet_bytes", net.packet_bytes, "at least 1", "Give the payload of a packet.")
        limit = f"between 1 and num_ranks = {self.num_ranks}"
        require(self.ranks_per_phase <= self.num_ranks, "ranks_per_phase", self.ranks_per_phase, limit, "Lower G.")
        limit = f"at most num_experts = {self.shape.num_experts}"
        require(self.shape.top_k <= self.shape.num_experts, "top_k", self.shape.top_k, limit, "Lower k.")
        placed = self.placed_shape.num_experts
        copies = -(-self.num_ranks // self.shape.num_experts)
        remedy = f"Lower num_ranks, or set replicas = {copies} so that every rank holds an expert."
        require(self.num_ranks <= placed, "num_ranks", self.num_ranks, f"at most num_experts * replicas = {placed}", remedy)
        check(self.placed_shape, self.pipeline, self.num_ranks)
        self._check_topology()
        self._check_routing()
        if net.switch_memory_mib is not None:
            need = self.switch_row_bytes() / 2**20
            smaller = "microbatch_tokens, or more planes" if self.model.phased else "microbatch_tokens, or a phased form"
            remedy = f"Lower ranks_per_phase or {smaller}." if self.model.phased else f"Use a smaller {smaller}."
            limit = f"at least the {need:.3g} MiB that one phase of this scenario holds"
            require(net.switch_memory_mib >= need, "switch_memory_mib", net.switch_memory_mib, limit, remedy)

    def _check_topology(self) -> None:
        net = self.network
        if net.topology is TopologyKind.ONE_SWITCH:
            for key in ("ranks_per_leaf", "uplink_gbps", "uplink_latency_us"):
                value = getattr(net, key)
                require(not value, key, value, "left out with one switch", "Add kind = \"leaf_spine\" or \"rails\", or drop it.")
            return
        kind, both = net.topology.value, net.ranks_per_leaf and net.uplink_gbps is not None
        require(bool(both), "topology.kind", kind, "given with ranks_per_leaf and uplink_gbps", "Add both, or use one_switch.")
        inside = f"a divisor of num_ranks = {self.num_ranks}, and smaller"
        divides = 1 <= net.ranks_per_leaf < self.num_ranks and self.num_ranks % net.ranks_per_leaf == 0
        require(divides, "ranks_per_leaf", net.ranks_per_leaf, inside, "Use full leaves, or topology kind one_switch.")
        real = net.switch is SwitchKind.REAL
        require(real, "switch", net.switch.value, "real in two levels", "An emulated switch has one level.")
        require(net.planes == 1, "planes", net.planes, "1 in two levels", "Fold the planes into uplink_gbps.")

    def _check_routing(self) -> None:
        spec = self.routing
        recorded = spec.kind is RoutingKind.RECORDED
        key, value = ("routing.kind", spec.kind.value) if recorded else ("trace", spec.trace)
        limit = "given with trace, a file of expert ids" if recorded else "left out unless the kind is recorded"
        require(recorded == (spec.trace is not None), key, value, limit, "See inc simulate --example.")
        require(0 < spec.hot_factor <= 1e6, "hot_factor", spec.hot_factor, "above 0, up to 1e6", "1 is uniform.")
        require(0 <= spec.exponent <= 100, "exponent", spec.exponent, "between 0 and 100", "0 is uniform.")
        require(spec.seed >= 0, "seed", spec.seed, "0 or more", "Give another.")
        phased_bypass = self.network.local_bypass and not self.model.selective
        require(not phased_bypass, "local_bypass", True, "false for all-gather forms", "Their rows go to every rank.")


def require(condition: bool, key: str, value: object, limit: str, remedy: str) -> None:
    """Raise ConfigurationError unless `condition`: `key = value: it must be limit. Remedy`."""
    if not condition:
        raise ConfigurationError(f"{key} = {value}: it must be {limit}. {remedy}")
