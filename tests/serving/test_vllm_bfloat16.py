"""vLLM in bfloat16: our log-probabilities differ from its own by no more than bfloat16 itself explains.

What is compared: for every token of each prompt but the first (so all runs see the same context) the error of its log-probability
against float32 arithmetic on the same bfloat16 weights, once with vLLM's own MoE and once with ours.

The bound, in the manner of `megakernel.reference.bf16_bound`. To first order the error of a log-probability is a sum of one
term per rounding in the model, of mean 0 and independent, so that their variances add. All roundings outside of the experts are
the same in both runs. A layer of ours has four, each with about the same relative weight: after SwiGLU, each expert's output,
each rank's partial sum, the sum over ranks. A layer in bfloat16 has at least two, whoever computes it: the input of the second
product, and the result. Hence our variance is at most 4 / 2 of vLLM's, and the mean absolute error at most ROUNDINGS = 2 ** 0.5
times. A token that is close between two experts may go to another one in bfloat16: how often grows as the noise does, by the
same factor. By the triangle inequality, ours and vLLM's then differ by at most 1 + ROUNDINGS times vLLM's own error in the
mean.

Needs vLLM in this environment: `make test-vllm` makes one.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from megakernel.make_checkpoint import write_checkpoint
from tests.serving.models import SHAPE, prompts
from tests.serving.offline import answers_of_vllm_alone, answers_on_our_runtime

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-vllm` installs it beside and runs these", allow_module_level=True)

pytestmark = pytest.mark.timeout(1500)
ROUNDINGS = 2**0.5
NUM_PROMPTS = 100


def log_probabilities(answers: list[dict]) -> list[np.ndarray]:
    """Of the tokens of each prompt but the first."""
    return [np.array(answer["prompt_logprobs"]) for answer in answers]


def ratio_of_means(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """sum(above) / sum(below) and its standard error, from the spread over prompts (one element each)."""
    ratio = above.sum() / below.sum()
    residual = above - ratio * below
    return ratio, float(np.sqrt(len(above) / (len(above) - 1) * (residual**2).sum()) / below.sum())


def test_log_probabilities_are_as_close_to_float32_as_those_of_vllm_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SHAPE, num_layers=2, num_attention_heads=2, progress=False)
    (tmp_path / "prompts.json").write_text(json.dumps(prompts(NUM_PROMPTS)))
    exact = log_probabilities(answers_of_vllm_alone(tmp_path, prompt_logprobs=0))
    alone = log_probabilities(answers_of_vllm_alone(tmp_path, prompt_logprobs=0, dtype="bfloat16"))
    answers = answers_on_our_runtime(tmp_path, "megakernel_inc", 2, row_format="bfloat16", dtype="bfloat16", prompt_logprobs=0)
    ours = log_probabilities(answers)
    error_alone, error_ours, difference = (
        np.array([np.abs(one - other).sum() for one, other in zip(left, right, strict=True)])
        for left, right in ((alone, exact), (ours, exact), (ours, alone))
    )
    num_tokens = sum(map(len, exact))
    ratio, spread = ratio_of_means(error_ours, error_alone)
    apart, _ = ratio_of_means(difference, error_alone)
    print(
        f"{num_tokens} tokens: vLLM alone is off by {error_alone.sum() / num_tokens:.4f} in the mean, ours by {ratio:.3f} "
        f"+- {spread:.3f} of that; they differ by {apart:.3f} of that"
    )
    assert error_alone.sum() > 0.0 and spread < 0.05, "too few tokens to judge"
    assert ratio < ROUNDINGS + 3 * spread
    assert apart < 1 + ROUNDINGS + 3 * spread
