"""The command `inc reproduce`: what this machine can run of the evaluation, from where it stood, and the page at the end.

`inc_runtime/cli.py` mounts it. Exit status: 0, or 1 where a step failed or a data file was refused, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from inc_runtime.doctor import Report, demo_heap_bytes, judge
from inc_runtime.errors import ConfigurationError
from inc_runtime.machine import Machine, look
from inc_runtime.placement import plan_placements
from inc_runtime.protocol import World
from results.data_files import ON_GPU, PUBLISHED, read_folder
from results.provenance import ROOT
from results.reproduce.page import Standing, write_page
from results.reproduce.runner import Places, Runner, duration
from results.reproduce.state import DONE, WAITING, Progress, State, key_of
from results.reproduce.steps import STEPS, Missing, Step, missing

WORLD = World(4)
CALIBRATED_BY = ("machine_figures", "expert_matmul", "collectives", "moe_layer", "speed_ups")
"""Measurements that the step `predicted` takes."""


def examine() -> tuple[Machine, Report]:
    """The machine, and what the doctor says of it for four ranks and two switches."""
    machine = look(demo_heap_bytes(WORLD))
    return machine, Report(WORLD, judge(machine, WORLD), plan_placements(machine, WORLD), len(machine.gpus))


def measured_files(places: Places) -> list[Path]:
    """The data files that a calibration takes; refused ones are left out."""
    files, _ = read_folder(places.data)
    return [file.path for file in files if file.measurement in CALIBRATED_BY and file.source in (ON_GPU, PUBLISHED)]


@dataclass
class Plan:
    """Every step with what is known of it: `missing` says why it cannot run here, `done` that it need not."""

    steps: Sequence[Step]
    missing: dict[str, Missing]
    done: set[str]

    def to_run(self, only: Sequence[str] | None, again: bool) -> list[Step]:
        """Steps to run now, in order: those that can, are wanted, and are not done (or are to be done `again`)."""
        wanted = [step for step in self.steps if only is None or step.name in only]
        return [step for step in wanted if step.name not in self.missing and (again or step.name not in self.done)]


def plan_of(report: Report, places: Places, state: State, steps: Sequence[Step]) -> Plan:
    """What can run and what is done."""
    has_data = bool(measured_files(places))
    found = {step.name: missing(step.need, report, has_data) for step in steps}
    lacking = {name: why for name, why in found.items() if why is not None}
    return Plan(steps, lacking, {step.name for step in steps if state.is_done(step.name, places.output)})


def listing(plan: Plan, runner: Runner, width: int) -> str:
    """The table of `--list`, and below it why steps cannot run, in lines of at most `width` columns."""
    lines = [f"{'step':34}{'needs':18}{'about':>8}  state"]
    for step in plan.steps:
        progress = runner.state.steps.get(step.name)
        state = "to do" if progress is None or progress.status in (DONE, WAITING) else f"{progress.status}, to do"
        state = "done" if step.name in plan.done else state
        state = f"{'done before, ' * (state == 'done')}cannot run here" if step.name in plan.missing else state
        lines.append(f"{step.name:34}{step.need.value:18}{duration(runner.estimate(step)):>8}  {state}")
    return "\n".join([*lines, *obstacles(plan, width)])


def obstacles(plan: Plan, width: int) -> list[str]:
    """Why steps cannot run here, each reason once, with its steps and the remedy."""
    steps_of: dict[Missing, list[str]] = {}
    for step in plan.steps:
        if step.name in plan.missing:
            steps_of.setdefault(plan.missing[step.name], []).append(step.name)
    lines = []
    for why, names in steps_of.items():
        remedy = f" > {why.remedy}" if why.remedy else ""
        text = f"not run: {', '.join(names)}: {why.reason}{remedy}"
        lines += textwrap.wrap(text, max(width, 60), subsequent_indent="    ", break_on_hyphens=False)
    return lines


@contextmanager
def alone(places: Places) -> Iterator[None]:
    """One reproduction at a time for each folder. Raises ConfigurationError while another runs."""
    places.run.mkdir(parents=True, exist_ok=True)
    with (places.run / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(f"another inc reproduce writes to {places.output}. Wait for it, or give --output.") from None
        yield


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the step in progress as Ctrl-C does: a scheduler sends it when a lease ends."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_names(only: Sequence[str], steps: Sequence[Step]) -> None:
    """Refuse names that no step has."""
    names = [step.name for step in steps]
    if unknown := [name for name in only if name not in names]:
        raise ConfigurationError(f"--only {' '.join(unknown)}: there is no such step. Steps: {', '.join(names)}.")


def run(options: argparse.Namespace, steps: Sequence[Step] = STEPS) -> int:
    """`inc reproduce`. Returns the exit status. Raises ConfigurationError for what cannot be done at all."""
    check_names(options.only or (), steps)
    places = Places((options.output or ROOT / "results").resolve())
    if sys.stderr.isatty():
        print("Looking at this machine ...", file=sys.stderr)
    machine, report = examine()
    key = key_of(machine)
    state = State.load(places.run, key)
    runner = Runner(places, state, lambda: measured_files(places))
    plan = plan_of(report, places, state, steps)
    if options.list:
        print(f"commit {key.commit}{' with changes' * bool(key.changes)}, on {key.machine}")
        print(listing(plan, runner, columns()))
        return 0
    with alone(places), ended_like_ctrl_c():
        chosen = plan.to_run(options.only, options.again)
        for step in chosen if options.again else ():
            state.set(step.name, replace(state.steps.get(step.name, Progress(WAITING)), status=WAITING))
        return reproduce(chosen, steps, runner, report)


def columns() -> int:
    """Width of what is printed."""
    return min(shutil.get_terminal_size((110, 24)).columns, 130)


def reproduce(chosen: Sequence[Step], steps: Sequence[Step], runner: Runner, report: Report) -> int:
    """Run the `chosen` of all `steps`, then write the page. Returns the exit status."""
    places, state = runner.places, runner.state
    print(f"{len(chosen)} steps, about {duration(sum(runner.estimate(step) for step in chosen))}", file=sys.stderr)
    try:
        failed = runner.run_all(chosen)
    except KeyboardInterrupt:
        ended = sum(1 for step in chosen if state.is_done(step.name, places.output))
        print(f"\ninc: stopped after {ended} of {len(chosen)} steps. inc reproduce goes on from there.", file=sys.stderr)
        return 130
    plan = plan_of(report, places, state, steps)
    page, refused = write_page(places, Standing(plan.steps, plan.missing, plan.done, state))
    print("\n".join(obstacles(plan, columns())), file=sys.stderr)
    for problem in refused:
        print(f"inc: error: {problem}", file=sys.stderr)
    for step in failed:
        print(f"inc: error: {step.name} failed: {state.steps[step.name].problem}", file=sys.stderr)
        print(f"     its output: {places.log(step)}", file=sys.stderr)
    print(f"wrote {page}")
    return 1 if failed or refused else 0
