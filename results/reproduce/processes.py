"""Run a command in a process group of its own, and end it with everything that it has started."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from inc_runtime.errors import IncError
from results.provenance import ROOT

POLL_S = 0.2
GRACE_S = 20.0
"""How long an interrupted step may take to stop its processes before it is killed."""


class StepFailed(IncError):
    """A step ended with an error, took too long, or left something else than it should."""


def run_command(words: list[str], output, limit: float, begin: float, tick: Callable[[float], object]) -> None:
    """Run a command in a process group of its own, calling `tick(seconds since begin)`. Raises StepFailed."""
    output.write(f"$ {shlex.join(words)}\n")
    output.flush()
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    end = time.monotonic() + limit
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                raise StepFailed("it did not end in time and was stopped.")
            tick(time.monotonic() - begin)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    finally:
        end_all(process)
    if process.returncode:
        how = f"exit status {process.returncode}"
        if process.returncode < 0:
            how = f"killed by {signal.Signals(-process.returncode).name}"
        raise StepFailed(f"{how}.")


def end_all(process: subprocess.Popen) -> None:
    """End a command and all that it has started: as Ctrl-C would, then for good. Does nothing where all have ended."""
    family = descendants(process.pid)  # torchrun puts its workers into sessions of their own
    for number, patience in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, GRACE_S / 2), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        for pid, started in family if number != signal.SIGINT else ():
            if start_of(pid) == started:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            process.poll()
            if not group_exists(process.pid):
                if all(start_of(pid) != started for pid, started in family):
                    return
                deadline = min(deadline, time.monotonic() + 0.5)  # nobody is left to end the others
            time.sleep(0.02)


def group_exists(group: int) -> bool:
    """True while a process of this group is left."""
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def fields_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, from the state on; empty where the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def start_of(pid: int) -> str:
    """When a process was started, which tells it from a later one of the same number; "" where it has ended."""
    fields = fields_of(pid)
    return fields[19] if fields else ""


def descendants(pid: int) -> list[tuple[int, str]]:
    """Number and start of all processes below one."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := fields_of(int(folder.name)):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += [(child, start_of(child)) for child in below]
        queue += below
    return [(child, started) for child, started in found if started]
