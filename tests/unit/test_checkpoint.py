"""Checkpoint folders: what is written loads in `transformers`, and what is broken is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, OlmoeForCausalLM

import megakernel.make_checkpoint as make_checkpoint
from inc_runtime.config import LayerShape, Router
from inc_runtime.errors import CheckpointError, ConfigurationError
from megakernel.checkpoint import INDEX_FILE, SINGLE_FILE, load_experts, load_gate, read_layer_shape
from megakernel.make_checkpoint import write_checkpoint

SHAPE = LayerShape(num_experts=6, top_k=2, hidden_size=64, intermediate_size=24)
SHARD_BYTES = 24_000  # seven shards or so, and less than one layer's experts


def write(folder: Path, shape: LayerShape = SHAPE, **options: int) -> Path:
    return write_checkpoint(folder, shape, num_attention_heads=4, progress=False, **options)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sharded") / "olmoe", max_shard_bytes=SHARD_BYTES)


@pytest.fixture
def broken(sharded: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(sharded, tmp_path / "broken"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX_FILE).read_text())["weight_map"]


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return tensors


def test_transformers_loads_every_weight_and_misses_none(sharded: Path) -> None:
    loaded: Any = OlmoeForCausalLM.from_pretrained(sharded, output_loading_info=True)
    model, loading = loaded
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    for layer in range(2):
        block = model.model.layers[layer].mlp
        experts = load_experts(sharded, layer, range(SHAPE.num_experts))
        assert torch.equal(block.experts.gate_up_proj, experts.gate_up)
        assert torch.equal(block.experts.down_proj, experts.down)
        assert torch.equal(block.gate.weight, load_gate(sharded, layer))


def test_config_is_read_by_transformers_as_it_was_meant(tmp_path: Path) -> None:
    shape = LayerShape(num_experts=5, top_k=3, hidden_size=32, intermediate_size=8, renormalize=True)
    config = AutoConfig.from_pretrained(write(tmp_path / "olmoe", shape, num_layers=3))
    assert (config.model_type, config.num_hidden_layers, config.num_experts) == ("olmoe", 3, 5)
    assert (config.num_experts_per_tok, config.intermediate_size, config.norm_topk_prob) == (3, 8, True)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert read_layer_shape(tmp_path / "olmoe") == shape


def test_tokens_are_the_bytes_of_the_text(sharded: Path) -> None:
    text = "Switch  sums,\n\tthen returns: naïve 7 € \x00\x7f."
    tokenizer = AutoTokenizer.from_pretrained(sharded)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, 258)


def test_shards_hold_at_most_what_was_asked_and_the_index_lists_every_tensor(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 3
    assert weight_map(sharded).keys() == all_tensors(sharded).keys()
    for shard in shards:
        with safe_open(shard, framework="pt") as handle:
            sizes = [handle.get_tensor(name).nbytes for name in handle.keys()]  # noqa: SIM118
        assert sum(sizes) <= SHARD_BYTES or len(sizes) == 1
    assert json.loads((sharded / INDEX_FILE).read_text())["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in all_tensors(sharded).values()
    )


def test_weights_depend_on_the_seed_and_not_on_the_cut_into_shards(sharded: Path, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")
    assert [file.name for file in whole.glob("*.safetensors*")] == [SINGLE_FILE]
    mine, again = all_tensors(sharded), all_tensors(whole)
    assert mine.keys() == again.keys()
    assert all(torch.equal(mine[name], again[name]) for name in mine)
    assert torch.equal(load_experts(sharded, 1, range(2, 5)).down, load_experts(whole, 1, range(2, 5)).down)
    other = all_tensors(write(tmp_path / "other", seed=1))
    assert not any(torch.equal(mine[name], other[name]) for name in mine)


def test_no_two_tensors_are_alike_and_their_spread_keeps_activations_at_scale_one(sharded: Path) -> None:
    tensors = all_tensors(sharded)
    assert len({tensor.float().numpy().tobytes() for tensor in tensors.values()}) == len(tensors)
    inputs = torch.randn(512, SHAPE.hidden_size, generator=torch.Generator().manual_seed(0))
    experts = load_experts(sharded, 0, range(SHAPE.num_experts))
    gate, up = (inputs @ experts.gate_up[0].float().T).chunk(2, dim=1)
    output = (torch.nn.functional.silu(gate) * up) @ experts.down[0].float().T
    for activation in (gate, up, output):
        assert 0.8 < activation.std() < 1.25
    assert 1.6 < (inputs @ load_gate(sharded, 0).float().T).std() < 2.4


def test_gate_rows_come_before_up_rows_and_only_the_experts_asked_for_are_there(sharded: Path) -> None:
    tensors = all_tensors(sharded)
    experts = load_experts(sharded, 1, range(4, 6))
    assert experts.experts == range(4, 6)
    assert experts.gate_up.shape == (2, 48, 64) and experts.down.shape == (2, 64, 24)
    assert experts.gate_up.dtype == experts.down.dtype == torch.bfloat16
    for local, expert in enumerate(experts.experts):
        name = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(experts.gate_up[local, :24], tensors[f"{name}.gate_proj.weight"])
        assert torch.equal(experts.gate_up[local, 24:], tensors[f"{name}.up_proj.weight"])
        assert torch.equal(experts.down[local], tensors[f"{name}.down_proj.weight"])
    assert load_experts(sharded, 0, range(3, 3)).gate_up.shape == (0, 48, 64)


def test_shards_of_other_experts_are_not_opened(broken: Path) -> None:
    wanted = load_experts(broken, 0, range(1, 2))
    needed = {shard for name, shard in weight_map(broken).items() if "layers.0.mlp.experts.1." in name}
    for shard in set(weight_map(broken).values()) - needed:
        (broken / shard).write_bytes(b"not a shard")
    assert torch.equal(load_experts(broken, 0, range(1, 2)).gate_up, wanted.gate_up)


def test_float32_checkpoints_are_rounded_to_bfloat16(broken: Path) -> None:
    expected = load_experts(broken, 0, range(6))
    for file in broken.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            wide = {name: handle.get_tensor(name).float() for name in handle.keys()}  # noqa: SIM118
        save_file(wide, file)
    assert torch.equal(load_experts(broken, 0, range(6)).gate_up, expected.gate_up)
    assert load_gate(broken, 0).dtype == torch.bfloat16


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    written: list[Path] = []

    def stop_at_the_second_shard(
        tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]
    ) -> None:
        if written:
            raise interruption
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(make_checkpoint, "save_file", stop_at_the_second_shard)
    with pytest.raises(interruption):
        write(tmp_path / "olmoe", max_shard_bytes=SHARD_BYTES)
    assert written and not list(tmp_path.iterdir())


def test_the_folder_has_no_config_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is killed, and so cannot clean up, must not leave what could be taken for a checkpoint."""

    def look(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        assert not (tmp_path / "olmoe").exists()
        with pytest.raises(CheckpointError, match="no checkpoint folder"):
            read_layer_shape(path.parent)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(make_checkpoint, "save_file", look)
    write(tmp_path / "olmoe", max_shard_bytes=SHARD_BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["olmoe"]


def test_files_are_never_overwritten_but_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "olmoe").mkdir()
    write(tmp_path / "olmoe")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        write(tmp_path / "olmoe")
    modes = {file.stat().st_mode for file in (tmp_path / "olmoe").iterdir()}
    assert len(modes) == 1  # all as readable as the user's umask says


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(CheckpointError, match="GB free"):
        write(tmp_path / "olmoe")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (SHAPE, {"num_attention_heads": 5}, "num_attention_heads = 5"),
        (SHAPE, {"num_layers": 0}, "num_layers = 0"),
        (LayerShape(4, 5, 64, 24), {}, "top_k = 5"),
        (LayerShape(4, 2, 64, 24, router=Router.SIGMOID), {}, "router = sigmoid"),
    ],
)
def test_sizes_that_no_olmoe_has_are_refused(
    tmp_path: Path, shape: LayerShape, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        write_checkpoint(tmp_path / "olmoe", shape, progress=False, **options)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=r"no config\.json.*inc make-checkpoint"):
            read_layer_shape(folder)


def test_another_model_is_refused(broken: Path) -> None:
    edit_json(broken / "config.json", model_type="mixtral")
    with pytest.raises(CheckpointError, match="model_type is 'mixtral'"):
        load_experts(broken, 0, range(1))


@pytest.mark.parametrize("value", [None, 0, "64", True, 2.5])
def test_a_size_that_is_no_count_is_refused(broken: Path, value: object) -> None:
    edit_json(broken / "config.json", num_experts=value)
    with pytest.raises(CheckpointError, match="num_experts must be a positive integer"):
        read_layer_shape(broken)


def test_half_a_config_is_refused(broken: Path) -> None:
    text = (broken / "config.json").read_text()
    (broken / "config.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_layer_shape(broken)


def test_a_missing_tensor_is_named_with_its_folder(broken: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    edit_json(broken / INDEX_FILE, weight_map={k: v for k, v in weight_map(broken).items() if k != name})
    with pytest.raises(CheckpointError) as error:
        load_experts(broken, 1, range(2, 4))
    assert name in str(error.value) and str(broken) in str(error.value)
    assert "Download the checkpoint again" in str(error.value)
    load_experts(broken, 1, range(3))  # the others are still there


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(broken: Path) -> None:
    edit_json(broken / "config.json", intermediate_size=32)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight must be \[32, 64\].* \[24, 64\]"):
        load_experts(broken, 0, range(1))


def test_an_index_that_names_the_wrong_shard_is_caught(broken: Path) -> None:
    shards = weight_map(broken)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    shards[name] = shards["lm_head.weight"]
    edit_json(broken / INDEX_FILE, weight_map=shards)
    with pytest.raises(CheckpointError, match=r"places tensor .*gate_proj\.weight in model-"):
        load_experts(broken, 0, range(1))


def test_a_missing_and_a_truncated_shard_are_told_apart(broken: Path) -> None:
    shard = broken / weight_map(broken)["model.layers.0.mlp.experts.0.gate_proj.weight"]
    content = shard.read_bytes()
    for num_bytes in (0, 4, len(content) // 2, len(content) - 1):
        shard.write_bytes(content[:num_bytes])
        with pytest.raises(CheckpointError, match=f"{shard.name} is truncated .*{num_bytes} bytes"):
            load_experts(broken, 0, range(1))
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {shard.name}"):
        load_experts(broken, 0, range(1))


def test_a_folder_without_weights_is_refused(broken: Path) -> None:
    (broken / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"neither {INDEX_FILE} nor {SINGLE_FILE}"):
        load_gate(broken, 0)


def test_quantised_weights_are_refused_rather_than_read_without_their_scales(broken: Path) -> None:
    name = "model.layers.0.mlp.gate.weight"
    shard = broken / weight_map(broken)[name]
    with safe_open(shard, framework="pt") as handle:
        tensors = {other: handle.get_tensor(other) for other in handle.keys()}  # noqa: SIM118
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, shard)
    with pytest.raises(CheckpointError, match=r"gate\.weight is F8_E4M3"):
        load_gate(broken, 0)


@pytest.mark.parametrize(
    ("layer", "experts"), [(2, range(1)), (-1, range(1)), (0, range(5, 7)), (0, range(-1, 2))]
)
def test_layers_and_experts_that_the_model_lacks_are_refused(
    sharded: Path, layer: int, experts: range
) -> None:
    with pytest.raises(ConfigurationError, match=r"layers 0 to 1|experts 0 to 5"):
        load_experts(sharded, layer, experts)
