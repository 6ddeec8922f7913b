"""Link model of the simulated backend: latency, and a bandwidth for each direction of each PE's port.

A transfer occupies the sender's egress, then, one latency later, the receiver's ingress; both queue in the order in
which transfers reach them. The two occupations overlap (cut-through), so that an idle path costs
`latency + bytes / min(bandwidths)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LinkModel:
    """`latency_us` of one way between any two PEs, `port_gbps` of each port and direction in GB/s.

    The defaults are the measured figures of two H200 GPUs: half a signal's round trip, and the bulk-copy peak.
    """

    latency_us: float = 1.23
    port_gbps: float = 362.0
    _egress_free: dict[int, float] = field(default_factory=dict)
    _ingress_free: dict[int, float] = field(default_factory=dict)

    def deliver(self, source: int, target: int, num_bytes: int, now_us: float) -> float:
        """Time in us at which the last byte of a transfer that is issued now has landed."""
        duration = num_bytes / (self.port_gbps * 1e3)
        start = max(now_us, self._egress_free.get(source, 0.0))
        self._egress_free[source] = start + duration
        arrive = max(start + self.latency_us, self._ingress_free.get(target, 0.0))
        self._ingress_free[target] = arrive + duration
        return arrive + duration
