"""`inc switch`: one switch of a server, in a process of its own. It learns from rank 0 which heap and which model it serves."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from types import FrameType

from inc_runtime.backends.host import HostPe, check_world
from inc_runtime.config import CommunicationModel
from inc_runtime.environment import Environment, require_job_id
from inc_runtime.errors import ConfigurationError
from inc_runtime.protocol import Role, World
from inc_runtime.rendezvous import JOB_NOTE, POLL_S, Claim, JobNote, note, read_note, switch_name
from inc_runtime.server_job import join_server_heap
from switch_emulator.launch_switch import RunningSwitch
from switch_emulator.run_switch import run_switch

HELP = """\
Run one switch of a server whose ranks are processes of vLLM. Switches and server have the same INC_JOB_ID; start the switches
first. It waits for the server without limit, serves it, and ends with it. Example, two ranks and two switches:
  export INC_JOB_ID=chat
  inc switch --role dispatch --ranks 2 &
  inc switch --role combine --ranks 2 &"""

ROLES = {"dispatch": Role.DISPATCH_SWITCH, "combine": Role.COMBINE_SWITCH}


class StoppedBySignal(SystemExit):
    """The user or the launcher ended this switch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `inc switch`."""
    parser.add_argument("--role", choices=list(ROLES), required=True)
    parser.add_argument("--plane", type=int, default=0, help="number of this switch among those of its role (default 0)")
    parser.add_argument("--ranks", type=int, required=True, help="W, the ranks of the server")
    parser.add_argument("--dispatch-switches", type=int, default=1, help="of the whole job (default 1)")
    parser.add_argument("--combine-switches", type=int, default=1, help="of the whole job (default 1)")


def run(options: argparse.Namespace) -> int:
    """Be the switch until the server has left. Returns 0; raises IncError for everything that ends it earlier."""
    environment = Environment.read()
    require_job_id(environment)
    role = ROLES[options.role]
    world = World(options.ranks, options.dispatch_switches, options.combine_switches)
    check_world(world)
    planes = world.num_dispatch_switches if role is Role.DISPATCH_SWITCH else world.num_combine_switches
    if not 0 <= options.plane < planes:
        raise ConfigurationError(
            f"plane = {options.plane}: there are {planes} {options.role} switches, planes 0 to {planes - 1}. "
            f"Choose one of these, or raise --{options.role}-switches."
        )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    name = switch_name(role, options.plane)
    claim = Claim(environment, name)
    content = {"world": [world.num_ranks, world.num_dispatch_switches, world.num_combine_switches]}
    with note(environment, name, content):
        say(name, f"of job {environment.job_id!r} waits for a server with {world.num_ranks} ranks (process {os.getpid()})")
        job = wait_for_job(environment)
        if job.world != world:
            raise ConfigurationError(
                f"{name} was started for {world}, the server of job {environment.job_id!r} has {job.world}. "
                "Start it with the server's numbers of ranks and switches."
            )
        at = world.dispatch_switch if role is Role.DISPATCH_SWITCH else world.combine_switch
        pe = at(options.plane)
        heap = _join_host(job, pe) if job.port is None else join_server_heap(job, pe)
    say(name, f"ready: {job.model.value}, {world.num_ranks} ranks, heap of {heap.layout.heap_bytes:,} bytes")
    if isinstance(heap, HostPe):
        with heap:
            run_switch(heap)
    else:
        RunningSwitch(heap, job.pipeline.sum_order).wait()
    claim.release()
    say(name, "ends: the server has left")
    return 0


def wait_for_job(environment: Environment) -> JobNote:
    """What rank 0 says that the heap must hold. Waits without limit: an idle switch costs nothing."""
    while (content := read_note(environment, JOB_NOTE)) is None:
        time.sleep(POLL_S)
    return JobNote.from_json(content)


def _join_host(job: JobNote, pe: int) -> HostPe:
    world = job.world
    return HostPe.join(
        job.shape,
        job.pipeline,
        CommunicationModel(job.model),
        num_ranks=world.num_ranks,
        num_dispatch_switches=world.num_dispatch_switches,
        num_combine_switches=world.num_combine_switches,
        pe=pe,
        traced=False,
    )


def say(name: str, text: str) -> None:
    """One line for whoever looks at this process."""
    print(f"inc: {name} {text}", file=sys.stderr, flush=True)


def _stop(number: int, _: FrameType | None) -> None:
    raise StoppedBySignal(f"stopped by {signal.Signals(number).name}")
