"""INC all-to-all on real GPUs: parity with the role programs, a long run of hashed tokens, faults that end with the right words.

Each test starts a whole job: MPS where PEs share a GPU, torchrun, one process per PE. Without a GPU they are skipped.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inc_runtime.mps import CONTROL

ROOT = Path(__file__).resolve().parents[2]
JOB_LIMIT_S = 280


def num_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return found.stdout.count("GPU ") if found.returncode == 0 else 0


def missing(placement: str) -> str:
    """Why this machine cannot run the placement; empty where it can."""
    needed = {"one_gpu": 1, "scale_model": 2}[placement]
    if num_gpus() < needed:
        return f"{placement} needs {needed} GPU(s), this machine has {num_gpus()}"
    for module in ("nvshmem", "cuda.bindings"):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            return f"the Python package {module} is not installed"
    return "" if shutil.which(CONTROL) else f"{CONTROL} is not on the PATH"


def run_job(placement: str, *properties: str) -> str:
    if reason := missing(placement):
        pytest.skip(reason)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "6"]
    program = ["-m", "tests.gpu.exchange_program", *properties, "--placement", placement]
    command = [sys.executable, "-m", "inc_runtime.mps", "--", *torchrun, *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=JOB_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("placement", ["one_gpu", "scale_model"])
def test_every_region_equals_that_of_the_role_programs_after_every_call(placement):
    assert "FAILED" not in run_job(placement, "parity")


def test_with_local_bypass_regions_rows_and_faults_are_right_too():
    assert "FAILED" not in run_job("one_gpu", "parity", "stress", "faults", "--local-bypass")


@pytest.mark.parametrize("placement", ["one_gpu", "scale_model"])
def test_nvshmem_verbs_leave_the_same_bytes_as_direct_stores(placement):
    assert "FAILED" not in run_job(placement, "nvshmem")


def test_no_row_is_wrong_in_a_hundred_thousand_delayed_microbatches():
    assert "FAILED" not in run_job("scale_model", "stress", "--microbatches", "100000")


def test_an_absent_rank_a_wrong_bound_and_a_bad_expert_are_reported_by_name():
    text = run_job("one_gpu", "faults")
    assert "rank 1 (its flag holds" in text and "brought bound_tokens = " in text and "to expert 99" in text
