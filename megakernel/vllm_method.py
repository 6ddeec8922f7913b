"""vLLM's unquantised MoE method, replaced: vLLM loads the weights and calls us with hidden states and router logits.

The class stands for vLLM's own of the same role (an "out-of-tree" class, by vLLM's registry). Per layer there is one opaque
torch operator, so that torch.compile does not look inside. A layer that we cannot run stays vLLM's, if the user wants that.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from inc_runtime.config import Implementation, LayerShape
from inc_runtime.environment import Environment
from inc_runtime.errors import ConfigurationError
from megakernel.vllm_checks import LayerFacts, ServerFacts, layer_refusal, server_refusal
from megakernel.vllm_rank import Placement, RankRuntime, num_real_rows, step_bound, tokens_of_ranks

logger = logging.getLogger("vllm.inc_moe")

_library = torch.library.Library("inc_moe", "FRAGMENT")
_runtime: RankRuntime | None = None
_reasons: set[str] = set()
"""Why layers were left to vLLM: each is said once, however many layers the model has."""


def runtime() -> RankRuntime | None:
    """The rank that lives in this process, once a layer was made."""
    return _runtime


def register_method() -> None:
    """Let the class below stand for vLLM's. Does nothing if it does already."""
    name = UnquantizedFusedMoEMethod.__name__
    if name not in op_registry_oot:
        UnquantizedFusedMoEMethod.register_oot(IncFusedMoEMethod)
    elif op_registry_oot[name] is not IncFusedMoEMethod:
        other = op_registry_oot[name].__module__
        raise ConfigurationError(f"another plugin, {other}, replaces vLLM's MoE. Set VLLM_PLUGINS so that one of the two loads.")


def server_facts(config: Any) -> ServerFacts:
    """The facts of vLLM's configuration."""
    model, parallel = config.model_config, config.parallel_config
    return ServerFacts(
        model_type=getattr(model.hf_config, "model_type", "unknown"),
        quantization=model.quantization,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=getattr(parallel, "prefill_context_parallel_size", 1),
        data_parallel=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        load_balancing=parallel.enable_eplb,
        lora=config.lora_config is not None,
        two_batches=bool(getattr(parallel, "enable_dbo", False)),
        worker=parallel.worker_cls,
        platform=current_platform.device_type,
        dtype=str(model.dtype).removeprefix("torch."),
        hopper=current_platform.is_cuda() and current_platform.is_device_capability(90),
        implementation=Environment.read().vllm,
    )


def check_server(config: Any) -> None:
    """Refuse a server that we cannot run. Raises ConfigurationError."""
    refusal = server_refusal(server_facts(config))
    if refusal:
        raise ConfigurationError(f"INC_VLLM = {Environment.read().vllm}: {refusal}")


def layer_facts(layer: Any, moe: Any) -> LayerFacts:
    """The facts of one MoE layer."""
    activation, routing = getattr(layer, "activation", "silu"), getattr(moe, "routing_method", None)
    return LayerFacts(
        activation=getattr(activation, "value", activation),
        scoring=getattr(layer, "scoring_func", "softmax"),
        routing=getattr(routing, "name", ""),
        grouped_top_k=bool(getattr(layer, "use_grouped_topk", False)),
        custom_routing=getattr(layer, "custom_routing_function", None) is not None,
        selection_bias=getattr(layer, "e_score_correction_bias", None) is not None,
        expert_bias=bool(getattr(moe, "has_bias", False)),
        weights_on_input=bool(getattr(layer, "apply_router_weight_on_input", False)),
        scaling_factor=float(getattr(layer, "routed_scaling_factor", 1.0)),
        clamped=getattr(layer, "swiglu_limit", None) is not None,
    )


def _start_runtime(config: Any) -> RankRuntime:
    """Become a rank: where this process stands is what vLLM's expert-parallel group says."""
    global _runtime
    if _runtime is None:
        group = get_ep_group()
        gpu = torch.cuda.current_device() if current_platform.is_cuda() else None
        placement = Placement(group.rank_in_group, group.world_size, group.cpu_group, gpu)
        largest = config.scheduler_config.max_num_batched_tokens
        implementation = Implementation(Environment.read().vllm)
        _runtime = RankRuntime(implementation, placement, largest, config.model_config.dtype)
    return _runtime


class IncFusedMoEMethod(UnquantizedFusedMoEMethod):
    """One MoE layer of the model on our runtime; `_number` is its number there, None where the layer was left to vLLM."""

    _number: int | None = None

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **attributes):
        """Decide whether we run this layer, and announce it, before vLLM makes room for its weights."""
        config = get_current_vllm_config()
        environment = Environment.read()
        refusal = server_refusal(server_facts(config)) or layer_refusal(layer_facts(layer, self.moe))
        if refusal and environment.vllm_unsupported == "refuse":
            raise ConfigurationError(f"INC_VLLM = {environment.vllm}, {layer.layer_name}: {refusal}")
        if refusal:
            if refusal not in _reasons:
                logger.warning("INC leaves %s, and others of its kind, to vLLM: %s", layer.layer_name, refusal)
            _reasons.add(refusal)
        else:
            shape = LayerShape(
                layer.global_num_experts,
                layer.top_k,
                hidden_size,
                intermediate_size_per_partition,
                renormalize=bool(layer.renormalize),
            )
            rank = _start_runtime(config)
            self._number = rank.add_layer(shape)
            if self._number == 0:
                where = f"rank {rank.placement.rank} of {rank.placement.num_ranks}"
                logger.info("INC %s: ready, %s, rows %s", where, environment.vllm, rank.pipeline.row_format.value)
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **attributes
        )

    def process_weights_after_loading(self, layer):
        """Hand the loaded weights to the rank, as they are."""
        if self._number is None:
            super().process_weights_after_loading(layer)
            return
        assert _runtime is not None
        self._check_experts(layer)
        _runtime.load(self._number, layer.w13_weight.data, layer.w2_weight.data)

    def _check_experts(self, layer) -> None:
        """Refuse another placement of the experts than ours."""
        assert _runtime is not None and self._number is not None
        shape, placement = _runtime.shapes[self._number], _runtime.placement
        own = list(shape.experts_of_rank(placement.rank, placement.num_ranks))
        expert_map = getattr(layer, "_expert_map", None)
        seen = own if expert_map is None else torch.argsort(expert_map)[(expert_map < 0).sum() :].tolist()
        if seen != own or len(layer.w13_weight) != len(own):
            raise ConfigurationError(
                f"{layer.layer_name}: vLLM put experts {seen} on rank {placement.rank}, ours would be {own}. "
                "Leave out --expert-placement-strategy."
            )

    @property
    def is_monolithic(self) -> bool:
        return self._number is not None or super().is_monolithic

    @property
    def supports_internal_mk(self) -> bool:
        """True: this method moves the rows between ranks itself, and vLLM's runner must not gather them before."""
        return self._number is not None or super().supports_internal_mk

    def apply_monolithic(self, layer, x, router_logits, *others, **more):
        """Run the layer: [N, H] and [N, E] to [N, H]."""
        if self._number is None:
            return super().apply_monolithic(layer, x, router_logits, *others, **more)
        return torch.ops.inc_moe.layer(x, router_logits, self._number)


def _run_layer(hidden_states: torch.Tensor, router_logits: torch.Tensor, number: int) -> torch.Tensor:
    assert _runtime is not None
    context, num_rows = get_forward_context(), len(hidden_states)
    tokens = tokens_of_ranks(context, _runtime.placement, num_rows)
    bound = step_bound(tokens, _runtime.pipeline.bound_tokens)
    return _runtime.run(number, hidden_states, router_logits, num_real_rows(context, num_rows), bound)


_library.define("layer(Tensor hidden_states, Tensor router_logits, int number) -> Tensor")
_library.impl("layer", _run_layer, "CompositeExplicitAutograd")
torch.library.register_fake("inc_moe::layer", lambda hidden_states, router_logits, number: torch.empty_like(hidden_states))
