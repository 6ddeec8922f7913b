"""One MoE layer on the GPUs of a job, for the tests and their timings: its cases, its inputs, and its result in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from inc_runtime.backends.nvshmem import DeviceHeap, NvshmemJob
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, Router, SumOrder
from inc_runtime.device.exchange import stop_switches
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.protocol import Role
from megakernel.launch_megakernel import MegaKernel
from switch_emulator.launch_switch import RunningSwitch

OLMOE = LayerShape(64, 8, 2048, 1024)
SMALL = LayerShape(16, 4, 256, 128)
UNEVEN = LayerShape(18, 3, 512, 384, renormalize=True)
SIGMOID = LayerShape(16, 4, 256, 128, router=Router.SIGMOID, renormalize=True)
LIMIT_S = 60.0
RELATIVE_BOUND = 6e-3
"""Of the norm: bf16 rounds the activation, the expert's output, the partial sum and the sum; 2^-9 / sqrt(3) each, at most."""


@dataclass(frozen=True)
class Case:
    """Calls of one layer. `num_tokens[call][rank]`; `skew`: added to the logits of the first experts."""

    name: str
    shape: LayerShape
    pipeline: Pipeline
    num_tokens: tuple[tuple[int, ...], ...]
    model: CommunicationModel = CommunicationModel.INC_ALL_TO_ALL
    skew: float = 0.0
    masked: bool = False
    repeated: bool = False  # every choice of a token is its first
    copies_rows: bool = False
    rank_port_gbps: float = 0.0
    logits_dtype: torch.dtype = torch.float32


def cases(num_ranks: int, model: CommunicationModel) -> list[Case]:
    uneven = tuple(tuple((5 * call + 3 * rank) % 9 for rank in range(num_ranks)) for call in range(6))
    nobody = ((0,) * num_ranks, (1,) * num_ranks, (0,) * num_ranks, (8,) + (0,) * (num_ranks - 1))
    full = ((1000,) * num_ranks, tuple(1000 - 300 * (rank % 3) for rank in range(num_ranks)))
    chosen = [
        Case("one microbatch, uneven tokens", SMALL, Pipeline(8, 8, 4), uneven),
        Case("nobody has tokens", SMALL, Pipeline(8, 8, 4), nobody),
        Case("many microbatches, experts uneven", UNEVEN, Pipeline(1000, 64, 4), full),
        Case("depth 1", SMALL, Pipeline(100, 16, 1), ((100,) * num_ranks,)),
        Case("depth 2", SMALL, Pipeline(100, 16, 2), ((100,) * num_ranks,)),
        Case("depth 3, rank order", SMALL, Pipeline(1000, 100, 3, sum_order=SumOrder.RANK), full),
        Case("depth 6", SMALL, Pipeline(1000, 50, 6), full),
        Case("sigmoid with bias", SIGMOID, Pipeline(1000, 128, 4), full),
        Case("all tokens to the first experts", SMALL, Pipeline(1000, 250, 4), full, skew=30.0),
        Case("sizes that double from either edge", SMALL, Pipeline(1000, 200, 4, edge_tokens=30), full),
        Case("choices of -1", SMALL, Pipeline(1000, 250, 4), full, masked=True),
        Case("olmoe, logits in bf16", OLMOE, Pipeline(1000, 512, 4), full, logits_dtype=torch.bfloat16),
        Case("one microbatch, many calls", SMALL, Pipeline(40, 40, 4), ((40,) * num_ranks, (7,) * num_ranks) * 20),
        Case("fewer experts than ranks", LayerShape(3, 2, 256, 128), Pipeline(100, 32, 4), ((100,) * num_ranks,)),
        Case("ids that occur twice", LayerShape(8, 6, 256, 128), Pipeline(300, 100, 4), ((300,) * num_ranks,), repeated=True),
        Case("hidden size 768", LayerShape(16, 4, 768, 128), Pipeline(300, 100, 4), ((300,) * num_ranks,)),
        Case("olmoe, one token", OLMOE, Pipeline(1, 1, 4), ((1,) * num_ranks,) * 2),
    ]
    if num_ranks >= 4:
        for text, shape in (("over 64", replace(SIGMOID, num_experts=100)), ("over 128", replace(SMALL, num_experts=200))):
            chosen.append(Case(f"{text} experts", shape, Pipeline(300, 100, 4), ((300,) * num_ranks,)))
    if model.phased:
        groups = [1, 2, num_ranks]
        chosen = [replace(c, pipeline=replace(c.pipeline, ranks_per_phase=groups[i % 3])) for i, c in enumerate(chosen)]
    return [replace(case, model=model) for case in chosen]


class Layer:
    """Weights of all experts from one seed, the same on every rank, and the kernel on this rank's share."""

    def __init__(self, job: NvshmemJob, case: Case, **kernel: object) -> None:
        self.job, self.case, shape = job, case, case.shape
        layout = HeapLayout(Dims.of(case.model, job.world, shape, case.pipeline))
        self.heap = DeviceHeap(job, layout, poison=True)
        if case.rank_port_gbps:
            self.heap.pace_ports(case.rank_port_gbps)
        self.switch = self.kernel = None
        if self.heap.role is not Role.COMPUTE_RANK:
            self.switch = RunningSwitch(self.heap, case.pipeline.sum_order)
            return
        self.device = torch.device("cuda", job.seat.gpu)
        torch.cuda.set_device(self.device)
        draw = torch.Generator(device=self.device).manual_seed(1)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=draw, device=self.device)

        E, H, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
        self.gate_up = (normal(E, 2 * inner, H) * H**-0.5).bfloat16()
        self.down = (normal(E, H, inner) * inner**-0.5).bfloat16()
        self.bias = normal(E) if shape.router is Router.SIGMOID else None
        own = shape.experts_of_rank(job.pe, job.world.num_ranks)
        share = slice(own.start, own.stop)
        self.kernel = MegaKernel(self.heap, shape, case.pipeline, self.gate_up[share].contiguous(), self.down[share].contiguous(),
                                 bias=self.bias, copies_rows=case.copies_rows, **kernel)  # fmt: skip

    def inputs(self, call: int) -> dict[str, torch.Tensor]:
        """Tokens of scale 1 and logits; or, masked, chosen experts with -1 among them."""
        case, shape = self.case, self.case.shape
        draw = torch.Generator(device=self.device).manual_seed(100 * call + self.job.pe)
        n = case.num_tokens[call][self.job.pe]
        tokens = torch.randn(n, shape.hidden_size, generator=draw, device=self.device).bfloat16()
        logits = torch.randn(n, shape.num_experts, generator=draw, device=self.device)
        logits[:, : shape.top_k] += case.skew
        if not case.masked and not case.repeated:
            return {"hidden_states": tokens, "router_logits": logits.to(case.logits_dtype)}
        ids, weights = self.routed(logits)
        if case.repeated:
            ids[:] = ids[:, :1]
            return {"hidden_states": tokens, "expert_ids": ids.int(), "weights": weights.float()}
        ids[torch.rand(ids.shape, generator=draw, device=self.device) < 0.3] = -1
        ids[: n // 10] = -1
        return {"hidden_states": tokens, "expert_ids": ids.int(), "weights": weights.float()}

    def routed(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, logits = self.case.shape, logits.double()
        sigmoid = shape.router is Router.SIGMOID
        scores = logits.sigmoid() if sigmoid else logits.softmax(1)
        choice = scores + self.bias.double() if sigmoid else logits
        ids = choice.argsort(dim=1, descending=True, stable=True)[:, : shape.top_k]
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(1, keepdim=True) if shape.renormalize else weights

    def reference(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """The layer in float64."""
        if "router_logits" in given:
            ids, weights = self.routed(given["router_logits"])
        else:
            ids, weights = given["expert_ids"], given["weights"].double()
        tokens = given["hidden_states"].double()
        out = torch.zeros_like(tokens)
        for expert in range(self.case.shape.num_experts):
            token, column = (ids == expert).nonzero(as_tuple=True)
            if len(token):
                gate, up = (tokens[token] @ self.gate_up[expert].double().T).chunk(2, dim=1)
                product = (torch.nn.functional.silu(gate) * up) @ self.down[expert].double().T
                out.index_add_(0, token, product * weights[token, column, None])
        return out

    def close(self) -> None:
        if self.switch is None:
            stop_switches(self.heap)
        else:
            self.switch.wait(limit_s=LIMIT_S)
        self.job.barrier()
        self.heap.close()
