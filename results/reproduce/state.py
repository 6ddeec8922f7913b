"""How far a reproduction has come, in a file of its own for each commit and kind of machine."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from inc_runtime.errors import ConfigurationError
from inc_runtime.machine import Machine
from results.provenance import ROOT, commit_name

WRITTEN = ("results/data", "results/tables", "results/figures", "results/README.md", "README.md")
"""What a reproduction, or its reader, changes without changing what is measured."""

DONE, FAILED, RUNNING, INTERRUPTED, WAITING = "done", "failed", "running", "interrupted", "to do"


@dataclass
class Progress:
    """One step so far. `files`: SHA-256 of each file by its place in the results; `problem`: the end of the log of a failure."""

    status: str
    started: str = ""
    seconds: float = 0.0
    files: dict[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Key:
    """What a result belongs to. `changes`: a hash of what the working tree holds beyond the commit, "" for nothing."""

    commit: str
    changes: str
    machine: str

    @property
    def stem(self) -> str:
        """Part of a file name."""
        machine = hashlib.sha256(self.machine.encode()).hexdigest()[:8]
        return "_".join(filter(None, (self.commit, self.changes, machine)))


def machine_name(machine: Machine) -> str:
    """The kind of machine, not the single one, so that a sweep goes on when another of its kind is lent."""
    names = [gpu.name for gpu in machine.gpus]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
    return f"{gpus}; {machine.num_cores:g} cores of {machine.processor}"


def key_of(machine: Machine) -> Key:
    """The key of this commit on this machine."""
    command = ["git", "-C", str(ROOT), "diff", "HEAD", "--", ".", *(f":(exclude){path}" for path in WRITTEN)]
    changes = subprocess.run(command, capture_output=True, check=False).stdout
    return Key(commit_name(), hashlib.sha256(changes).hexdigest()[:8] if changes else "", machine_name(machine))


def digest(path: Path) -> str:
    """SHA-256 of a file; "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


class State:
    """The steps of one key. Every change is on disk before it is acted upon."""

    def __init__(self, path: Path, key: Key) -> None:
        self.path, self.key = path, key
        self.steps: dict[str, Progress] = {}

    @classmethod
    def load(cls, folder: Path, key: Key) -> State:
        """The state of `key` in `folder`, empty at first. Raises ConfigurationError where the file is damaged."""
        state = cls(folder / f"state_{key.stem}.json", key)
        if state.path.exists():
            try:
                stored = json.loads(state.path.read_text(encoding="utf-8"))
                if stored["key"] != asdict(key):
                    raise ValueError("it belongs to another commit or machine")
                state.steps = {name: Progress(**values) for name, values in stored["steps"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"{state.path} cannot be used ({error}). Remove it: all steps then begin anew."
                raise ConfigurationError(problem) from None
        return state

    def set(self, name: str, progress: Progress) -> None:
        """Note how far a step is."""
        self.steps[name] = progress
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")
        steps = {step: asdict(values) for step, values in self.steps.items()}
        unfinished.write_text(json.dumps({"key": asdict(self.key), "steps": steps}, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.path)

    def is_done(self, name: str, output: Path) -> bool:
        """True if a step has ended well and its files in `output` are still as it left them."""
        progress = self.steps.get(name)
        if progress is None or progress.status != DONE:
            return False
        return all(digest(output / place) == sha for place, sha in progress.files.items())
