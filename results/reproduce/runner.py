"""Run the steps one after another, with a bar and a time limit; what a step leaves joins the results only when all went well."""

from __future__ import annotations

import datetime
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from inc_runtime.errors import IncError
from results.data_files import read_data_file
from results.provenance import commit_name
from results.reproduce.processes import StepFailed, run_command
from results.reproduce.state import DONE, FAILED, INTERRUPTED, RUNNING, WAITING, Progress, State, digest
from results.reproduce.steps import COMMIT, DATA, FOLDER, PYTHON, Step

PLACE_OF_SUFFIX = {".csv": "data", ".md": "tables", ".png": "figures"}


@dataclass(frozen=True)
class Places:
    """Folders of a reproduction. `run` holds state, logs, work in progress, and the files of the run before."""

    output: Path

    @property
    def run(self) -> Path:
        return self.output / "run"

    @property
    def data(self) -> Path:
        return self.output / "data"

    @property
    def previous(self) -> Path:
        return self.run / "previous"

    def log(self, step: Step) -> Path:
        """What the commands of a step print."""
        return self.run / "logs" / f"{step.name}.log"


def limit_s(step: Step) -> float:
    """After so long a step hangs: ten times its estimate, and a few minutes to compile and start."""
    return 10 * step.seconds + 300


def final_name(template: str, commit: str) -> str:
    """A name of the table of steps with the commit in it."""
    return template.replace(COMMIT, commit)


def words_of(command: str, commit: str, folder: Path, data: Sequence[Path]) -> list[str]:
    """A command of the table as the words that are run."""
    words = []
    for word in shlex.split(command):
        if word == DATA:
            words += [str(path) for path in data]
        else:
            words.append(word.replace(PYTHON, sys.executable).replace(COMMIT, commit).replace(FOLDER, str(folder)))
    return words


class Runner:
    """Runs steps one after another into `places`. `data` gives the measured data files of the moment."""

    def __init__(self, places: Places, state: State, data: Callable[[], list[Path]]) -> None:
        self.places, self.state, self.data = places, state, data

    def run_all(self, steps: Sequence[Step]) -> list[Step]:
        """Run `steps`; a step that fails does not stop the others. Returns those that failed. KeyboardInterrupt ends it."""
        failed = []
        total = sum(self.estimate(step) for step in steps)
        with tqdm(total=round(total), unit="s", delay=1, leave=False, file=sys.stderr, disable=None) as bar:
            for number, step in enumerate(steps, 1):
                estimate = self.estimate(step)
                bar.set_description(f"{number}/{len(steps)} {step.name}")
                tick = partial(advance, bar, bar.n, estimate)
                tqdm.write(f"[{number}/{len(steps)}] {step.name}: {step.shows}; about {duration(estimate)}", file=sys.stderr)
                problem = self.run_step(step, tick)
                tick(estimate)
                spent = duration(self.state.steps[step.name].seconds)
                tqdm.write(f"    {f'failed after {spent}: {problem}' if problem else f'done in {spent}'}", file=sys.stderr)
                failed += [step] if problem else []
        return failed

    def estimate(self, step: Step) -> float:
        """Seconds that the step took here before, or else those of the table."""
        before = self.state.steps.get(step.name)
        return before.seconds if before and before.status in (DONE, WAITING) and before.seconds else step.seconds

    def run_step(self, step: Step, tick: Callable[[float], object]) -> str:
        """Run one step and note how it ended. Returns what went wrong, or "". On KeyboardInterrupt its processes are ended."""
        started, begin = datetime.datetime.now().isoformat(timespec="seconds"), time.monotonic()
        before = self.state.steps.get(step.name)
        progress = Progress(RUNNING, started)
        self.state.set(step.name, progress)
        work = self.places.run / "work" / self.state.key.stem / step.name
        if not (step.goes_on and before and before.status in (RUNNING, INTERRUPTED, FAILED)):
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        log = self.places.log(step)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("w", encoding="utf-8", errors="replace") as output:
                for command in step.commands:
                    words = words_of(command, self.state.key.commit, work, self.data())
                    run_command(words, output, limit_s(step) - (time.monotonic() - begin), begin, tick)
            if (now := commit_name()) != self.state.key.commit:
                raise StepFailed(f"the repository went to commit {now} meanwhile; inc reproduce runs it there.")
            progress.files = self.collect(step, work)
            progress.status = DONE
        except (StepFailed, IncError, OSError) as error:
            progress.status, progress.problem = FAILED, f"{error} {last_lines(log)}".strip()
        except KeyboardInterrupt:
            progress.status = INTERRUPTED
            raise
        finally:
            progress.seconds = round(time.monotonic() - begin, 1)
            self.state.set(step.name, progress)
            if progress.status == DONE or not step.goes_on:
                shutil.rmtree(work, ignore_errors=True)
        return progress.problem

    def collect(self, step: Step, work: Path) -> dict[str, str]:
        """Check what a step has left, then move it into the results. Returns the digests by place. Raises StepFailed."""
        commit = self.state.key.commit
        left = {path.name: path for path in sorted(work.rglob("*")) if path.suffix in PLACE_OF_SUFFIX}
        if absent := [name for name in (final_name(name, commit) for name in step.writes) if name not in left]:
            raise StepFailed(f"it left no {', '.join(absent)}.")
        for path in left.values():
            if path.suffix == ".csv":
                read_data_file(path)  # refuses a damaged one before it is touched
                text = path.read_text(encoding="utf-8").replace(f"{work}/", "")  # the command, as another reader can run it
                changes = self.state.key.changes
                note = f"# changes: the working tree differed from the commit ({changes})\n" if changes else ""
                path.write_text(note + text, encoding="utf-8")
                figure = self.places.output / "figures" / f"{path.stem}.png"
                if figure.exists() and figure.name not in left:  # of older data; the page draws it again
                    self.set_aside(figure, "figures")
        for kind in PLACE_OF_SUFFIX.values():
            for pattern in step.replaces:
                for old in (self.places.output / kind).glob(pattern):
                    if old.name not in left:
                        self.set_aside(old, kind)
        files = {}
        for name, path in left.items():
            kind = PLACE_OF_SUFFIX[path.suffix]
            target = self.places.output / kind / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                self.set_aside(target, kind)
            shutil.move(path, target)
            files[f"{kind}/{name}"] = digest(target)
        return files

    def set_aside(self, path: Path, kind: str) -> None:
        """Keep a file that is about to be replaced: the page compares two runs."""
        folder = self.places.previous / kind
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(path, folder / path.name)


def advance(bar: tqdm, begin: float, estimate: float, spent: float) -> None:
    """Move the bar to where a step stands that has begun at `begin`; never beyond its estimate."""
    bar.update(begin + min(spent, estimate) - bar.n)


def last_lines(log: Path, count: int = 4) -> str:
    """The end of a log, in one line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"Last words: {' | '.join(lines[-count:])[-600:]}" if lines else ""


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
