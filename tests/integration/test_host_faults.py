"""Processes that die, stall, or err in mid-run: every other one exits with an error that names it, within the limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inc_runtime.config import CommunicationModel
from tests.host_jobs import LIMIT_S, launch, shared_memory_left, torchrun, wait_for

Model = CommunicationModel
EXIT_S = 30
BUSY_S = 10
"""What a machine with more work than cores may add to the limit."""
NAMES = ["rank 0", "rank 1", "dispatch switch 0", "combine switch 0"]


class Job:
    """Two ranks and two switches that call a layer for ever."""

    def __init__(self, folder: Path, model: Model, *more: str, **environment: str) -> None:
        self.folder = folder
        self.processes = launch(4, ["forever", str(folder), model.value, "2", *more], folder, **environment)

    def await_running(self) -> None:
        def running() -> bool:
            dead = [pe for pe, process in enumerate(self.processes) if process.poll() is not None]
            assert not dead, f"PE {dead[0]} ended early: {self.stderr(dead[0])}"
            return all((self.folder / f"running-{pe}").exists() for pe in range(4))

        wait_for(running, 60, "the job never ran")

    def stderr(self, pe: int) -> str:
        return (self.folder / f"stderr-{pe}").read_text()

    def survivors_report(self, victim: int, text: str, limit_s: float) -> None:
        """Wait until the survivors have said `text`, within the limit, and then ended with an error.

        The end gets more time than the word: an interpreter that holds torch takes seconds to fold where cores are busy.
        """
        survivors = [pe for pe in range(4) if pe != victim]
        wait_for(
            lambda: all(text in self.stderr(pe) for pe in survivors), limit_s, f"{NAMES[victim]} was hit, expected {text!r}"
        )
        wait_for(lambda: all(self.processes[pe].poll() is not None for pe in survivors), EXIT_S, "they must end")
        for pe in survivors:
            assert self.processes[pe].returncode == 1, f"{NAMES[pe]} exited {self.processes[pe].returncode}"

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    jobs: list[Job] = []

    def begin(model: Model, *more: str, **environment: str) -> Job:
        jobs.append(Job(tmp_path, model, *more, **environment))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


@pytest.mark.parametrize(
    ("victim", "model"),
    [(1, Model.INC_ALL_TO_ALL), (2, Model.INC_ALL_TO_ALL), (3, Model.INC_ALL_TO_ALL), (2, Model.ALL_TO_ALL_PHASED)],
    ids=["rank", "dispatch switch", "combine switch", "relay"],
)
def test_a_killed_process_ends_all_others_within_the_limit_and_every_message_names_it(start, victim: int, model: Model) -> None:
    """A death is seen at once: the limit of the job is far off."""
    job = start(model, INC_WAIT_LIMIT_S="60")
    job.await_running()
    assert shared_memory_left() == [], "the files are unlinked as soon as all have mapped them"
    os.kill(job.processes[victim].pid, signal.SIGKILL)
    job.survivors_report(victim, f"{NAMES[victim]} (process {job.processes[victim].pid}) died", LIMIT_S)
    assert shared_memory_left() == []


@pytest.mark.parametrize(
    ("victim", "model"),
    [(1, Model.INC_ALL_TO_ALL), (1, Model.INC_ALL_TO_ALL_PHASED), (1, Model.ALL_TO_ALL), (3, Model.INC_ALL_TO_ALL)],
    ids=["rank", "rank, phased", "rank, relayed", "combine switch"],
)
def test_a_stalled_process_ends_all_others_at_the_limit_and_the_report_names_it(start, victim: int, model: Model) -> None:
    """SIGSTOP: the process lives, so only the limit can tell. Once it goes on, it stops as well."""
    job = start(model)
    job.await_running()
    stalled = job.processes[victim]
    stalled.send_signal(signal.SIGSTOP)
    job.survivors_report(victim, f"{NAMES[victim]} (process {stalled.pid}) is stopped", LIMIT_S + BUSY_S)
    reports = [job.stderr(pe) for pe in range(4) if pe != victim]
    assert any("ArrivalTimeout" in report and "INC_WAIT_LIMIT_S" in report for report in reports), reports
    waited = {float(found) for report in reports for found in re.findall(r"waited ([0-9.]+) s", report)}
    assert all(0.7 * LIMIT_S < seconds < LIMIT_S + BUSY_S for seconds in waited), waited
    assert shared_memory_left() == []
    stalled.send_signal(signal.SIGCONT)
    wait_for(lambda: stalled.poll() is not None, EXIT_S, "the process that goes on must see the abort word")
    assert stalled.returncode > 0 and "Aborted" in job.stderr(victim)


def test_an_exception_in_one_rank_ends_all_others_and_is_repeated_by_them(start) -> None:
    job = start(Model.INC_ALL_TO_ALL, "1")
    wait_for(lambda: all(process.poll() is not None for process in job.processes), 90, "one rank raised")
    assert all(process.returncode == 1 for process in job.processes)
    for pe in (0, 2, 3):
        assert "rank 1: ValueError: the user's own mistake" in job.stderr(pe)
    assert shared_memory_left() == []


def test_under_torchrun_a_killed_rank_ends_the_job_with_an_error_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    job = torchrun(4, ["forever", str(tmp_path), Model.INC_ALL_TO_ALL.value, "2"])
    try:
        wait_for(lambda: all((tmp_path / f"running-{pe}").exists() for pe in range(4)), 60, "the job never ran")
        listing = subprocess.run(["ps", "--ppid", str(job.pid), "-o", "pid=,args="], capture_output=True, text=True).stdout
        workers = [int(line.split()[0]) for line in listing.splitlines() if "tests.host_jobs" in line]
        assert len(workers) == 4, listing
        killed_at = time.monotonic()
        os.kill(workers[0], signal.SIGKILL)
        output, _ = job.communicate(timeout=30)
        assert (job.returncode != 0 and "SIGKILL" in output) or "-9" in output, output[-3000:]
        assert time.monotonic() - killed_at < 10
    finally:
        job.kill()
        job.wait()
    assert shared_memory_left() == []
