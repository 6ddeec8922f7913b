"""The workload is what `transformers` computes, and the block is `transformers`' own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import OlmoeForCausalLM

import megakernel.olmoe as olmoe
from inc_runtime.config import LayerShape
from inc_runtime.errors import CheckpointError, ConfigurationError
from megakernel.checkpoint import INDEX_FILE, TOKENIZER_FILE, load_experts
from megakernel.make_checkpoint import write_checkpoint
from megakernel.olmoe import demo_text, hidden_states_of_text, tokens_of_text, transformers_moe_block
from megakernel.reference import moe_layer_reference, relative_error, route_reference

SHAPE = LayerShape(num_experts=16, top_k=4, hidden_size=128, intermediate_size=64)
TEXT = "The switch adds the rows and returns one sum."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("olmoe") / "olmoe",
        SHAPE,
        num_layers=3,
        num_attention_heads=4,
        max_shard_bytes=60_000,
        progress=False,
    )


@pytest.fixture(scope="module")
def whole_model(folder: Path) -> OlmoeForCausalLM:
    return OlmoeForCausalLM.from_pretrained(
        folder, local_files_only=True, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_rows_are_those_that_enter_the_block_of_the_whole_model(
    folder: Path, whole_model: OlmoeForCausalLM, layer: int
) -> None:
    seen: list[torch.Tensor] = []
    hook = whole_model.model.layers[layer].mlp.register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0][0])
    )
    with torch.no_grad():
        whole_model(input_ids=tokens_of_text(folder, TEXT, 40)[None])
    hook.remove()
    rows = hidden_states_of_text(folder, layer, TEXT, 40)
    assert rows.dtype == torch.bfloat16 and rows.shape == (40, SHAPE.hidden_size)
    assert torch.equal(rows, seen[0])


def test_a_short_text_is_repeated(folder: Path) -> None:
    num_bytes = len(TEXT.encode())
    ids = tokens_of_text(folder, TEXT, 2 * num_bytes + 3)
    assert ids.tolist() == list((TEXT + TEXT + TEXT[:3]).encode())
    rows = hidden_states_of_text(folder, 1, TEXT, 2 * num_bytes + 3)
    assert len(torch.unique(rows, dim=0)) > num_bytes  # a repeated token sees more text before it


def test_text_beyond_one_sequence_starts_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(olmoe, "_MAX_SEQUENCE_TOKENS", 16)
    rows = hidden_states_of_text(folder, 1, TEXT, 40)
    assert torch.equal(rows[16:32], hidden_states_of_text(folder, 1, TEXT[16:32], 16))
    assert rows.shape == (40, SHAPE.hidden_size)


def test_no_tokens_give_no_rows(folder: Path) -> None:
    assert hidden_states_of_text(folder, 1, TEXT, 0).shape == (0, SHAPE.hidden_size)
    assert transformers_moe_block(folder, 1, torch.empty(0, SHAPE.hidden_size)).output.shape == (0, 128)


def test_the_layers_after_and_the_experts_of_the_layer_are_not_read(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    index = olmoe.CheckpointReader(folder)._shard_of_tensor
    needed = {
        shard
        for name, shard in index.items()
        if name.startswith(("model.embed", "model.norm", "model.layers.0.", "model.layers.1."))
        and not name.startswith("model.layers.1.mlp.")
    }
    unneeded = set(index.values()) - needed
    assert len(unneeded) > len(needed) // 2
    for shard in unneeded:
        (copy / shard).unlink()
    assert torch.equal(hidden_states_of_text(copy, 1, TEXT, 9), hidden_states_of_text(folder, 1, TEXT, 9))


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_block_of_transformers_agrees_with_the_float64_reference(
    tmp_path: Path, renormalize: bool
) -> None:
    shape = LayerShape(num_experts=9, top_k=3, hidden_size=64, intermediate_size=40, renormalize=renormalize)
    folder = write_checkpoint(tmp_path / "olmoe", shape, num_attention_heads=4, progress=False)
    rows = hidden_states_of_text(folder, 1, demo_text(), 64)
    block = transformers_moe_block(folder, 1, rows)
    assert block.output.dtype == block.router_logits.dtype == torch.float32
    ids, weights = route_reference(block.router_logits, shape)
    experts = load_experts(folder, 1, range(9))
    reference = moe_layer_reference(rows, ids, weights, experts.gate_up, experts.down, num_experts=9)
    assert relative_error(block.output, reference) < 2e-6
    swapped = torch.cat(experts.gate_up.chunk(2, dim=1)[::-1], dim=1)
    wrong = moe_layer_reference(rows, ids, weights, swapped, experts.down, num_experts=9)
    assert relative_error(block.output, wrong) > 0.5


def test_the_demo_text_reaches_every_expert_unevenly_and_with_scale_one(folder: Path) -> None:
    rows = hidden_states_of_text(folder, 1, demo_text(), 256)
    block = transformers_moe_block(folder, 1, rows)
    ids, weights = route_reference(block.router_logits, SHAPE)
    rows_of_expert = torch.bincount(torch.from_numpy(ids).flatten(), minlength=SHAPE.num_experts)
    assert rows_of_expert.min() > 0 and rows_of_expert.max() > 1.5 * rows_of_expert.float().mean()
    assert 0.9 < rows.float().std() < 1.1 and 0.2 < block.output.std() < 1.2
    assert weights[:, 0].mean() > 2 / SHAPE.num_experts
    assert len(torch.unique(rows, dim=0)) == 256


def test_the_demo_text_is_plain_ascii_prose() -> None:
    text = demo_text()
    assert text.isascii() and 2_000 < len(text) < 10_000


def test_what_cannot_be_a_workload_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least one token"):
        hidden_states_of_text(folder, 0, "", 4)
    with pytest.raises(ConfigurationError, match="layers 0 to 2"):
        hidden_states_of_text(folder, 3, TEXT, 4)
    with pytest.raises(ConfigurationError, match=r"must be \[N, 128\]"):
        transformers_moe_block(folder, 0, torch.zeros(4, 64))
    with pytest.raises(ConfigurationError, match="layers 0 to 2"):
        transformers_moe_block(folder, 7, torch.zeros(4, 128))


def test_a_tokenizer_that_is_missing_broken_or_of_another_model_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('"vocab_size": 258', '"vocab_size": 100'))
    with pytest.raises(CheckpointError, match=r"gives token 1.., the model has 100"):
        tokens_of_text(copy, TEXT, 9)
    (copy / "config.json").write_text(config)
    (copy / TOKENIZER_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be loaded"):
        tokens_of_text(copy, TEXT, 9)
    (copy / TOKENIZER_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        tokens_of_text(copy, TEXT, 9)
    (copy / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        transformers_moe_block(copy, 0, torch.zeros(1, 128))
