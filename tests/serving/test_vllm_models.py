"""vLLM itself on other models than OLMoE, and in bfloat16. Needs vLLM in this environment: `make test-vllm` makes one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from megakernel.vllm_checks import WORKER
from tests.serving.models import prompts, write_other_float32_checkpoint
from tests.serving.offline import ENGINE, answers_of, answers_of_vllm_alone, answers_on_our_runtime, generate, tokens

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-vllm` installs it beside and runs these", allow_module_level=True)

pytestmark = pytest.mark.timeout(1500)
NUM_PROMPTS = 12


def folder_with(model_type: str, folder: Path) -> Path:
    """The model, the prompts, and the answers of vLLM alone."""
    write_other_float32_checkpoint(folder / "model", model_type)
    (folder / "prompts.json").write_text(json.dumps(prompts(NUM_PROMPTS)))
    answers_of_vllm_alone(folder)
    return folder


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_models_with_the_same_mathematics_give_the_tokens_of_vllm_alone(tmp_path: Path, model_type: str) -> None:
    folder = folder_with(model_type, tmp_path)
    answers = answers_on_our_runtime(folder, "megakernel_inc", 2)
    assert tokens(answers) == tokens(answers_of(folder, "stock"))
    assert len({token for answer in answers for token in answer["tokens"]}) > 20, "a model of few words proves nothing"


def test_a_model_of_other_mathematics_is_left_to_vllm_with_the_reason(tmp_path: Path) -> None:
    folder = folder_with("qwen2_moe", tmp_path)
    engine = ENGINE | {"worker_cls": WORKER}
    status, text = generate(folder, "left", engine, INC_VLLM="megakernel_inc", INC_VLLM_UNSUPPORTED="leave")
    assert status == 0, text
    reasons = [line for line in text.splitlines() if "INC leaves" in line]
    assert len(reasons) == 1 and "model_type = qwen2_moe: olmoe, qwen3_moe, mixtral can be served" in reasons[0], reasons
    assert "INC runs 0 of the 2 MoE layers of this model" in text
    assert answers_of(folder, "left") == answers_of(folder, "stock")
