"""Checks of the Baseline on GPUs, through the public layer: `torchrun --nproc-per-node 2 -m tests.gpu.baseline_program`.

Against float64 with uneven and empty ranks, all tokens on one rank, given experts with gaps and repeats, odd shapes and routers;
bounded and counted exchanges, eager and captured calls bit by bit; what is refused. One rank per GPU, any number of ranks.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from inc_runtime.config import OLMOE_1B_7B, Implementation, LayerShape, Pipeline, Router, RowFormat
from inc_runtime.errors import ConfigurationError
from inc_runtime.routing import route
from megakernel.checkpoint import ExpertWeights
from megakernel.launch_baseline import GpuKernels
from megakernel.library_exchange import Counting
from megakernel.moe_layer import MoELayer
from megakernel.reference import bf16_bound, route_reference
from megakernel.workload import Routing
from results.layer_cases import BASELINE_SUM_ROUNDINGS, SHAPES, Case, Experts, Inputs
from results.layer_rivals import captured, make_baseline
from results.layer_timing import Ranks

ODD = LayerShape(num_experts=9, top_k=3, hidden_size=1032, intermediate_size=136)
BIASED = LayerShape(100, 6, 512, 256, Router.SIGMOID, renormalize=True)
BOUND = 1536


def all_ranks() -> Ranks:
    return Ranks(None, dist.get_rank(), dist.get_world_size())


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def tokens_of(rank: int, pattern: tuple[int, ...]) -> int:
    return pattern[rank % len(pattern)]


def compare(name: str, experts: Experts, hidden: torch.Tensor, ids: np.ndarray, weights: np.ndarray, out: torch.Tensor) -> None:
    error, bound = 0.0, bf16_bound(max(len(out), 1), experts.shape, sum_roundings=BASELINE_SUM_ROUNDINGS)
    if len(out):
        expected = experts.float64_layer(hidden, ids, weights)
        error = float((out.double() - expected).norm() / expected.norm()) if expected.any() else float(out.abs().max())
    [worst] = all_ranks().reduce([error if bool(torch.isfinite(out).all()) else torch.inf])
    say(f"{name}: error {worst:.2e}, bound {bound:.2e}")
    assert worst <= bound, name


def check_layer(name: str, shape: LayerShape, pattern: tuple[int, ...], push: int = 0, bias: bool = False) -> None:
    """Logits of scale 1; `push`: how many of the first experts get all tokens."""
    rank = dist.get_rank()
    experts, generator = Experts(shape), torch.Generator(device="cuda").manual_seed(rank)
    on_bias = torch.randn(shape.num_experts, generator=torch.Generator().manual_seed(5)) if bias else None
    layer = MoELayer(shape, Pipeline(BOUND, BOUND), Implementation.BASELINE, None, experts.own(all_ranks()), bias=on_bias)
    count = tokens_of(rank, pattern)
    for _ in range(3):  # memory of the call before must not shine through
        hidden = torch.randn(count, shape.hidden_size, generator=generator, device="cuda").bfloat16()
        logits = torch.randn(count, shape.num_experts, generator=generator, device="cuda")
        logits[:, :push] += 100.0
        out = layer(hidden, logits, out=torch.full_like(hidden, torch.nan))
    torch.cuda.synchronize()
    layer.raise_on_error()
    ids, weights = route_reference(logits, shape, on_bias)
    of_runtime = route(logits.cpu().numpy(), shape, None if on_bias is None else on_bias.numpy())
    assert np.array_equal(layer.gpu.baseline.expert_ids[:count].cpu().numpy(), of_runtime[0]), name
    np.testing.assert_allclose(layer.gpu.baseline.weights[:count].cpu().numpy(), of_runtime[1], rtol=3e-6, atol=1e-37)
    compare(name, experts, hidden, ids, weights, out)


def check_given(shape: LayerShape) -> None:
    rank, rng, experts = dist.get_rank(), np.random.default_rng(dist.get_rank()), Experts(shape)
    layer = MoELayer(shape, Pipeline(BOUND, BOUND), Implementation.BASELINE, None, experts.own(all_ranks()))
    ids = rng.integers(-1, shape.num_experts, (700 + rank, shape.top_k))
    ids[0], ids[1] = -1, 5  # a token of nobody, one expert k times
    weights = rng.random(ids.shape, np.float32)
    hidden = torch.randn(len(ids), shape.hidden_size, device="cuda").bfloat16()
    given = {"expert_ids": torch.from_numpy(ids).cuda(), "weights": torch.from_numpy(weights).cuda()}
    out = layer(hidden, **given, bound_tokens=800)
    assert not out[0].any()
    compare("given experts", experts, hidden, ids, np.where(ids < 0, 0, weights).astype(np.float64), out)


def check_bits() -> None:
    """Bounded and counted exchanges, eager and captured calls give the same bits, 20 times."""
    case, experts = Case("olmoe", 1024, Routing.ZIPF), Experts(OLMOE_1B_7B)
    ranks, kernels = all_ranks(), GpuKernels()
    inputs = Inputs(case, experts, ranks)
    bounded, counted = (make_baseline(case, ranks, experts, kernels, counting) for counting in Counting)
    bounded(inputs.hidden, inputs.logits, out=inputs.out)
    expected = inputs.out.clone()
    runs = {
        "counted": lambda: counted(inputs.hidden, inputs.logits, out=inputs.out),
        "captured": captured(lambda: bounded(inputs.hidden, inputs.logits, out=inputs.out)),
    }
    for name, run in runs.items():
        for _ in range(20):
            inputs.out.fill_(torch.nan)
            run()
            assert torch.equal(inputs.out, expected), name
        say(f"{name}: 20 runs, the bits of the bounded exchange")


def check_layer_after_layer() -> None:
    """Layers of growing size, each captured and dropped: the memory of one serves the next."""
    experts = Experts(OLMOE_1B_7B)
    for count in (512, 1024, 2048, 3072):
        inputs, kernels = Inputs(Case("olmoe", count, Routing.UNIFORM), experts, all_ranks()), GpuKernels()
        layer = make_baseline(inputs.case, all_ranks(), experts, kernels, Counting.BOUNDED)
        run = captured(lambda layer=layer, inputs=inputs: layer(inputs.hidden, inputs.logits, out=inputs.out))
        say(f"after another layer, {count} tokens: error {inputs.check('captured', run):.2e}")
        del layer, run
        torch.cuda.empty_cache()


def check_refusals() -> None:
    shape = ODD
    own = Experts(shape).own(all_ranks())
    pipeline = Pipeline(16, 16)

    def made(pipeline=pipeline, experts=own, **more):
        return MoELayer(shape, pipeline, Implementation.BASELINE, None, experts, **more)

    layer = made()
    hidden, logits = torch.ones(4, 1032, device="cuda").bfloat16(), torch.zeros(4, 9, device="cuda")
    ids = torch.zeros(4, 3, dtype=torch.int64, device="cuda")
    refused = {
        "expected bfloat16": lambda: layer(hidden.float(), logits),
        "hidden_states is on cpu": lambda: layer(hidden.cpu(), logits),
        "not contiguous": lambda: layer(torch.ones(1032, 4, device="cuda").bfloat16().T, logits),
        "has shape": lambda: layer(hidden, logits[:, :4].contiguous()),
        "16 bytes": lambda: layer(torch.ones(4 * 1032 + 1, device="cuda").bfloat16()[1:].view(4, 1032), logits),
        "at most bound_tokens": lambda: layer(hidden.repeat(5, 1), logits.repeat(5, 1)),
        "between 1 and": lambda: layer(hidden, logits, bound_tokens=17),
        "not both": lambda: layer(hidden, logits, expert_ids=ids, weights=ids.float()),
        "weights is int64": lambda: layer(hidden, expert_ids=ids, weights=ids),
        "out has shape": lambda: layer(hidden, logits, out=hidden[:3]),
        "row_format": lambda: made(Pipeline(16, 16, row_format=RowFormat.FLOAT32)),
        "experts.gate_up is float32": lambda: made(experts=ExpertWeights(own.experts, own.gate_up.float(), own.down)),
        "experts.down is on cpu": lambda: made(experts=ExpertWeights(own.experts, own.gate_up, own.down.cpu())),
    }
    for words, call in refused.items():
        with pytest.raises(ConfigurationError, match=words):
            call()
    layer(hidden, torch.full_like(logits, torch.nan))
    torch.cuda.synchronize()
    with pytest.raises(ConfigurationError, match="not finite"):
        layer(hidden, logits)
    layer(hidden, logits)
    say(f"{len(refused) + 1} refusals")


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    check_layer("olmoe", OLMOE_1B_7B, (BOUND,))
    check_layer("olmoe, uneven", OLMOE_1B_7B, (513, 37))
    check_layer("olmoe, an empty rank", OLMOE_1B_7B, (0, 300))
    check_layer("olmoe, no token at all", OLMOE_1B_7B, (0,))
    check_layer("olmoe, all on one rank", OLMOE_1B_7B, (BOUND, 200), push=8)
    check_layer("olmoe, all on one expert", OLMOE_1B_7B, (900, 200), push=1)
    check_layer("qwen3", SHAPES["qwen3"], (777, BOUND))
    check_layer("odd shape", ODD, (BOUND, 7))
    check_layer("sigmoid with bias", BIASED, (640, BOUND), bias=True)
    check_given(OLMOE_1B_7B)
    check_bits()
    check_layer_after_layer()
    check_refusals()
    say("baseline_program: all passed")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
