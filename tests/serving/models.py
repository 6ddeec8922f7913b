"""Small checkpoints and prompts for the serving tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from inc_runtime.config import LayerShape
from megakernel.make_checkpoint import VOCABULARY_SIZE, write_checkpoint

SHAPE = LayerShape(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)

MORE_OF_MODEL = {
    "qwen3_moe": {"num_experts": SHAPE.num_experts, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": SHAPE.num_experts},
    "qwen2_moe": {"num_experts": SHAPE.num_experts, "shared_expert_intermediate_size": 32},
}
"""What is special about each family: how it names the experts, renormalised weights, experts for all tokens."""

WORDS = "switch rank token expert router slot ring magic barrier plane heap kernel step layer queue credit phase word".split()  # noqa: SIM905


def write_float32_checkpoint(folder: Path, num_layers: int = 2) -> Path:
    """An OLMoE checkpoint whose weights are float32 and not bfloat16 values: rounding anywhere shows."""
    write_checkpoint(folder, SHAPE, num_layers=num_layers, num_attention_heads=2, progress=False)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, tensor in load_file(path).items():
        noise = torch.rand(tensor.shape, generator=generator)
        tensors[name] = (tensor.float() * (1 + noise / 256)).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return folder


def write_other_float32_checkpoint(folder: Path, model_type: str) -> Path:
    """A model of another family in the same sizes, by transformers, with the tokenizer of ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_float32_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    sizes = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": SHAPE.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": SHAPE.hidden_size // 2,
        "intermediate_size": SHAPE.intermediate_size,
        "moe_intermediate_size": SHAPE.intermediate_size,
        "num_experts_per_tok": SHAPE.top_k,
        "max_position_embeddings": 512,
        "initializer_range": SHAPE.hidden_size**-0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(2)
    config = AutoConfig.for_model(model_type, **sizes, **MORE_OF_MODEL[model_type])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def prompts(count: int, seed: int = 0) -> list[str]:
    """Prompts of 1 to about 200 bytes, so that batches are ragged and long ones are cut into chunks."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for number in range(count):
        length = 1 + int(torch.randint(1, 30, (1,), generator=generator)) * (1 if number % 3 else 2) // 2
        picks = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        result.append(f"{number} " + " ".join(WORDS[p] for p in picks))
    return result
