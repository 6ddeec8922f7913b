"""The Baseline's kernels on a CPU, lane by lane, against the float64 reference and the routing of the runtime.

What a GPU adds (the products, the library's collectives, speed) is checked by results/measure_moe_layer.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inc_runtime.config import LayerShape, Router
from inc_runtime.errors import ConfigurationError
from inc_runtime.routing import route
from megakernel.reference import bf16_bound, moe_layer_reference, relative_error, route_reference
from megakernel.workload import RandomWorkload
from tests.gpu.emulated_kernels import EmulatedKernels, compiler, run_ranks, tensor_at

pytestmark = pytest.mark.skipif(compiler() is None, reason="g++ is not installed: the kernels cannot be emulated here")
SHAPE = LayerShape(num_experts=9, top_k=3, hidden_size=328, intermediate_size=24)
BOUND = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("emulated")


def tokens(count: int, shape: LayerShape, seed: int) -> torch.Tensor:
    return torch.randn(count, shape.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(outputs: list[torch.Tensor], calls: list[dict], shape: LayerShape, choices: list[tuple]) -> None:
    """Compare one call of all ranks with the reference; `choices`: ids and weights of each rank."""
    workload = RandomWorkload(shape)
    for out, call, (ids, weights) in zip(outputs, calls, choices, strict=True):
        if not len(out):
            continue
        def weights_of(expert):
            loaded = workload.experts(range(expert, expert + 1))
            return loaded.gate_up[0].double().numpy(), loaded.down[0].double().numpy()

        expected = moe_layer_reference(call["hidden_states"], ids, weights, weights_of, num_experts=shape.num_experts)
        # Baseline stores bfloat16 after both products too: three more roundings than the bound counts.
        assert relative_error(out.float(), expected) < 2.0 * bf16_bound(len(out), shape)


@pytest.mark.parametrize("counts", [(40, 40), (40, 0), (7, 33, 1), (1,)], ids=str)
@pytest.mark.parametrize("routing", ["uniform", "one rank", "one expert"])
def test_the_layer_equals_the_reference(folder, counts, routing):
    logits = [torch.randn(n, SHAPE.num_experts, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(counts)]
    for part in logits:
        if routing != "uniform":
            part[:, : SHAPE.top_k if routing == "one rank" else 1] += 100.0
    calls = [{"hidden_states": tokens(n, SHAPE, 10 + i), "router_logits": logits[i]} for i, n in enumerate(counts)]
    outputs = run_ranks(folder, SHAPE, BOUND, RandomWorkload(SHAPE).experts, [[call, call] for call in calls])
    choices = [route_reference(call["router_logits"], SHAPE) for call in calls]
    check([out[1] for out in outputs], calls, SHAPE, choices)
    for first, second in outputs:
        assert torch.equal(first, second)


def test_given_experts_with_gaps_repeats_and_a_smaller_bound(folder):
    rng, calls, choices = np.random.default_rng(0), [], []
    for rank, count in enumerate((20, 13)):
        ids = rng.integers(-1, SHAPE.num_experts, (count, SHAPE.top_k)).astype(np.int32)
        ids[0], ids[1] = -1, 4  # a token of nobody, one expert three times
        weights = rng.random(ids.shape, np.float32)
        calls.append({"hidden_states": tokens(count, SHAPE, rank), "expert_ids": torch.from_numpy(ids),
                      "weights": torch.from_numpy(weights), "bound_tokens": 20})
        choices.append((ids, np.where(ids < 0, 0, weights)))
    outputs = [out[0] for out in run_ranks(folder, SHAPE, BOUND, RandomWorkload(SHAPE).experts, [[call] for call in calls])]
    check(outputs, calls, SHAPE, choices)
    assert not outputs[0][0].any()


ROUTERS = [
    (LayerShape(64, 8, 8, 8), False),
    (LayerShape(64, 8, 8, 8, renormalize=True), False),
    (LayerShape(8, 2, 8, 8), False),
    (LayerShape(128, 8, 8, 8, Router.SIGMOID, True), True),
    (LayerShape(256, 8, 8, 8, Router.SIGMOID), False),
    (LayerShape(5, 5, 8, 8), False),
    (LayerShape(100, 32, 8, 8, Router.SIGMOID, True), True),
    (LayerShape(40, 20, 8, 8, renormalize=True), False),
]


@pytest.mark.parametrize(("shape", "biased"), ROUTERS, ids=str)
def test_experts_and_weights_are_those_of_the_runtime(folder, shape, biased):
    rng = np.random.default_rng(shape.num_experts)
    logits = rng.standard_normal((50, shape.num_experts)).astype(np.float32)
    logits[:20] = rng.integers(-2, 3, logits[:20].shape)  # ties
    logits[20] = 0.0
    logits[21] = -0.0
    logits[21, ::2] = 0.0
    logits[22] *= 50.0
    bias = rng.standard_normal(shape.num_experts).astype(np.float32) if biased else None
    calls = [[{"hidden_states": tokens(50, shape, 0), "router_logits": torch.from_numpy(logits)}]]
    seen = {}

    class Noted(EmulatedKernels):
        def launch(self, name, arguments, num_rows=None):
            super().launch(name, arguments, num_rows)
            if name.startswith("route"):
                for field, dtype in (("expert_ids", torch.int32), ("weights", torch.float32)):
                    seen[field] = tensor_at(arguments[field], (50, shape.top_k), dtype).clone().numpy()

    import tests.gpu.emulated_kernels as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EmulatedKernels", Noted)
        experts = RandomWorkload(shape).experts
        run_ranks(folder, shape, 50, experts, calls, None if bias is None else torch.from_numpy(bias))
    ids, weights = route(logits, shape, bias)
    assert np.array_equal(seen["expert_ids"], ids)
    np.testing.assert_allclose(seen["weights"], weights, rtol=2e-6, atol=1e-38)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"router_logits": torch.full((3, 9), float("nan"))}, "not finite"),
        ({"expert_ids": torch.full((3, 3), 9, dtype=torch.int32), "weights": torch.ones(3, 3)}, "does not exist"),
        ({"expert_ids": torch.zeros(3, 3, dtype=torch.int32), "weights": torch.full((3, 3), torch.inf)}, "not finite"),
    ],
)
def test_what_only_the_gpu_sees_is_reported(folder, call, words):
    calls = [[{"hidden_states": tokens(3, SHAPE, 0), **call}]]
    with pytest.raises(ConfigurationError, match=words):
        run_ranks(folder, SHAPE, BOUND, RandomWorkload(SHAPE).experts, calls)


def test_shapes_that_the_kernels_cannot_do_are_refused(folder):
    wide = LayerShape(num_experts=512, top_k=8, hidden_size=16, intermediate_size=8)
    with pytest.raises(ConfigurationError, match="256 at most"):
        run_ranks(folder, wide, 4, RandomWorkload(wide).experts, [[]])
