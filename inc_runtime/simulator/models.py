"""Shapes of one MoE layer of public models, as their own configuration files give them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inc_runtime.config import LayerShape, Router
from inc_runtime.errors import ConfigurationError


@dataclass(frozen=True)
class PublicModel:
    """One public model: the shape of its routed experts. Shared experts are local and add no traffic; they are not timed."""

    name: str
    shape: LayerShape
    num_moe_layers: int
    num_shared_experts: int
    configuration: str


PUBLIC_MODELS = {
    model.name: model
    for model in (
        PublicModel("olmoe_1b_7b", LayerShape(64, 8, 2048, 1024), 16, 0, "allenai/OLMoE-1B-7B-0924"),
        PublicModel("qwen3_235b_a22b", LayerShape(128, 8, 4096, 1536, renormalize=True), 94, 0, "Qwen/Qwen3-235B-A22B"),
        PublicModel("deepseek_v3", LayerShape(256, 8, 7168, 2048, Router.SIGMOID, True), 58, 1, "deepseek-ai/DeepSeek-V3"),
        PublicModel("kimi_k2", LayerShape(384, 8, 7168, 2048, Router.SIGMOID, True), 60, 1, "moonshotai/Kimi-K2-Instruct"),
    )
}


def shape_of(name: str) -> LayerShape:
    """The shape of a public model. Raises ConfigurationError with the known names."""
    try:
        return PUBLIC_MODELS[name].shape
    except KeyError:
        raise ConfigurationError(f"model.name = {name!r}: it must be one of {', '.join(PUBLIC_MODELS)}.") from None


def with_replicas(shape: LayerShape, num_replicas: int) -> LayerShape:
    """The layer whose experts are the copies of `shape`'s experts: copies of expert e are e * R to e * R + R - 1."""
    return replace(shape, num_experts=shape.num_experts * num_replicas)
