"""What the processes of a GPU job tell each other on the host: values gathered from all, and a barrier.

Under torchrun they use torch.distributed. Ranks that live inside a server's processes and switches that were started one by one
have no launcher in common: they meet at a store that rank 0 holds, beside whatever process groups the server has made.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import pickle
import socket
from typing import Any, Protocol

from inc_runtime.errors import PeerMissing

HOST = "127.0.0.1"


class HostGroup(Protocol):
    """All processes of one job. Every method is collective: all call it, in the same order."""

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in PE order."""
        ...

    def barrier(self) -> None:
        """Return once every process has called it."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class LauncherGroup:
    """The default group of torch.distributed, made here from what torchrun says."""

    def __init__(self, limit_s: float) -> None:
        import torch.distributed

        self._distributed = torch.distributed
        self._distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit_s))

    def gather(self, value: Any) -> list[Any]:
        """See `HostGroup`."""
        values: list[Any] = [None] * self._distributed.get_world_size()
        self._distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """See `HostGroup`."""
        self._distributed.barrier()

    def close(self) -> None:
        """See `HostGroup`."""
        self._distributed.destroy_process_group()


class StoreGroup:
    """Processes that meet at a TCP store of this machine: PE 0 holds it, on `port`. Leaves torch's process groups alone.

    `names` [PEs]: for the error of a process that does not come within `limit_s`. Raises: PeerMissing.
    """

    def __init__(self, port: int, pe: int, names: list[str], limit_s: float) -> None:
        from torch.distributed import TCPStore

        self.pe, self.names, self.limit_s = pe, names, limit_s
        limit = datetime.timedelta(seconds=limit_s)
        try:
            self._store = TCPStore(HOST, port, is_master=pe == 0, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise PeerMissing(f"{names[pe]} cannot reach {names[0]} at port {port}: {error}") from error
        self._rounds = 0

    def gather(self, value: Any) -> list[Any]:
        """See `HostGroup`. Raises PeerMissing that names who did not come."""
        from torch.distributed import DistStoreError

        self._rounds += 1
        # All have read the round before the last: they have come to the last one since.
        self._store.delete_key(f"{self._rounds - 2}/{self.pe}")
        self._store.set(f"{self._rounds}/{self.pe}", base64.b85encode(pickle.dumps(value)).decode())
        values = []
        for pe, name in enumerate(self.names):
            try:
                values.append(pickle.loads(base64.b85decode(self._store.get(f"{self._rounds}/{pe}"))))
            except RuntimeError as error:
                late = isinstance(error, DistStoreError)
                who = f"waited {self.limit_s:.0f} s for {name}, which did not come" if late else f"has lost {self.names[0]}"
                remedy = "Look at what it printed last. INC_START_LIMIT_S sets the limit."
                raise PeerMissing(f"{self.names[self.pe]} {who}. {remedy}") from error
        return values

    def barrier(self) -> None:
        """See `HostGroup`."""
        self.gather(None)

    def close(self) -> None:
        """See `HostGroup`. PE 0, with which the store goes, waits for the others, but not for those that have died."""
        if self.pe:
            self._store.set(f"left/{self.pe}", "")
            return
        with contextlib.suppress(RuntimeError):
            self._store.wait([f"left/{pe}" for pe in range(1, len(self.names))])


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]
