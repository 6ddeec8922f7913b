"""What each stage of the Baseline needs at least: bytes or operations at ceilings that are measured in the same run.

A floor is the larger of bytes over the copy rate and operations over the rate of a dense product, plus one launch; of a
collective, bytes that leave or reach this rank over the link's rate, plus the same collective with one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megakernel import stages
from megakernel.baseline_arguments import record_bytes
from megakernel.gpu_baseline import GpuBaseline
from results.layer_timing import Ranks, time_interleaved

COPY_BYTES, LINK_BYTES, MATRIX = 1 << 30, 1 << 28, 8192
COLLECTIVES = (stages.DISPATCH.name, stages.COMBINE.name)


@dataclass(frozen=True)
class Ceilings:
    """Rates in units a microsecond, times in microseconds."""

    bytes_per_us: float
    operations_per_us: float
    link_bytes_per_us: float
    launch_us: float
    collective_us: dict[str, float]


def measure_ceilings(ranks: Ranks, layer: GpuBaseline, repeats: int = 11) -> Ceilings:
    """The machine's ceilings; the slowest rank's. Collective. The link is measured in both directions at once."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    peer = torch.device("cuda", (torch.cuda.current_device() + 1) % max(torch.cuda.device_count(), 1))
    there, here = torch.empty(LINK_BYTES, dtype=torch.uint8, device=peer), source[:LINK_BYTES]
    exchange = layer.exchange
    times = time_interleaved(
        ranks,
        {
            "copy": lambda: target.copy_(source),
            "product": lambda: torch.mm(left, right, out=product),
            "link": lambda: there.copy_(here),
            "launch": lambda: layer.kernels.launch("do_nothing", layer.arguments),
            stages.DISPATCH.name: lambda: exchange.dispatch(layer.arguments, 1),
            stages.COMBINE.name: lambda: exchange.combine(1),
        },
        repeats,
    )
    return Ceilings(
        2 * COPY_BYTES / times["copy"],
        2.0 * MATRIX**3 / times["product"],
        LINK_BYTES / times["link"],
        times["launch"],
        {name: times[name] for name in COLLECTIVES},
    )


def stage_floors(ranks: Ranks, layer: GpuBaseline, num_tokens: int, ceilings: Ceilings) -> dict[str, float]:
    """Microseconds by stage, of the rank that has most to do, for the routing of the last call. Collective."""
    shape, exchange, a = layer.shape, layer.exchange, layer.arguments
    row, packet, record = 2 * shape.hidden_size, int(a["row_stride"]), record_bytes(shape.top_k)
    torch.cuda.synchronize()
    sent = exchange.sent_counts.tolist()
    received = [int(counts[exchange.rank]) for counts in ranks.gather(exchange.sent_counts)]
    remote = max(sum(counts) - counts[exchange.rank] for counts in (sent, received))
    rows, pairs, width = sum(received), int(layer.expert_ends[-1]), shape.intermediate_size
    weights = 2 * shape.hidden_size * width * int(a["num_local_experts"])  # bytes of one matrix of each expert
    num_bytes = {
        stages.ROUTE.name: num_tokens * (4 * shape.num_experts + record),
        stages.PACK.name: num_tokens * (row + record + 4 * exchange.num_ranks) + sum(sent) * packet,
        stages.GROUP.name: rows * (packet + 4 * shape.top_k) + pairs * row,
        stages.MATMUL_GATE_UP.name: pairs * (row + 4 * width) + 2 * weights,
        stages.SWIGLU.name: pairs * 6 * width,
        stages.MATMUL_DOWN.name: pairs * (2 * width + row) + weights,
        stages.REDUCE.name: pairs * row + rows * (row + 8 * shape.top_k),
        stages.GLOBAL_REDUCE.name: sum(sent) * row + num_tokens * (row + 4 * exchange.num_ranks),
    }
    operations = {
        stages.MATMUL_GATE_UP.name: 4.0 * pairs * shape.hidden_size * width,
        stages.MATMUL_DOWN.name: 2.0 * pairs * shape.hidden_size * width,
    }
    floors = {
        name: max(size / ceilings.bytes_per_us, operations.get(name, 0.0) / ceilings.operations_per_us) + ceilings.launch_us
        for name, size in num_bytes.items()
    }
    for name, size in zip(COLLECTIVES, (packet, row), strict=True):
        floors[name] = remote * size / ceilings.link_bytes_per_us + ceilings.collective_us[name]
    ordered = [stage.name for stage in stages.TEN_STAGES]
    return dict(zip(ordered, ranks.reduce([floors[name] for name in ordered]), strict=True))
