"""vLLM's offline engine, as the tests start it: its environment, a process per rank, and our switches beside them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megakernel.serve import name_vllm
from megakernel.vllm_checks import WORKER

ROOT = Path(__file__).resolve().parents[2]
ENGINE = {"enforce_eager": True}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What several ranks on one machine need; our own variables only as the test says."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INC_")}
    one = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    result = kept | one | {"VLLM_NO_USAGE_STATS": "1"} | more
    name_vllm(folder / "names", result)
    return result


def generate(folder: Path, name: str, engine: dict, **more: str) -> tuple[int, str]:
    """One process: answers to its share of `prompts.json` in `NAME.json`. Returns its exit status and what it printed."""
    command = [sys.executable, "-m", "tests.serving.generate", str(folder / "model"), str(folder / "prompts.json")]
    command += [str(folder / f"{name}.json"), json.dumps(engine)]
    done = subprocess.run(
        command,
        env=environment(folder, **more),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    return done.returncode, done.stdout


def answers_of(folder: Path, name: str) -> list[dict]:
    """What a process wrote."""
    return json.loads((folder / f"{name}.json").read_text())


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def answers_of_vllm_alone(folder: Path, **engine: object) -> list[dict]:
    """The answers without our plugin, by one process."""
    status, text = generate(folder, "stock", ENGINE | engine, INC_VLLM="off")
    assert status == 0, text
    return answers_of(folder, "stock")


def switches(folder: Path, job_id: str, ranks: int) -> list[subprocess.Popen]:
    """One switch of each role."""
    command = [sys.executable, "-m", "inc_runtime", "switch", "--ranks", str(ranks), "--role"]
    started = environment(folder, INC_JOB_ID=job_id)
    return [subprocess.Popen([*command, role], env=started, cwd=ROOT) for role in ("dispatch", "combine")]


def answers_on_our_runtime(
    folder: Path, implementation: str, ranks: int, *, row_format: str = "float32", says: str = "", **engine: object
) -> list[dict]:
    """The answers, in the order of the prompts, of `ranks` data-parallel processes and two switches.

    All must end well, and each rank say that it is ready, and something that matches `says`.
    """
    job_id = f"test-{implementation}-{ranks}-{os.getpid()}"
    own = {"INC_VLLM": implementation, "INC_JOB_ID": job_id, "INC_START_LIMIT_S": "600"}
    spread = {"VLLM_DP_SIZE": str(ranks), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}
    options = ENGINE | {"worker_cls": WORKER, "enable_expert_parallel": ranks > 1} | engine
    names = [f"{implementation}-{rank}-of-{ranks}" for rank in range(ranks)]
    parts = switches(folder, job_id, ranks) if implementation != "baseline" else []
    try:
        with ThreadPoolExecutor(ranks) as pool:
            started = [
                pool.submit(generate, folder, name, options, **own, **(spread | {"VLLM_DP_RANK": str(rank)} if ranks > 1 else {}))
                for rank, name in enumerate(names)
            ]
            for rank, future in enumerate(started):
                status, text = future.result()
                assert status == 0, text
                assert f"INC rank {rank} of {ranks}: ready, {implementation}, rows {row_format}" in text
                assert re.search(says, text), text
        assert [part.wait(30) for part in parts] == [0] * len(parts), "a switch did not end with the server"
    finally:
        for part in parts:
            part.kill()
    shares = [answers_of(folder, name) for name in names]
    return [shares[number % ranks][number // ranks] for number in range(sum(map(len, shares)))]
