"""The plugin of vLLM: lets our layer run the MoE layers of a model that vLLM serves. Off unless INC_VLLM names an implementation.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. It only logs a plugin that fails to
import and would then serve its own MoE: so this module imports nothing that can fail, `register` raises, and the worker class
that must be given with it (`megakernel.vllm_worker.IncWorker`) registers by itself and checks what was built and what ran.
"""

from __future__ import annotations

import os


def register() -> None:
    """Let our method stand for vLLM's unquantised MoE in this process. Does nothing when off, or when done before.

    Raises: ConfigurationError for a version of vLLM that was not tried, or an implementation that does not exist.
    """
    if os.environ.get("INC_VLLM", "off") in ("", "off"):
        return
    from inc_runtime.environment import Environment
    from inc_runtime.errors import ConfigurationError
    from megakernel.vllm_checks import version_refusal

    Environment.read()
    import vllm
    from vllm.platforms import current_platform

    refusal = version_refusal(vllm.__version__, on_cpu=current_platform.is_cpu())
    if refusal:
        raise ConfigurationError(refusal)
    # vLLM keys compiled graphs by its own configuration, which does not show that the MoE inside is ours.
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"
    from megakernel.vllm_method import register_method

    register_method()
