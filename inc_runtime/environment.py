"""All environment variables of the project, in one place. `Environment.read()` refuses values that are not numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from inc_runtime.config import Implementation
from inc_runtime.errors import ConfigurationError


@dataclass(frozen=True)
class Environment:
    """`rank`, `world_size`, `local_world_size`, `master_addr`, `master_port`, `run_id` and `restart_count` are set by torchrun.

    `job_id` (INC_JOB_ID): the job of a process that torchrun did not start, a name of the user's choice.
    `wait_limit_s` (INC_WAIT_LIMIT_S): how long a wait may last once a microbatch has begun.
    `start_limit_s` (INC_START_LIMIT_S): how long a PE waits for the other processes of its job to appear.
    `shared_memory_folder` (INC_SHARED_MEMORY_FOLDER): where the host backend keeps its heaps until all are mapped.
    `trace` (INC_TRACE): 1 records every verb.
    `cache_folder` (INC_CACHE_FOLDER): where compiled kernels are kept.
    `vllm` (INC_VLLM): off, or the implementation that runs the MoE layers of vLLM.
    `vllm_unsupported` (INC_VLLM_UNSUPPORTED): refuse (default) or leave, to vLLM, the MoE layers that we cannot run.
    `vllm_microbatch` (INC_VLLM_MICROBATCH): m_b under vLLM; 0: what was best on the backend.
    `vllm_log_s` (INC_VLLM_LOG_S): seconds between lines of metrics in vLLM's log; 0 writes none.
    `trace_steps` (INC_TRACE_STEPS), `trace_folder` (INC_TRACE_FOLDER): the first N steps with requests leave their verbs there.
    """

    rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    run_id: str
    restart_count: int
    wait_limit_s: float
    start_limit_s: float
    shared_memory_folder: str
    trace: bool
    cache_folder: str
    job_id: str = ""
    vllm: str = "off"
    vllm_unsupported: str = "refuse"
    vllm_microbatch: int = 0
    vllm_log_s: float = 10.0
    trace_steps: int = 0
    trace_folder: str = "out/serve"

    @classmethod
    def read(cls) -> Environment:
        return cls(
            rank=int(_number("RANK", 0)),
            world_size=int(_number("WORLD_SIZE", 1)),
            local_world_size=int(_number("LOCAL_WORLD_SIZE", _number("WORLD_SIZE", 1))),
            master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(_number("MASTER_PORT", 0)),
            run_id=os.environ.get("TORCHELASTIC_RUN_ID", "none"),
            restart_count=int(_number("TORCHELASTIC_RESTART_COUNT", 0)),
            wait_limit_s=_seconds("INC_WAIT_LIMIT_S", 60.0),
            start_limit_s=_seconds("INC_START_LIMIT_S", 120.0),
            shared_memory_folder=os.environ.get("INC_SHARED_MEMORY_FOLDER", "/dev/shm"),
            trace=bool(_number("INC_TRACE", 0)),
            cache_folder=os.environ.get("INC_CACHE_FOLDER", os.path.expanduser("~/.cache/inc-moe")),
            job_id=os.environ.get("INC_JOB_ID", ""),
            vllm=_choice("INC_VLLM", "off", ["off", *(each.value for each in Implementation)]),
            vllm_unsupported=_choice("INC_VLLM_UNSUPPORTED", "refuse", ["refuse", "leave"]),
            vllm_microbatch=int(_number("INC_VLLM_MICROBATCH", 0)),
            vllm_log_s=_number("INC_VLLM_LOG_S", 10.0),
            trace_steps=int(_number("INC_TRACE_STEPS", 0)),
            trace_folder=os.environ.get("INC_TRACE_FOLDER", "out/serve"),
        )

    @property
    def under_torchrun(self) -> bool:
        return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _seconds(name: str, default: float) -> float:
    value = _number(name, default)
    if not 0 < value < 1e7:
        raise ConfigurationError(f"{name} = {value}: it must be a number of seconds above 0 and below 10,000,000.")
    return value


def require_job_id(environment: Environment) -> None:
    """Refuse a process that was started on its own and does not say to which job it belongs."""
    if not environment.job_id:
        raise ConfigurationError(
            "INC_JOB_ID is not set: processes that are not started together need one. Set it to the same name, of your choice, "
            "for the switches and for the server."
        )


def _choice(name: str, default: str, choices: list[str]) -> str:
    text = os.environ.get(name) or default
    if text not in choices:
        raise ConfigurationError(f"{name} = {text!r}: it must be one of {', '.join(choices)}. Unset it or correct it.")
    return text


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} = {text!r}: it must be a number. Unset it or correct it.") from None
