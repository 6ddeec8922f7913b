"""Which part of a server is named when several have ended before anyone looked."""

import signal
import subprocess
import sys

from megakernel.serve import Part, first_to_end


def ended(name: str, program: str) -> Part:
    process = subprocess.Popen([sys.executable, "-c", program])
    process.wait(30)
    return Part(name, process)


def test_of_two_that_have_ended_the_killed_one_is_named() -> None:
    refused = ended("dispatch-switch-0", "raise SystemExit(2)")
    killed = ended("combine-switch-0", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert first_to_end([refused, killed]) is killed and first_to_end([killed, refused]) is killed
    assert first_to_end([refused]) is refused and first_to_end([]) is None


def test_a_part_that_runs_has_not_ended() -> None:
    running = Part("vllm", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
    try:
        assert first_to_end([running]) is None
    finally:
        running.end(0.1)
