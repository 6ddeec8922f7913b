"""vLLM's worker, with checks: our layers were built, they ran, and nothing of the model went another way. Give it by

    vllm serve MODEL --worker-cls megakernel.vllm_worker.IncWorker

The flag alone turns the plugin on (INC_VLLM then is megakernel_inc); INC_VLLM chooses another implementation, or `off`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

os.environ.setdefault("INC_VLLM", "megakernel_inc")

from vllm.platforms import current_platform

from inc_runtime.environment import Environment
from inc_runtime.errors import ConfigurationError, IncError
from megakernel.vllm_plugin import register

logger = logging.getLogger("vllm.inc_moe")

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

ON = Environment.read().vllm != "off"
if ON:
    register()


class LayerNotOurs(IncError):
    """The plugin is on, but a MoE layer of the model is or was run by vLLM: it would serve, but not on our runtime."""


class IncWorker(PlatformWorker):
    """The worker of the platform. Each method does what it did, and then makes sure."""

    _seen_a_step = not ON

    def init_device(self) -> None:
        """Refuse what we cannot serve before anything is loaded."""
        if ON and Environment.read().vllm_unsupported == "refuse":
            from megakernel.vllm_method import check_server

            check_server(self.vllm_config)
        super().init_device()

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load, then compare the MoE layers of the model with those of our runtime."""
        super().load_model(*args, **options)
        if ON:
            check_layers(self.model_runner.get_model())

    def execute_model(self, *args: Any, **options: Any) -> Any:
        """Run one step; the first one with tokens must have called each of our layers."""
        self._begin_step(args[0] if args else options.get("scheduler_output"))
        result = super().execute_model(*args, **options)
        if not self._seen_a_step:
            self._check_calls(args, options)
        return result

    def execute_dummy_batch(self) -> None:
        """Take part in a step of the others."""
        self._begin_step(None)
        super().execute_dummy_batch()

    def _begin_step(self, step: Any) -> None:
        if ON:
            from megakernel.vllm_method import runtime

            rank = runtime()
            if rank is not None:
                rank.begin_step(getattr(step, "total_num_scheduled_tokens", 0))

    def _check_calls(self, args: tuple, options: dict) -> None:
        from megakernel.vllm_method import runtime

        step = args[0] if args else options.get("scheduler_output")
        rank = runtime()
        if rank is None or not getattr(step, "total_num_scheduled_tokens", 0):
            return
        idle = [number for number in rank.layers if number not in rank.called]
        if idle:
            raise LayerNotOurs(f"vLLM ran a step without calling our layers {idle}. Report it with the model and vLLM's version.")
        self._seen_a_step = True

    def inc_trace(self, num_steps: int, folder: str) -> None:
        """Let the next `num_steps` steps leave their verbs in `folder`; call it by `collective_rpc`."""
        from megakernel.vllm_method import runtime

        rank = runtime()
        if rank is None:
            raise ConfigurationError("no layer of this model runs on our runtime: there is nothing to trace.")
        rank.metrics.trace_steps(num_steps, folder)


def check_layers(model: Any) -> None:
    """Refuse a model with a MoE layer that is not ours, or, unless the user lets them go, with none at all.

    Raises: LayerNotOurs.
    """
    from megakernel.vllm_method import IncFusedMoEMethod, runtime

    environment = Environment.read()
    methods = {
        name: module.quant_method
        for name, module in model.named_modules()
        if hasattr(module, "w13_weight") or hasattr(module, "w13_weight_packed") or hasattr(module, "w13_qweight")
    }
    others = [name for name, method in methods.items() if getattr(method, "_number", None) is None]
    rank = runtime()
    ours = 0 if rank is None else len(rank.layers)
    stray = [name for name in others if not isinstance(methods[name], IncFusedMoEMethod)]
    if environment.vllm_unsupported == "leave" and not stray:
        logger.info("INC runs %d of the %d MoE layers of this model", ours, len(methods))
        return
    if others or not methods or ours != len(methods):
        what = f"{len(methods)} MoE layers, of which {ours} run on ours" if methods else "no MoE layer"
        raise LayerNotOurs(
            f"INC_VLLM = {environment.vllm}, but the model has {what}{': not ' + ', '.join(others[:3]) if others else ''}. "
            "Unset INC_VLLM for this model."
        )
