"""CUDA MPS for placements whose PEs share a GPU: find the user's daemon, or run a command under one of our own.

    python -m inc_runtime.mps -- torchrun --nproc-per-node 6 ...

starts a daemon with private folders, runs the command with them, and stops the daemon. No setting of the GPU is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from inc_runtime.errors import ConfigurationError
from inc_runtime.launch import run_through_ctrl_c

CONTROL = "nvidia-cuda-mps-control"
ANSWER_LIMIT_S = 10.0


def _ask(question: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CONTROL],
        input=f"{question}\n",
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=ANSWER_LIMIT_S,
        check=False,
    )


def daemon_answers(environment: Mapping[str, str]) -> bool:
    """True if the MPS daemon of this environment's pipe folder is there and healthy."""
    if shutil.which(CONTROL) is None:
        return False
    try:
        answer = _ask("get_server_list", environment)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0 and "Cannot find" not in answer.stdout + answer.stderr


def require_daemon(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to share a GPU without MPS. Raises ConfigurationError with the command that mends it."""
    if not daemon_answers(environment):
        raise ConfigurationError(
            "PEs share a GPU, and no MPS daemon answers: they would be time-sliced, and a wait on the device would never end. "
            "Start the job with: python -m inc_runtime.mps -- torchrun ..."
        )


@contextmanager
def private_daemon() -> Iterator[dict[str, str]]:
    """An MPS daemon with folders of its own, stopped at the end. Yields the environment for its clients.

    Raises ConfigurationError where MPS is not installed or the daemon does not start.
    """
    if shutil.which(CONTROL) is None:
        raise ConfigurationError(f"{CONTROL} is not on the PATH: PEs cannot share a GPU. Install it, or use one GPU per PE.")
    folder = tempfile.mkdtemp(prefix="inc-mps-")
    environment = dict(os.environ)
    for name, part in (("CUDA_MPS_PIPE_DIRECTORY", "pipe"), ("CUDA_MPS_LOG_DIRECTORY", "log")):
        environment[name] = os.path.join(folder, part)
        os.makedirs(environment[name], mode=0o700)
    # Grid sizes share the SMs: a percentage would be read by NVSHMEM as a promise that it cannot check.
    environment["NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "1"
    try:
        subprocess.run([CONTROL, "-d"], env=environment, check=True, capture_output=True, timeout=ANSWER_LIMIT_S)
        require_daemon(environment)
        yield environment
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"the MPS daemon did not start: {error.stderr.decode(errors='replace').strip()}") from error
    finally:
        stop_daemon(environment)
        shutil.rmtree(folder, ignore_errors=True)


def stop_daemon(environment: Mapping[str, str]) -> None:
    """Ask the daemon of this pipe folder to quit. Returns whether or not it was there."""
    try:
        subprocess.run(
            [CONTROL],
            input="quit -t 5\n",
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=ANSWER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{CONTROL} did not quit within {ANSWER_LIMIT_S:.0f} s", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Run a command under a daemon of our own. Returns its exit code."""
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    with private_daemon() as environment:
        return run_through_ctrl_c(command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
