"""Real input for one MoE layer of OLMoE, and what `transformers` itself makes of it.

The text goes through the tokenizer, the embedding and the layers before the chosen one, as `transformers`
runs them; the rows that enter the MoE block of that layer are the workload. The same block, alone and in
float32, gives the answer of other people's code.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer, OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import (
    OlmoeModel,
    OlmoeRotaryEmbedding,
    OlmoeSparseMoeBlock,
)

from inc_runtime.errors import CheckpointError, ConfigurationError
from megakernel.checkpoint import TOKENIZER_FILE, CheckpointReader, load_experts, load_gate, read_layer_shape

# Longer inputs are cut into sequences of this many tokens, or fewer if the model has fewer positions, because
# the cost of attention grows with the square of the length.
_MAX_SEQUENCE_TOKENS = 1024


class TransformersBlock(NamedTuple):
    """What an MoE block of `transformers` gives for N rows.

    `output`: [N, hidden], float32, without the residual. `router_logits`: [N, num_experts], float32.
    """

    output: torch.Tensor
    router_logits: torch.Tensor


def demo_text() -> str:
    """The prose that the demo feeds to the model: ASCII, a few thousand characters."""
    return Path(__file__).with_name("demo_text.txt").read_text(encoding="ascii")


def tokens_of_text(folder: str | Path, text: str, num_tokens: int) -> torch.Tensor:
    """The first `num_tokens` token ids of `text`, repeated where it is too short: [num_tokens], int64.

    No special tokens are added. Raises: ConfigurationError for a text without tokens; CheckpointError when
    `folder` has no tokenizer, or one with ids that the model does not have.
    """
    folder = Path(folder)
    vocabulary_size = _transformers_config(folder, num_layers=1).vocab_size
    remedy = f"Add the model's {TOKENIZER_FILE} and tokenizer_config.json."
    if not (folder / TOKENIZER_FILE).is_file():  # transformers would make an empty tokenizer without a word
        raise CheckpointError(f"{folder} has no {TOKENIZER_FILE}. {remedy}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing more special
        raise CheckpointError(f"{folder / TOKENIZER_FILE} cannot be loaded: {error}. {remedy}") from error
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise ConfigurationError(f"text = {text!r}: it must have at least one token. Give a longer text.")
    if max(ids) >= vocabulary_size:
        raise CheckpointError(
            f"{folder}: the tokenizer gives token {max(ids)}, the model has {vocabulary_size}. "
            "Use the tokenizer that belongs to the model."
        )
    return torch.tensor(ids).repeat(-(-num_tokens // len(ids)))[:num_tokens]


@torch.no_grad()
def hidden_states_of_text(folder: str | Path, layer: int, text: str, num_tokens: int) -> torch.Tensor:
    """The rows that enter the MoE block of `layer` when the model reads `text`.

    Returns [num_tokens, hidden], bfloat16, in the order of the tokens (`tokens_of_text`). The model runs in
    bfloat16 with causal attention. Inputs longer than 1024 tokens are read as several sequences. Memory: the
    layers before `layer`, and the attention of `layer`; its experts and the layers after it are not read.

    Raises: ConfigurationError for a layer that the model does not have, or an empty text; CheckpointError as
    the functions of `checkpoint.py`.
    """
    folder = Path(folder)
    token_ids = tokens_of_text(folder, text, num_tokens)
    model, recorder = _model_up_to(folder, layer)
    for sequence in token_ids.split(min(_MAX_SEQUENCE_TOKENS, model.config.max_position_embeddings)):
        if len(sequence):
            model(input_ids=sequence[None], use_cache=False)
    return torch.cat([torch.empty(0, model.config.hidden_size, dtype=torch.bfloat16), *recorder.rows])


@torch.no_grad()
def transformers_moe_block(folder: str | Path, layer: int, hidden_states: torch.Tensor) -> TransformersBlock:
    """What the OLMoE MoE block of `transformers` gives for `hidden_states` ([N, hidden], any float dtype).

    The block of `layer` alone is built, its weights and `hidden_states` widened to float32, so that its own
    rounding is nothing beside the bfloat16 pipeline's. Memory: the experts of the layer, in float32.

    Raises: ConfigurationError for a layer that the model does not have, or rows of another width;
    CheckpointError as the functions of `checkpoint.py`.
    """
    folder = Path(folder)
    shape = read_layer_shape(folder)
    if hidden_states.dim() != 2 or hidden_states.shape[1] != shape.hidden_size:
        raise ConfigurationError(
            f"hidden_states of shape {list(hidden_states.shape)}: it must be [N, {shape.hidden_size}]. "
            "Give one row per token."
        )
    with torch.device("meta"):
        block = OlmoeSparseMoeBlock(_transformers_config(folder, num_layers=1))
    gate_up = torch.empty(shape.num_experts, 2 * shape.intermediate_size, shape.hidden_size)
    down = torch.empty(shape.num_experts, shape.hidden_size, shape.intermediate_size)
    for expert in range(shape.num_experts):
        one = load_experts(folder, layer, range(expert, expert + 1))
        gate_up[expert], down[expert] = one.gate_up[0], one.down[0]
    block.load_state_dict(
        {
            "gate.weight": load_gate(folder, layer).float(),
            "experts.gate_up_proj": gate_up,
            "experts.down_proj": down,
        },
        assign=True,
    )
    logits: list[torch.Tensor] = []
    block.gate.register_forward_hook(lambda _module, _inputs, outputs: logits.append(outputs[0]))
    output = block(hidden_states.float()[None])[0]
    return TransformersBlock(output, logits[0])


class _RowRecorder(torch.nn.Module):
    """Stands in the place of an MoE block, keeps the rows that enter it, and adds nothing to the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.rows.append(hidden_states.flatten(0, -2))
        return torch.zeros_like(hidden_states)


def _model_up_to(folder: Path, layer: int) -> tuple[OlmoeModel, _RowRecorder]:
    """The model of `folder` cut after the attention of `layer`, whose MoE block is replaced by a recorder.

    Built without memory and then given the tensors of the checkpoint: nothing is initialised or copied twice.
    """
    with CheckpointReader(folder) as reader:
        reader.require_layer(layer)
        config = _transformers_config(folder, num_layers=layer + 1)
        with torch.device("meta"):
            model = OlmoeModel(config)
        recorder = _RowRecorder()
        model.layers[layer].mlp = recorder
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if ".experts." not in name:
                tensors[name] = reader.tensor(f"model.{name}", tuple(parameter.shape)).to(torch.bfloat16)
    for before in range(layer):
        experts = load_experts(folder, before, range(config.num_experts))
        tensors[f"layers.{before}.mlp.experts.gate_up_proj"] = experts.gate_up
        tensors[f"layers.{before}.mlp.experts.down_proj"] = experts.down
    model.load_state_dict(tensors, assign=True)
    model.rotary_emb = OlmoeRotaryEmbedding(config)  # its frequencies are computed, not stored
    return model.eval(), recorder


def _transformers_config(folder: Path, num_layers: int) -> OlmoeConfig:
    """The `transformers` configuration of `folder`, cut to `num_layers`, with its plain loop over experts."""
    read_layer_shape(folder)  # refuses with a CheckpointError what transformers would guess
    config = OlmoeConfig.from_pretrained(
        folder, local_files_only=True, attn_implementation="sdpa", experts_implementation="eager"
    )
    config.num_hidden_layers = num_layers
    return config
