"""The Baseline on real GPUs, one rank each: starts the whole job. Without two Hopper GPUs it is skipped."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.test_exchange import ROOT, missing, num_gpus


@pytest.mark.skipif(num_gpus() < 2, reason=f"the Baseline's job needs 2 GPUs, this machine has {num_gpus()}")
def test_the_baseline_is_right_and_refuses_what_it_cannot_run() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.gpu.baseline_program"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "all passed" in done.stdout


def test_the_baseline_is_right_through_relay_switches() -> None:
    if reason := missing("one_gpu"):
        pytest.skip(reason)
    program = ["tests.gpu.relayed_baseline_program", "--ranks", "2", "--placement", "one_gpu"]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "-m", *program]
    command = [sys.executable, "-m", "inc_runtime.mps", "--", *start]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
