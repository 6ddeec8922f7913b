"""Write an OLMoE checkpoint folder of any size with seeded random weights, where none can be downloaded."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from inc_runtime.config import OLMOE_1B_7B, LayerShape, Pipeline, Router, check
from inc_runtime.errors import CheckpointError, ConfigurationError
from megakernel.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, TOKENIZER_FILE

END_OF_TEXT_ID = 256
PADDING_ID = 257
VOCABULARY_SIZE = 258
_SPECIAL_TOKENS = {END_OF_TEXT_ID: "<|endoftext|>", PADDING_ID: "<|padding|>"}
_MAX_POSITIONS = 4096

# Standard deviations that keep every activation near scale 1 on normalised input x (elements of variance 1):
# gate and up rows have norm 1, so gate x and up x have variance 1; then silu(gate x) * (up x) has standard
# deviation 0.596 (the root of E[silu(z)^2] = 0.356, z normal), which down undoes. Router logits of standard
# deviation 2 put about 0.7 of the probability on 8 of 64 experts. Queries of norm 2 let a token attend to few
# others, so that equal bytes at different places enter the MoE block as different rows.
_SWIGLU_STD = 0.596
_ROUTER_LOGIT_STD = 2.0
_QUERY_NORM = 2.0
_NORM_SPREAD = 0.1

_BYTES_PER_WEIGHT = 2  # bfloat16


@dataclass(frozen=True)
class _TensorPlan:
    """One tensor to write: `mean` plus uniform noise of standard deviation `std`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BYTES_PER_WEIGHT


def write_checkpoint(
    folder: str | Path,
    shape: LayerShape = OLMOE_1B_7B,
    *,
    num_layers: int = 2,
    num_attention_heads: int = 16,
    seed: int = 0,
    max_shard_bytes: int = 400 << 20,
    progress: bool = True,
) -> Path:
    """Write an OLMoE checkpoint of seeded random weights and a byte-level tokenizer; return its path.

    Weights are bfloat16 and a function of `seed`, tensor name and tensor shape alone: independent of each
    other, of the cut into shards and of the machine. The tokenizer has the 256 bytes (byte b is token b), end
    of text and padding. A shard holds at most `max_shard_bytes`, or one tensor, and one shard at a time is in
    memory. A checkpoint that fits one shard has no index, as on the hub. `progress` shows a bar in bytes.

    The folder appears whole: it is written beside its place as `.NAME.partial-*` and then renamed. An
    exception removes that; after a kill it stays, and may be deleted.

    Raises: ConfigurationError for sizes that no OLMoE can have; CheckpointError when `folder` holds files
    already or the disk has no room.
    """
    folder = Path(folder).absolute()
    _check_sizes(shape, num_layers, num_attention_heads, max_shard_bytes)
    plan = list(_plan_tensors(shape, num_layers))
    _check_place(folder, sum(tensor.num_bytes for tensor in plan))
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        _write_tokenizer(partial)
        _write_shards(partial, _cut_into_shards(plan, max_shard_bytes), seed, progress)
        _write_json(partial / CONFIG_FILE, _config_of(shape, num_layers, num_attention_heads))
        os.rename(partial, folder)  # replaces an empty folder, fails on any other
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _check_sizes(shape: LayerShape, num_layers: int, num_attention_heads: int, max_shard_bytes: int) -> None:
    check(shape, Pipeline(bound_tokens=1, microbatch_tokens=1), num_ranks=1)
    if shape.router is not Router.SOFTMAX:
        raise ConfigurationError(
            f"router = {shape.router.value}: an OLMoE checkpoint has softmax. Use Router.SOFTMAX."
        )
    for name, value in (
        ("num_layers", num_layers),
        ("num_attention_heads", num_attention_heads),
        ("max_shard_bytes", max_shard_bytes),
    ):
        if value < 1:
            raise ConfigurationError(f"{name} = {value}: it must be at least 1. Give a positive count.")
    if shape.hidden_size % (2 * num_attention_heads):
        raise ConfigurationError(
            f"num_attention_heads = {num_attention_heads}: hidden_size = {shape.hidden_size} must be a "
            "multiple of twice that, so that rotary embedding can pair the elements of a head. "
            "Choose fewer heads."
        )


def _check_place(folder: Path, num_bytes: int) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} exists and is not an empty folder. Remove it, or give another folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < num_bytes:
        raise CheckpointError(
            f"{folder.parent} has {free / 1e9:.2f} GB free, the checkpoint takes {num_bytes / 1e9:.2f} GB. "
            "Free some, give another folder, or a smaller shape."
        )


def _plan_tensors(shape: LayerShape, num_layers: int) -> Iterator[_TensorPlan]:
    """Every tensor of the model, layer by layer, under its name on the hub."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    over_hidden = hidden**-0.5
    yield _TensorPlan("model.embed_tokens.weight", (VOCABULARY_SIZE, hidden), 1.0)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        yield _TensorPlan(f"{prefix}.input_layernorm.weight", (hidden,), _NORM_SPREAD, 1.0)
        yield _TensorPlan(f"{prefix}.self_attn.q_norm.weight", (hidden,), _NORM_SPREAD, _QUERY_NORM)
        yield _TensorPlan(f"{prefix}.self_attn.k_norm.weight", (hidden,), _NORM_SPREAD, 1.0)
        for projection in "qkvo":
            yield _TensorPlan(f"{prefix}.self_attn.{projection}_proj.weight", (hidden, hidden), over_hidden)
        yield _TensorPlan(f"{prefix}.post_attention_layernorm.weight", (hidden,), _NORM_SPREAD, 1.0)
        yield _TensorPlan(
            f"{prefix}.mlp.gate.weight", (shape.num_experts, hidden), _ROUTER_LOGIT_STD * over_hidden
        )
        for expert in range(shape.num_experts):
            inner = f"{prefix}.mlp.experts.{expert}"
            yield _TensorPlan(f"{inner}.gate_proj.weight", (width, hidden), over_hidden)
            yield _TensorPlan(f"{inner}.up_proj.weight", (width, hidden), over_hidden)
            yield _TensorPlan(f"{inner}.down_proj.weight", (hidden, width), width**-0.5 / _SWIGLU_STD)
    yield _TensorPlan("model.norm.weight", (hidden,), _NORM_SPREAD, 1.0)
    yield _TensorPlan("lm_head.weight", (VOCABULARY_SIZE, hidden), over_hidden)


def _cut_into_shards(plan: list[_TensorPlan], max_shard_bytes: int) -> list[list[_TensorPlan]]:
    """Cut `plan`, in order, into runs of at most `max_shard_bytes`, or of one larger tensor."""
    shards: list[list[_TensorPlan]] = [[]]
    num_bytes = 0
    for tensor in plan:
        if shards[-1] and num_bytes + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return shards


def _random_tensor(tensor: _TensorPlan, seed: int) -> torch.Tensor:
    """The values of `tensor`, bfloat16.

    Raw 64-bit words of SFC64, read as four 16-bit integers each and scaled: faster than normal values, and
    free of the platform's mathematical library. A uniform value on [-1, 1) has standard deviation 3 ** -0.5.
    """
    digest = hashlib.sha256(f"{seed} {tensor.name}".encode()).digest()
    count = math.prod(tensor.shape)
    words = np.random.SFC64(int.from_bytes(digest[:16], "little")).random_raw(-(-count // 4))
    values = torch.from_numpy(words.view(np.int16)[:count]).to(torch.bfloat16)
    values.mul_(tensor.std * 3**0.5 / 2**15)
    if tensor.mean:
        values.add_(tensor.mean)
    return values.view(tensor.shape)


def _write_shards(folder: Path, shards: list[list[_TensorPlan]], seed: int, progress: bool) -> None:
    """Write the shards and, where there are several, their index."""
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    shard_of_tensor: dict[str, str] = {}
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="writing checkpoint", disable=not progress
    ) as progress_bar:
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE_FILE
            values = {}
            for tensor in shard:
                values[tensor.name] = _random_tensor(tensor, seed)
                shard_of_tensor[tensor.name] = file
                progress_bar.update(tensor.num_bytes)
            save_file(values, folder / file, metadata={"format": "pt"})
            # safetensors makes its files private; a checkpoint is as readable as its other files.
            shutil.copymode(folder / TOKENIZER_FILE, folder / file)
    if len(shards) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": shard_of_tensor})


def _config_of(shape: LayerShape, num_layers: int, num_attention_heads: int) -> dict[str, Any]:
    """What `config.json` says: the keys of OlmoeConfig that describe weights, tokenizer and attention."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_attention_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": shape.renormalize,
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "max_position_embeddings": _MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": PADDING_ID,
    }


def _characters_of_bytes() -> list[str]:
    """For each byte, the character that stands for it in a byte-level vocabulary.

    The alphabet is that of the `tokenizers` library: printable Latin-1 characters stand for themselves, the
    other bytes take, in ascending order, the characters from U+0100 on.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    characters, substitute = [], 0x100
    for byte in range(256):
        if chr(byte) in alphabet:
            characters.append(chr(byte))
        else:
            characters.append(chr(substitute))
            substitute += 1
    return characters


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the bytes of the text in UTF-8."""
    vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(_SPECIAL_TOKENS[token], special=True) for token in sorted(_SPECIAL_TOKENS)]
    )
    tokenizer.save(str(folder / TOKENIZER_FILE))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _MAX_POSITIONS,
            "bos_token": None,
            "eos_token": _SPECIAL_TOKENS[END_OF_TEXT_ID],
            "pad_token": _SPECIAL_TOKENS[PADDING_ID],
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
