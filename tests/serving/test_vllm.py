"""vLLM itself: greedy tokens with and without the plugin are equal, over the engine and over the OpenAI API; it fails closed.

Needs vLLM in this environment: `make test-vllm` makes one. Each start of vLLM takes 30 s on an idle machine of two cores.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megakernel.vllm_checks import WORKER
from tests.serving.client import complete, complete_all
from tests.serving.models import prompts, write_float32_checkpoint
from tests.serving.offline import (
    ENGINE,
    ROOT,
    answers_of,
    answers_of_vllm_alone,
    answers_on_our_runtime,
    environment,
    free_port,
    generate,
    tokens,
)
from tests.serving.soak import CANCELLED_TOKENS, Soak, cancel

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-vllm` installs it beside and runs these", allow_module_level=True)

NUM_PROMPTS = int(os.environ.get("INC_TEST_PROMPTS", "20"))
RANKS = int(os.environ.get("INC_TEST_RANKS", "2"))
SOAK = int(os.environ.get("INC_TEST_SOAK", "60"))
pytestmark = pytest.mark.timeout(1500 + SOAK)
OPTIONS = "--dtype float32 --max-model-len 512 --max-num-batched-tokens 128 --max-num-seqs 8 --enforce-eager".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint in `model`, the prompts in `prompts.json`, and the answers of vLLM alone in `stock.json`."""
    folder = tmp_path_factory.mktemp("vllm")
    write_float32_checkpoint(folder / "model")
    (folder / "prompts.json").write_text(json.dumps(prompts(NUM_PROMPTS)))
    answers_of_vllm_alone(folder)
    return folder


@pytest.mark.parametrize(
    ("implementation", "ranks"),
    [("megakernel_inc", 1), ("megakernel_inc_phased", 2), ("megakernel", 2), ("megakernel_phased", 2), ("baseline", 2)],
)
def test_offline_tokens_are_those_of_vllm_alone(folder: Path, implementation: str, ranks: int) -> None:
    assert tokens(answers_on_our_runtime(folder, implementation, ranks)) == tokens(answers_of(folder, "stock"))


def test_requests_that_are_preempted_and_begin_again_give_the_same_tokens(folder: Path) -> None:
    """544 tokens of cache for eight requests of about 100 each. By vLLM's own counter, some were preempted."""
    cache = {"block_size": 32, "num_gpu_blocks_override": 17, "disable_log_stats": False}
    answers = answers_on_our_runtime(folder, "megakernel_inc", 1, says="preempted requests: [1-9]", **cache)
    assert tokens(answers) == tokens(answers_of(folder, "stock"))


def test_the_plugin_without_the_worker_that_checks_it_is_refused_before_weights_load(folder: Path) -> None:
    status, text = generate(folder, "closed", ENGINE, INC_VLLM="megakernel_inc", INC_JOB_ID="nobody")
    assert status != 0 and f"Add --worker-cls {WORKER}" in text
    assert "Loading safetensors" not in text


def test_a_job_without_switches_is_refused_before_weights_load(folder: Path) -> None:
    engine = ENGINE | {"worker_cls": WORKER}
    status, text = generate(folder, "alone", engine, INC_JOB_ID=f"nobody-{os.getpid()}", INC_START_LIMIT_S="2")
    assert status != 0 and "waited 2 s for dispatch-switch-0" in text
    assert "Loading safetensors" not in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tensor-parallel-size", "2"], "tensor parallelism = 2"),
        (["--quantization", "fp8"], "quantization = fp8"),
        (["-dp", "4"], "--ranks"),
    ],
)
def test_inc_serve_refuses_what_it_cannot_run_at_once(folder: Path, options: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "inc_runtime", "serve", str(folder / "model"), *options]
    start = time.monotonic()
    done = subprocess.run(command, env=environment(folder), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and reason in done.stderr
    assert time.monotonic() - start < 30


class Server:
    """`inc serve` as a user starts it."""

    def __init__(self, folder: Path, ranks: int) -> None:
        port = free_port()
        self.address, self.model = f"http://127.0.0.1:{port}", str(folder / "model")
        self.log = folder / "serve.log"
        command = [sys.executable, "-m", "inc_runtime", "serve", self.model, "--ranks", str(ranks), "--port", str(port)]
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*command, *OPTIONS], env=environment(folder), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_until_ready(self, limit_s: float = 900.0) -> None:
        """Return once it says so. Raises AssertionError with its log."""
        deadline = time.monotonic() + limit_s
        while "vLLM is ready" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-8000:]
            time.sleep(0.5)

    def switch_processes(self) -> list[int]:
        """Process ids of the switches, from their first lines."""
        lines = [line for line in self.log.read_text().splitlines() if "waits for a server" in line]
        return [int(line.rpartition("process ")[2].rstrip(")")) for line in lines]


def metric(address: str, name: str) -> float:
    """The sum of a metric of vLLM over all ranks."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def check_that_aborted_requests_end_early(server: Server) -> None:
    """Four long answers whose clients hang up at the first piece; vLLM generates only part of them, and then right ones."""
    before, clients = metric(server.address, "vllm:generation_tokens_total"), 4
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda number: cancel(server.address, server.model, f"abort {number}"), range(clients)))
    deadline = time.monotonic() + 60
    while metric(server.address, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    spent = metric(server.address, "vllm:generation_tokens_total") - before
    assert 0 < spent < 0.75 * clients * CANCELLED_TOKENS, f"{spent} tokens were generated for clients that had left"


def test_a_server_of_several_ranks_and_two_switches(folder: Path) -> None:
    """One start for all: equal tokens, metrics, cancellations, then a switch that is killed under load."""
    server = Server(folder, RANKS)
    try:
        server.wait_until_ready()
        answers = complete_all(server.address, server.model, prompts(NUM_PROMPTS))
        assert tokens(answers) == tokens(answers_of(folder, "stock"))
        with urllib.request.urlopen(f"{server.address}/metrics", timeout=30) as page:
            metrics = page.read().decode()
        for rank in range(RANKS):
            assert f'inc_moe_stage_seconds_total{{layer="1",rank="{rank}",stage="matmul_down"}}' in metrics
        check_that_aborted_requests_end_early(server)
        assert not Soak(server.address, server.model, seed=0).run(SOAK, server.process.pid if SOAK > 1000 else None)
        with ThreadPoolExecutor(4) as pool:
            running = [
                pool.submit(complete, server.address, server.model, f"{n}", max_tokens=400, timeout=120) for n in range(4)
            ]
            time.sleep(2.0)
            os.kill(server.switch_processes()[1], signal.SIGKILL)
            start = time.monotonic()
            errors = [future.exception() for future in running]
        assert all(isinstance(error, OSError) for error in errors), errors
        assert time.monotonic() - start < 20, "requests hung after a switch had died"
        assert server.process.wait(60) == 1
        log = server.log.read_text()
        assert "was killed by SIGKILL: the server ends" in log and "everything has ended" in log
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)


def test_a_signal_takes_everything_down(folder: Path) -> None:
    """Before vLLM is up, when most signals come."""
    server = Server(folder, 1)
    deadline = time.monotonic() + 60
    while len(server.switch_processes()) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    pids = server.switch_processes()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
