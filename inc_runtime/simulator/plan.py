"""A scenario on a calibration: the numbers that the event mode and the fast mode share, so that they can only agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from inc_runtime.config import LayerShape
from inc_runtime.simulator.calibration import Calibration
from inc_runtime.simulator.scenario import Forwarding, Scenario, SwitchKind, TopologyKind
from inc_runtime.simulator.traffic import (
    MicrobatchLoads,
    RoutingKind,
    RoutingSpec,
    draw_experts,
    load_trace,
    loads_of,
    popularity,
)
from inc_runtime.simulator.unit_costs import UnitCosts


@dataclass(frozen=True)
class LayerPlan:
    """`machine`: the calibration of a whole device; `share`: what one rank has of it. Times in us, bandwidths in bytes/us."""

    scenario: Scenario
    machine: Calibration

    @cached_property
    def share(self) -> Calibration:
        share = self.machine.on_placement(self.scenario.placement, self.scenario.num_ranks)
        given = self.scenario.network.port_gbps
        own = share.port_gbps * (share.relay_efficiency if self.relayed else 1.0)
        # Pacing on a machine that is there slows a port, and never makes it faster.
        port = own if given is None else given if self.scenario.placement == "simulated" else min(given, own)
        return replace(share, port_gbps=port)

    @cached_property
    def relayed(self) -> bool:
        """Whether a plain form sends through relays that are PEs: where they share devices, as a library's ranks cannot."""
        return not self.scenario.model.in_network and self.scenario.placement in ("scale_model", "shared")

    @cached_property
    def real(self) -> bool:
        return self.scenario.network.switch is SwitchKind.REAL

    @cached_property
    def cut_through(self) -> bool:
        return self.scenario.network.forwarding is Forwarding.CUT_THROUGH

    @cached_property
    def leg_us(self) -> float:
        """One leg: half of the way from rank to rank through a real switch; the way to the PE of an emulated one."""
        given = self.scenario.network.latency_us
        latency = self.machine.latency_us if given is None else given
        return latency / 2 if self.real else latency

    @cached_property
    def row_leg_us(self) -> float:
        """One leg of rows: a relay that is a PE takes time for them that control words do not need."""
        return self.leg_us + (self.machine.relay_us / 2 if self.relayed else 0.0)

    @cached_property
    def uplink_us(self) -> float:
        """Latency between a leaf and the spine; that of a leg unless given."""
        given = self.scenario.network.uplink_latency_us
        return self.leg_us if given is None else given

    @cached_property
    def port(self) -> float:
        """Bytes per us of a rank's port, each direction, packet headers taken off."""
        return self.share.port_gbps * 1e3 * self._payload_share

    @cached_property
    def switch_port(self) -> float:
        """Bytes per us of one emulated switch PE's port: a rank's, or a whole device's where ranks have a share of one."""
        given = self.scenario.network.switch_port_gbps
        default = self.machine.port_gbps if self.scenario.placement == "scale_model" else self.share.port_gbps
        return (default if given is None else given) * 1e3 * self._payload_share

    @cached_property
    def uplink(self) -> float:
        """Bytes per us between one leaf and the spine: one link, or a rail per rank."""
        net = self.scenario.network
        lanes = net.ranks_per_leaf if net.topology is TopologyKind.RAILS else 1
        return (net.uplink_gbps or 1.0) * lanes * 1e3 * self._payload_share

    @property
    def _payload_share(self) -> float:
        net = self.scenario.network
        return net.packet_bytes / (net.packet_bytes + net.packet_header_bytes)

    @cached_property
    def packet_us(self) -> float:
        """Time of one packet on a rank's port: what cut-through waits before it forwards."""
        return self.scenario.network.packet_bytes / self.port

    @cached_property
    def record_bytes(self) -> int:
        return self.scenario.layout.dims.routing_dtype.itemsize

    @cached_property
    def dispatch_row_bytes(self) -> int:
        return self.scenario.network.dispatch_wire.row_bytes(self.scenario.shape.hidden_size)

    @cached_property
    def combine_row_bytes(self) -> int:
        return self.scenario.network.combine_wire.row_bytes(self.scenario.shape.hidden_size)

    @cached_property
    def shape(self) -> LayerShape:
        return self.scenario.placed_shape

    @cached_property
    def costs(self) -> UnitCosts:
        """Costs on one rank. The fused plain forms give SMs to their transfers, the INC forms and the library do not."""
        scenario, multicast = self.scenario, self.scenario.model.in_network
        reserved = self.machine.communication_sms / self.machine.total_sms if scenario.fused and not multicast else 0.0
        library = not self.relayed
        return UnitCosts(self.shape, self.share, scenario.fused, self.mean_copies, reserved, multicast, library)

    @cached_property
    def switch_costs(self) -> UnitCosts:
        return UnitCosts(self.shape, self.machine)

    @cached_property
    def weights(self) -> np.ndarray:
        return popularity(self.scenario.routing, self.scenario.shape, self.scenario.num_ranks)

    @property
    def mean_copies(self) -> float:
        """Distinct ranks of a token, from a sample: d."""
        scenario = self.scenario
        return _mean_copies(self.shape, scenario.num_ranks, scenario.routing, scenario.replicas, scenario.model.selective, self)

    @property
    def num_microbatches(self) -> int:
        return self.scenario.pipeline.num_microbatches

    def tokens_of(self, number: int) -> int:
        """Tokens of each rank in microbatch `number`, from 0."""
        tokens = self.scenario.pipeline.tokens_of(number)
        return tokens.stop - tokens.start

    def experts_of(self, number: int) -> np.ndarray:
        """Placed experts of microbatch `number`: [W, n, k] int32."""
        return self._experts(number, self.scenario.num_ranks, self.tokens_of(number))

    def sample_experts(self, num_ranks: int, num_tokens: int) -> np.ndarray:
        """Tokens of no microbatch, to estimate rates from: [num_ranks, num_tokens, k] int32."""
        return self._experts(-1, num_ranks, num_tokens)

    def _experts(self, number: int, num_ranks: int, num_tokens: int) -> np.ndarray:
        scenario, spec = self.scenario, self.scenario.routing
        rng = np.random.default_rng((spec.seed, number + 1))
        total = num_ranks * num_tokens
        if spec.kind is RoutingKind.RECORDED:
            assert spec.trace is not None
            trace = load_trace(spec.trace, scenario.shape)
            ids = trace[(max(number, 0) * total + np.arange(total)) % len(trace)]
        else:
            ids = draw_experts(rng, self.weights, total, scenario.shape.top_k)
        if scenario.replicas > 1:
            # Tokens take turns over the copies; -1 stays -1.
            turn = (np.arange(total)[:, None] + np.arange(ids.shape[1])) % scenario.replicas
            ids = np.where(ids < 0, ids, ids * scenario.replicas + turn).astype(np.int32)
        return ids.reshape(num_ranks, num_tokens, -1)

    def plane_tokens(self, number: int) -> list[int]:
        """Tokens of a rank in microbatch `number` that each plane serves: contiguous runs of equal capacity."""
        tokens, capacity = self.tokens_of(number), self.scenario.layout.dims.dispatch_plane_tokens
        return [min(max(tokens - plane * capacity, 0), capacity) for plane in range(self.scenario.network.planes)]

    def loads(self, number: int, expert_ids: np.ndarray | None = None) -> MicrobatchLoads:
        """Loads of microbatch `number`, drawn."""
        scenario = self.scenario
        return loads_of(
            self.experts_of(number) if expert_ids is None else expert_ids,
            self.shape,
            scenario.num_ranks,
            selective=scenario.model.selective,
            tile_rows=self.machine.tile_rows,
            ranks_per_leaf=scenario.ranks_per_leaf,
            plane_tokens=self.plane_tokens(number),
        )


_copies: dict[tuple, float] = {}


def _mean_copies(
    shape: LayerShape, num_ranks: int, routing: RoutingSpec, replicas: int, selective: bool, plan: LayerPlan
) -> float:
    key = (shape, num_ranks, routing, replicas, selective)
    if key not in _copies:
        ids = plan.sample_experts(1, 2048)
        loads = loads_of(ids, shape, num_ranks, selective=selective, tile_rows=1, ranks_per_leaf=num_ranks)
        _copies[key] = float(loads.received.sum() / ids.shape[1])
    return _copies[key]
