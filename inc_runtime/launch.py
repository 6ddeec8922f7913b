"""Starting the processes of a job, and the process group of its compute ranks. torch is imported only where it is needed."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from inc_runtime.environment import Environment
from inc_runtime.protocol import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MONITOR_S = 0.5
"""How long torchrun's agent lets the survivors of a dead process speak before it ends them."""


def run_through_ctrl_c(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command that ends its own processes on Ctrl-C, and wait for it even then. Returns its exit status.

    The terminal sends SIGINT to the command as well. `subprocess.run` would kill it a quarter of a second later, and torchrun,
    whose workers have sessions of their own, would leave them behind.
    """
    process = subprocess.Popen(command, env=None if environment is None else dict(environment))
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def launch(arguments: list[str], world: World) -> int:
    """Run `python -m inc_runtime ARGUMENTS` as one torchrun job on this machine. Returns 0, or 1 after naming who failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(threads, "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world.num_pes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"inc-{os.getpid()}",
        max_restarts=0,
        monitor_interval=MONITOR_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "inc_runtime", *arguments)
    except (KeyboardInterrupt, SignalException) as error:
        number = getattr(error, "sigval", signal.SIGINT)
        print(f"\ninc: stopped by {signal.Signals(number).name}", file=sys.stderr)
        return 128 + number
    except ChildFailedError as error:
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        how = f"was killed by {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else f"exited {first.exitcode}"
        who = world.name_of(first.local_rank)
        print(f"\ninc: the job ended early: {who} (process {first.pid}) {how} first.", file=sys.stderr)
        return 1
    return 0


def join_rank_group(environment: Environment, num_ranks: int) -> ProcessGroup:
    """The gloo group of the compute ranks, through torchrun's own store. Collective over the ranks; switches stay out.

    Returns the default group. Its collectives end at the wait limit.
    """
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=environment.wait_limit_s)
    store = dist.TCPStore(environment.master_addr, environment.master_port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"inc-ranks-{environment.restart_count}", store),
        rank=environment.rank,
        world_size=num_ranks,
        timeout=limit,
    )
    group = dist.group.WORLD
    assert group is not None
    return group
