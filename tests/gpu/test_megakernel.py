"""The layer in one launch on a GPU, on every model, against float64; repeated bits; captured graphs. Skipped without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inc_runtime.config import CommunicationModel
from tests.gpu.test_exchange import JOB_LIMIT_S, ROOT, missing

MODELS = [m for m in CommunicationModel if m.selective]


def run_job(model: CommunicationModel, *properties: str) -> str:
    if reason := missing("one_gpu"):
        pytest.skip(reason)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "6"]
    program = ["-m", "tests.gpu.megakernel_program", *properties, "--placement", "one_gpu", "--model", model.value]
    command = [sys.executable, "-m", "inc_runtime.mps", "--", *torchrun, *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=JOB_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("bypass", [(), ("--local-bypass",)], ids=["", "local bypass"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.value)
def test_every_case_is_right(model, bypass):
    assert "FAILED" not in run_job(model, "right", *bypass)


def test_sums_in_rank_order_repeat_their_bits_over_50_jittered_calls():
    assert "FAILED" not in run_job(CommunicationModel.INC_ALL_TO_ALL, "bits")


def test_captured_calls_follow_changing_tokens_and_masks():
    assert "FAILED" not in run_job(CommunicationModel.INC_ALL_TO_ALL, "graph")


def test_a_logit_that_is_not_a_number_is_reported_by_every_pe():
    assert "FAILED" not in run_job(CommunicationModel.INC_ALL_TO_ALL, "fault")
