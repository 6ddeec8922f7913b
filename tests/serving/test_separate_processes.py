"""Ranks and switches that were started one by one: they meet by the job id, serve in lock step, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megakernel.reference import moe_layer_reference, relative_error, route_reference
from tests.serving.rank_process import NUM_LAYERS, PADDING, SHAPE, draw
from tests.simulate import Layer

ROOT = Path(__file__).resolve().parents[2]
STEPS = [[5, 0], [0, 0], [21, 1], [1, 21], [2, 3], [0, 7]]
"""Idle ranks, idle steps, ragged steps of one and of several microbatches: INC_VLLM_MICROBATCH is 4."""


class Job:
    """Processes of one job, with a job id and a limit of their own. Ends what is left at the end."""

    def __init__(self, folder: Path, job_id: str, implementation: str = "megakernel_inc") -> None:
        limits = {"INC_WAIT_LIMIT_S": "60", "INC_START_LIMIT_S": "60", "INC_VLLM_MICROBATCH": "4", "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | limits | {"INC_JOB_ID": job_id, "INC_VLLM": implementation}
        self.environment.pop("RANK", None)
        self.folder = folder
        self.processes: list[subprocess.Popen] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        """Start `python -m ARGUMENTS`."""
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=self.environment | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def switch(self, role: str, ranks: int = 2, *more: str) -> subprocess.Popen:
        return self.start("inc_runtime", "switch", "--role", role, "--ranks", str(ranks), *more)

    def rank(
        self, rank: int, steps: list[list[int]], num_ranks: int = 2, repeat: int = 1, **environment: str
    ) -> subprocess.Popen:
        output = str(self.folder / f"output-{rank}.npz")
        arguments = ("tests.serving.rank_process", str(rank), str(num_ranks), output, json.dumps(steps), str(repeat))
        return self.start(*arguments, **environment)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def say(process: subprocess.Popen) -> tuple[int, str]:
    """Exit status and everything it printed."""
    text, _ = process.communicate(timeout=90)
    return process.returncode, text


def expected(step: int, rank: int, count: int) -> np.ndarray:
    tokens, logits = draw(step, rank, count)
    ids, weights = route_reference(logits, SHAPE, None)
    rows = tokens.astype(np.float64)
    for number in range(NUM_LAYERS):
        layer = Layer(SHAPE, seed=number)
        rows = moe_layer_reference(rows, ids, weights, layer.gate_up, layer.down, num_experts=SHAPE.num_experts)
    return rows


@pytest.mark.parametrize("implementation", ["megakernel", "megakernel_phased", "megakernel_inc", "megakernel_inc_phased"])
def test_steps_of_ragged_idle_and_padded_ranks_give_the_reference(tmp_path: Path, implementation: str) -> None:
    with Job(tmp_path, f"steps-{implementation}-{os.getpid()}", implementation) as job:
        switches = [job.switch("dispatch"), job.switch("combine", 2)]
        ranks = [job.rank(rank, STEPS) for rank in range(2)]
        for process in [*ranks, *switches]:
            status, text = say(process)
            assert status == 0, text
    received = 0
    for rank in range(2):
        results = np.load(tmp_path / f"output-{rank}.npz")
        received += int(results["expert_rows"])
        for step, counts in enumerate(STEPS):
            rows, wanted = results[str(step)], expected(step, rank, counts[rank])
            assert rows.dtype == np.float32 and len(rows) == counts[rank] + PADDING
            assert not rows[counts[rank] :].any(), "padding came back as something"
            if counts[rank]:
                assert relative_error(rows[: counts[rank]].astype(np.float64), wanted) < 2e-6
    real = sum(map(sum, STEPS))
    assert real <= received <= 2 * real, "padding was sent to experts"


def test_several_switches_of_a_role_are_found_by_the_ranks(tmp_path: Path) -> None:
    with Job(tmp_path, f"planes-{os.getpid()}") as job:
        planes = ("--dispatch-switches", "2", "--combine-switches", "2")
        for role in ("dispatch", "combine"):
            for plane in "01":
                job.switch(role, 2, "--plane", plane, *planes)
        for rank in range(2):
            job.rank(rank, STEPS[:3])
        for process in job.processes:
            status, text = say(process)
            assert status == 0, text


def test_a_second_server_on_the_same_switches_is_refused_by_name(tmp_path: Path) -> None:
    with Job(tmp_path, f"second-{os.getpid()}") as job:
        job.switch("dispatch", 1), job.switch("combine", 1)
        first = job.rank(0, [[1]], num_ranks=1, repeat=100_000)
        assert first.stdout is not None and first.stdout.readline() == "joined\n"
        status, text = say(job.rank(0, [[1]], num_ranks=1))
        assert status != 0 and "ConfigurationError" in text
        assert f"has a rank-0 already: process {first.pid}" in text and "INC_JOB_ID" in text
        status, text = say(job.switch("dispatch", 1))
        assert status == 2 and f"process {job.processes[0].pid}" in text


def test_a_world_that_does_not_match_the_switches_is_refused_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, f"world-{os.getpid()}") as job:
        job.switch("dispatch", 3), job.switch("combine", 3)
        start = time.monotonic()
        status, text = say(job.rank(0, [[1]], num_ranks=1))
        assert status != 0 and "was started for 3 ranks" in text and "the server has 1 ranks" in text
        assert time.monotonic() - start < 40


def test_a_rank_without_switches_says_which_it_misses(tmp_path: Path) -> None:
    with Job(tmp_path, f"alone-{os.getpid()}") as job:
        status, text = say(job.rank(0, [[1]], num_ranks=1, INC_START_LIMIT_S="1"))
        assert status != 0 and "waited 1 s for dispatch-switch-0" in text and "inc switch" in text


def test_a_process_without_a_job_id_is_told_to_set_one(tmp_path: Path) -> None:
    with Job(tmp_path, "") as job:
        status, text = say(job.switch("dispatch"))
        assert status == 2 and "INC_JOB_ID is not set" in text


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("role", [0, 1], ids=["dispatch", "combine"])
def test_a_switch_that_ends_under_a_running_server_ends_the_ranks_with_its_name(
    tmp_path: Path, role: int, how: signal.Signals
) -> None:
    with Job(tmp_path, f"end-{role}-{how}-{os.getpid()}") as job:
        switches = [job.switch("dispatch", 1), job.switch("combine", 1)]
        rank = job.rank(0, [[1]], num_ranks=1, repeat=100_000)
        assert rank.stdout is not None and rank.stdout.readline() == "joined\n"
        time.sleep(0.5)
        start = time.monotonic()
        switches[role].send_signal(how)
        status, text = say(rank)
        assert status != 0 and f"{('dispatch', 'combine')[role]} switch 0" in text
        assert time.monotonic() - start < 10, "the wait limit is 60 s: this must not need it"
        other, text = say(switches[1 - role])
        assert other != 0


def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    with Job(tmp_path, f"clean-{os.getpid()}") as job:
        folder = tmp_path / "shm"
        folder.mkdir()
        job.environment["INC_SHARED_MEMORY_FOLDER"] = str(folder)
        job.switch("dispatch", 1), job.switch("combine", 1)
        job.rank(0, [[1]], num_ranks=1)
        for process in job.processes:
            status, text = say(process)
            assert status == 0, text
        assert not list(folder.iterdir())
