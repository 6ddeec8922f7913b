"""How processes that were started one by one find each other: a job id, one claim per part of the job, and notes.

Under torchrun all PEs have one parent and one command line. A server has neither: its ranks live inside the processes of
vLLM, its switches are processes of their own. They meet by INC_JOB_ID. A *claim* is a socket name of this machine that the
kernel frees when its process ends, so that two servers cannot take one set of switches; a *note* is a small JSON file beside
the heaps, by which a switch says for which world it was started, and rank 0 what the heap must hold.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inc_runtime.backends.host_memory import MAGIC_NUMBER, PREFIX, job_key, process_start
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, Router, RowFormat, SumOrder
from inc_runtime.environment import Environment
from inc_runtime.errors import ConfigurationError, PeerMissing
from inc_runtime.protocol import Role, World

HEADER_BYTES = 3 * 8
"""The first int64 words of a note are those of a heap's control page: magic number, process, its start time."""

POLL_S = 0.05
JOB_NOTE = "job"
"""The note of rank 0."""


@dataclass(frozen=True)
class JobNote:
    """What rank 0 tells the others: all that they need to lay out the heap and to serve.

    `port`: of the store at which the processes of a job on GPUs meet; None on the host backend.
    """

    shape: LayerShape
    pipeline: Pipeline
    model: CommunicationModel
    world: World
    port: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The note as JSON values; enums by their values."""
        return json.loads(json.dumps(asdict(self), default=_value_of))

    @classmethod
    def from_json(cls, note: dict[str, Any]) -> JobNote:
        """The inverse of `to_json`."""
        shape, pipeline = dict(note["shape"]), dict(note["pipeline"])
        shape["router"] = Router(shape["router"])
        pipeline["sum_order"] = SumOrder(pipeline["sum_order"])
        pipeline["row_format"] = RowFormat(pipeline["row_format"])
        model = CommunicationModel(note["model"])
        return cls(LayerShape(**shape), Pipeline(**pipeline), model, World(**note["world"]), note["port"])


def _value_of(member: object) -> object:
    if isinstance(member, enum.Enum):
        return member.value
    raise TypeError(f"{member!r} has no JSON form")


def switch_name(role: Role, plane: int) -> str:
    """The name of a switch in claims and notes, which does not depend on the world."""
    return f"{role.value.replace(' ', '-')}-{plane}"


class Claim:
    """The right to be one part of a job. Held until `release` or the end of the process, whatever its end.

    Raises: ConfigurationError that names the process which holds it.
    """

    def __init__(self, environment: Environment, part: str) -> None:
        name = f"\0{PREFIX}{job_key(environment)}-{part}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(name)
        except OSError:
            raise ConfigurationError(
                f"job {environment.job_id!r} has a {part} already: {_holder(name)}. Two servers cannot share one set of "
                "switches: give each server, with switches of its own, another INC_JOB_ID; or end the other one."
            ) from None
        self._socket.listen(1)

    def release(self) -> None:
        """Let another process be this part."""
        self._socket.close()


def _holder(name: str) -> str:
    """Who listens on a socket name, as the kernel knows it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        client.connect(name)
        pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {pid}"
    return "another process"


def note_path(environment: Environment, name: str) -> Path:
    """Where the note of that name is."""
    return Path(environment.shared_memory_folder) / f"{PREFIX}{job_key(environment)}-note-{name}"


@contextlib.contextmanager
def note(environment: Environment, name: str, content: dict[str, Any]) -> Iterator[None]:
    """Leave a note for the others while the block runs. It appears whole; the next start sweeps it after a kill."""
    path = note_path(environment, name)
    head = np.array([MAGIC_NUMBER, os.getpid(), process_start(os.getpid())], np.int64).tobytes()
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(head + json.dumps(content).encode())
    draft.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def read_note(environment: Environment, name: str) -> dict[str, Any] | None:
    """The note of that name, or None if there is none or its writer is gone."""
    try:
        data = note_path(environment, name).read_bytes()
    except FileNotFoundError:
        return None
    magic, pid, start = np.frombuffer(data[:HEADER_BYTES], np.int64)
    if magic != MAGIC_NUMBER or process_start(int(pid)) != start:
        return None
    return json.loads(data[HEADER_BYTES:])


def await_note(environment: Environment, name: str, remedy: str) -> dict[str, Any]:
    """Wait for a note. Raises PeerMissing after the start limit."""
    deadline = time.monotonic() + environment.start_limit_s
    while (content := read_note(environment, name)) is None:
        if time.monotonic() > deadline:
            raise PeerMissing(
                f"waited {environment.start_limit_s:.0f} s for {name} of job {environment.job_id!r}, which did not appear. "
                f"{remedy} INC_START_LIMIT_S sets the limit."
            )
        time.sleep(POLL_S)
    return content


def world_of_switches(environment: Environment, num_ranks: int) -> World:
    """The world for which the switches of this job were started; all of them must agree, and with `num_ranks`.

    Raises: PeerMissing when a switch does not appear; ConfigurationError for switches of another world.
    """
    remedy = "Start `inc switch --role ROLE --plane PLANE --ranks W` with the same INC_JOB_ID, or look at what it printed."
    first = World(*await_note(environment, switch_name(Role.DISPATCH_SWITCH, 0), remedy)["world"])
    planes = [(Role.DISPATCH_SWITCH, p) for p in range(first.num_dispatch_switches)]
    planes += [(Role.COMBINE_SWITCH, p) for p in range(first.num_combine_switches)]
    for role, plane in planes:
        name = switch_name(role, plane)
        world = World(*await_note(environment, name, remedy)["world"])
        if world != World(num_ranks, first.num_dispatch_switches, first.num_combine_switches):
            raise ConfigurationError(
                f"{name} of job {environment.job_id!r} was started for {world.num_ranks} ranks, {world.num_dispatch_switches} "
                f"dispatch and {world.num_combine_switches} combine switches; the server has {num_ranks} ranks and dispatch "
                f"switch 0 says {first.num_dispatch_switches} and {first.num_combine_switches}. "
                f"Start the switches with --ranks {num_ranks} and equal numbers, or the server with {world.num_ranks} ranks."
            )
    return first
