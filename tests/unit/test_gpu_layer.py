"""What the GPU front end refuses before it touches a GPU. The rest: tests/gpu/baseline_program.py."""

from __future__ import annotations

import pytest
import torch

from inc_runtime.config import LayerShape
from inc_runtime.errors import ConfigurationError
from megakernel.baseline_arguments import BaselineError, error_of, packet_bytes
from megakernel.checkpoint import ExpertWeights
from megakernel.gpu_baseline import check_shape
from megakernel.gpu_checks import check_experts, check_tensor

CPU = torch.device("cpu")
SHAPE = LayerShape(num_experts=4, top_k=2, hidden_size=16, intermediate_size=8)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, 16, device="meta", dtype=torch.bfloat16), "x is on meta, expected cpu"),
        (torch.zeros(2, 16), "x is float32, expected bfloat16"),
        (torch.zeros(2, 8, dtype=torch.bfloat16), r"x has shape \[2, 8\], expected \[2, 16\]"),
        (torch.zeros(16, 2, dtype=torch.bfloat16).T, "x is not contiguous"),
        (torch.zeros(33, dtype=torch.bfloat16)[1:].view(2, 16), "multiple of 16 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_that_kernels_cannot_read_is_refused(tensor, words):
    with pytest.raises(ConfigurationError, match=words):
        check_tensor("x", tensor, CPU, (torch.bfloat16,), (2, 16))


def test_experts_of_another_rank_or_shape_are_refused():
    own = range(2, 4)
    gate_up, down = torch.zeros(2, 16, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 8, dtype=torch.bfloat16)
    check_experts(ExpertWeights(own, gate_up, down), SHAPE, own)
    with pytest.raises(ConfigurationError, match="experts are 0 to 1, expected 2 to 3"):
        check_experts(ExpertWeights(range(2), gate_up, down), SHAPE, own)
    with pytest.raises(ConfigurationError, match=r"experts\.down has shape"):
        check_experts(ExpertWeights(own, gate_up, down[:, :8]), SHAPE, own)


@pytest.mark.parametrize(
    ("shape", "ranks", "words"),
    [
        (LayerShape(257, 2, 16, 8), 2, "num_experts = 257"),
        (LayerShape(64, 33, 16, 8), 2, "top_k = 33"),
        (LayerShape(64, 8, 16, 12), 2, "intermediate_size = 12"),
        (LayerShape(64, 8, 16, 8), 33, "num_ranks = 33"),
    ],
)
def test_shapes_beyond_the_kernels_are_refused(shape, ranks, words):
    with pytest.raises(ConfigurationError, match=words):
        check_shape(shape, ranks)


def test_a_packet_is_whole_words_and_every_error_has_a_sentence():
    assert packet_bytes(2048, 8) == 4096 + 64 and packet_bytes(8, 3) == 48
    assert error_of(0, 1) is None
    for error in list(BaselineError)[1:]:
        assert error_of(int(error) << 32 | 7, 1).startswith("rank 1, an earlier call: ")
