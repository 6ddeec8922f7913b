"""Checkpoint folders of OLMoE, in the form in which the Hugging Face hub holds them: read parts of them.

A folder has `config.json`, a tokenizer, and either `model.safetensors` or several shards with
`model.safetensors.index.json`. Expert E of layer N is three tensors,
`model.layers.N.mlp.experts.E.{gate,up,down}_proj.weight`; the router of the layer is
`model.layers.N.mlp.gate.weight`.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from inc_runtime.config import LayerShape, Router
from inc_runtime.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"

_FLOAT_DTYPES = ("BF16", "F16", "F32")
_REWRITE = "Download the checkpoint again, or write one with `inc make-checkpoint`."


@dataclass(frozen=True)
class ExpertWeights:
    """Experts of one layer on one rank: row i of each array belongs to expert `experts[i]`.

    `gate_up`: [num_local, 2 * intermediate, hidden], bfloat16; the gate rows first, then the up rows.
    `down`: [num_local, hidden, intermediate], bfloat16.
    """

    experts: range
    gate_up: torch.Tensor
    down: torch.Tensor


def read_layer_shape(folder: str | Path) -> LayerShape:
    """The shape of the MoE layers of the OLMoE checkpoint in `folder`, from its `config.json`.

    Raises: CheckpointError when the file is missing, unreadable, of another model, or lacks a size.
    """
    folder = Path(folder)
    config = read_config(folder)
    return LayerShape(
        num_experts=config_size(folder, config, "num_experts"),
        top_k=config_size(folder, config, "num_experts_per_tok"),
        hidden_size=config_size(folder, config, "hidden_size"),
        intermediate_size=config_size(folder, config, "intermediate_size"),
        router=Router.SOFTMAX,
        renormalize=bool(config.get("norm_topk_prob", False)),
    )


def load_experts(folder: str | Path, layer: int, experts: range) -> ExpertWeights:
    """Read the weights of `experts` (global ids) of `layer`, and no other tensor.

    float32 and float16 checkpoints are rounded to bfloat16. Memory: the result and one tensor.

    Raises: ConfigurationError for a layer or an expert that the model does not have; CheckpointError, which
    names tensor, folder and remedy, for a missing or truncated shard and a missing or misshapen tensor.
    """
    shape = read_layer_shape(folder)
    if len(experts) and (min(experts) < 0 or max(experts) >= shape.num_experts):
        raise ConfigurationError(
            f"experts = {experts}: the model in {folder} has experts 0 to {shape.num_experts - 1}. "
            "Ask for those."
        )
    hidden, width = shape.hidden_size, shape.intermediate_size
    import torch

    gate_up = torch.empty(len(experts), 2 * width, hidden, dtype=torch.bfloat16)
    down = torch.empty(len(experts), hidden, width, dtype=torch.bfloat16)
    with CheckpointReader(folder) as reader:
        reader.require_layer(layer)
        for local, expert in enumerate(experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            gate_up[local, :width] = reader.tensor(f"{prefix}.gate_proj.weight", (width, hidden))
            gate_up[local, width:] = reader.tensor(f"{prefix}.up_proj.weight", (width, hidden))
            down[local] = reader.tensor(f"{prefix}.down_proj.weight", (hidden, width))
    return ExpertWeights(experts, gate_up, down)


def load_gate(folder: str | Path, layer: int) -> torch.Tensor:
    """Read the router of `layer`: [num_experts, hidden], bfloat16. Raises: as `load_experts`."""
    shape = read_layer_shape(folder)
    with CheckpointReader(folder) as reader:
        reader.require_layer(layer)
        gate = reader.tensor(f"model.layers.{layer}.mlp.gate.weight", (shape.num_experts, shape.hidden_size))
    return gate.bfloat16().clone()


class CheckpointReader:
    """Reads single tensors of the checkpoint in `folder`, whatever shard they are in. A context manager.

    Shards are mapped, not read: a tensor costs its own bytes. Raises: CheckpointError from every method.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self._stack = ExitStack()
        self._open_shards: dict[str, Any] = {}
        self._shard_of_tensor: dict[str, str] = self._read_index()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_shards.clear()
        self._stack.close()

    def require_layer(self, layer: int) -> None:
        """Raise ConfigurationError unless the model has `layer`."""
        num_layers = config_size(self.folder, self.config, "num_hidden_layers")
        if not 0 <= layer < num_layers:
            raise ConfigurationError(
                f"layer = {layer}: the model in {self.folder} has layers 0 to {num_layers - 1}. "
                "Ask for one of those."
            )

    def require_experts(self, layer: int, num_experts: int) -> None:
        """Raise CheckpointError unless all expert and router tensors of `layer` are there. Reads no tensor."""
        names = [f"model.layers.{layer}.mlp.gate.weight"]
        for expert in range(num_experts):
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            names += [f"{stem}.{projection}_proj.weight" for projection in ("gate", "up", "down")]
        for name in names:
            self._view(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, in the dtype of the file, which must be bfloat16, float16 or float32."""
        view, shard = self._view(name)
        try:
            seen_shape, dtype = tuple(view.get_shape()), view.get_dtype()
        except SafetensorError as error:
            raise self._misplaced(name, shard, error) from error
        if seen_shape != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {name} must be {list(shape)} by {CONFIG_FILE}, it is "
                f"{list(seen_shape)}. {_REWRITE}"
            )
        if dtype not in _FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {dtype}; one of {', '.join(_FLOAT_DTYPES)} can be read. "
                "Use a checkpoint that is not quantised."
            )
        return view[:]

    def _view(self, name: str) -> tuple[Any, str]:
        shard = self._shard_of_tensor.get(name)
        if shard is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}; {len(self._shard_of_tensor)} others are there. "
                f"{_REWRITE}"
            )
        try:
            return self._open(shard).get_slice(name), shard
        except SafetensorError as error:
            raise self._misplaced(name, shard, error) from error

    def _misplaced(self, name: str, shard: str, error: SafetensorError) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: {INDEX_FILE} places tensor {name} in {shard}, which cannot give it: {error}. {_REWRITE}"
        )

    def _open(self, shard: str) -> Any:
        if shard not in self._open_shards:
            path = self.folder / shard
            if not path.is_file():
                raise CheckpointError(f"{self.folder} lacks the shard {shard}. {_REWRITE}")
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file ({path.stat().st_size} bytes): {error}. "
                    f"{_REWRITE}"
                ) from error
            self._open_shards[shard] = handle
        return self._open_shards[shard]

    def _read_index(self) -> dict[str, str]:
        if (self.folder / INDEX_FILE).is_file():
            shards = _read_json(self.folder / INDEX_FILE).get("weight_map")
            if not isinstance(shards, dict):
                raise CheckpointError(f"{self.folder / INDEX_FILE} has no weight_map. {_REWRITE}")
            return shards
        if not (self.folder / SINGLE_FILE).is_file():
            raise CheckpointError(f"{self.folder} has neither {INDEX_FILE} nor {SINGLE_FILE}. {_REWRITE}")
        return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of an OLMoE checkpoint.

    Raises: CheckpointError when it is missing, no JSON object, or of another model.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint folder: it has no {CONFIG_FILE}. Give the folder that holds it, "
            "or write one with `inc make-checkpoint`."
        )
    config = _read_json(path)
    if config.get("model_type") != "olmoe":
        raise CheckpointError(
            f"{path}: model_type is {config.get('model_type')!r}, and only 'olmoe' can be read. "
            "Give an OLMoE checkpoint."
        )
    return config


def config_size(folder: Path, config: dict[str, Any], name: str) -> int:
    """The positive integer `name` of `config`. Raises: CheckpointError when it is none."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: {name} must be a positive integer, it is {value!r}. {_REWRITE}"
        )
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. {_REWRITE}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object. {_REWRITE}")
    return content
