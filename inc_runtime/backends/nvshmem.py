"""The NVSHMEM backend: one process per PE under torchrun, one symmetric slab on the GPUs, persistent kernels as roles.

`NvshmemJob` joins the job and owns the slab; `DeviceHeap` carves it by a `HeapLayout` and starts kernels on it. Kernels run the
CUDA twins of the role programs. They never trap: a wait that expires leaves a record in pinned host memory and raises the abort
word, and `check` turns the record into the exception that the host backend raises.

The unique id travels over a `HostGroup`. NVSHMEM's `init` returns even when its GPU side failed, so the status is checked. Its
calls hold the interpreter lock, so the watchdog is faulthandler's own thread.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inc_runtime.backends.cuda_driver import Gpu, num_sms_of_gpus
from inc_runtime.backends.device_errors import error_of_record
from inc_runtime.compile_cache import Built, Verbs, build
from inc_runtime.device.arguments import ERROR_RECORD, MAX_RANKS, WORKSPACE, heap_argument
from inc_runtime.device.heap_options import check_options, heap_defines
from inc_runtime.environment import Environment
from inc_runtime.errors import Aborted, ArrivalTimeout, ConfigurationError, HeapTooLarge, PlacementError, WaitRecord
from inc_runtime.heap_layout import BF16, ERROR_BYTES, STARTS_AT_ZERO, HeapLayout, Kind
from inc_runtime.host_group import HostGroup, LauncherGroup
from inc_runtime.mps import require_daemon
from inc_runtime.placement import Placement, PlacementKind, choose, place
from inc_runtime.protocol import Role, World, magic_of

ONE_HOST = {
    "NVSHMEM_BOOTSTRAP": "UID",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_DISABLE_MNNVL": "1",
    "NVSHMEM_DISABLE_NCCL": "1",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1",
}
"""Environment of a job on one host; what the user has set stays."""

INIT_COMPLETE = 2
"""Least status of an NVSHMEM that device code can use."""

NVSHMEM_OVERHEAD_BYTES = 64 << 20
SWITCH_LIMIT_SHARE = 0.75
"""A switch gives up before the ranks that wait for it do: it knows which rank is missing."""

POLL_S = 0.001
CLOCK_SOURCE = Path(__file__).resolve().parent.parent / "device" / "clock.cu"
CLOCK_TRIES = 100
REPORT_LIMIT_S = 2.0


class NvshmemJob:
    """Membership of one process in the job. Make it with `join`; use as a context manager, which leaves.

    `bases`: this process's addresses of the slabs of all PEs.
    """

    def __init__(
        self, world: World, placement: Placement, slab_bytes: int, environment: Environment, pe: int, group: HostGroup | None
    ) -> None:
        self.world, self.placement, self.environment = world, placement, environment
        self.pe, self.slab_bytes = pe, slab_bytes
        self.seat = placement.seats[self.pe]
        self.name = world.name_of(self.pe)
        for name, value in ONE_HOST.items():
            os.environ.setdefault(name, value)
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(slab_bytes + NVSHMEM_OVERHEAD_BYTES)
        self.group: HostGroup = group or LauncherGroup(environment.start_limit_s)
        assert self.seat.gpu is not None
        self.gpu = Gpu(self.seat.gpu)
        self._refuse_if_too_large()
        faulthandler.dump_traceback_later(environment.start_limit_s, exit=True)
        self._bindings = self._init()
        self.slab = int(self._bindings.malloc(slab_bytes))
        if not self.slab:
            raise HeapTooLarge(
                f"{self.name}: NVSHMEM could not allocate {slab_bytes / 2**20:.0f} MiB. Use a smaller microbatch or depth."
            )
        self.bases = [int(self._bindings.ptr(self.slab, pe)) for pe in range(world.num_pes)]
        faulthandler.cancel_dump_traceback_later()

    @classmethod
    def join(
        cls,
        world: World,
        slab_bytes: int,
        kind: PlacementKind | None = None,
        *,
        pe: int | None = None,
        group: HostGroup | None = None,
    ) -> NvshmemJob:
        """Join the torchrun job of this process or, with `group`, be `pe` of that group. Collective, with equal arguments.

        Raises: ConfigurationError for a world or a placement that cannot work; PlacementError; HeapTooLarge; PeerMissing.
        """
        environment = Environment.read()
        if group is None and environment.world_size != world.num_pes:
            raise ConfigurationError(
                f"WORLD_SIZE = {environment.world_size}: {world} needs {world.num_pes} processes. "
                f"Start them with: torchrun --nproc-per-node {world.num_pes} ..."
            )
        if world.num_ranks > MAX_RANKS or world.num_dispatch_switches != world.num_combine_switches:
            raise ConfigurationError(f"{world}: the kernels take {MAX_RANKS} ranks at most, and as many switches of either role.")
        num_sms = num_sms_of_gpus()
        placement = place(kind or choose(world, len(num_sms)), world, num_sms)
        if not placement.gpus:
            raise ConfigurationError("no GPU was found. Use the host backend.")
        if placement.needs_mps:
            require_daemon()
        return cls(world, placement, slab_bytes, environment, environment.rank if pe is None else pe, group)

    def _refuse_if_too_large(self) -> None:
        mates = len(self.placement.on_gpu(self.seat.gpu))  # type: ignore[arg-type]
        needed, free = mates * (self.slab_bytes + NVSHMEM_OVERHEAD_BYTES), self.gpu.free_bytes()
        if self.pe == 0:
            print(
                self.placement.describe(), f"symmetric heap: {self.slab_bytes / 2**20:.1f} MiB per PE", sep="\n", file=sys.stderr
            )
        if needed > free:
            raise HeapTooLarge(
                f"{self.name}: {mates} heaps of {self.slab_bytes / 2**20:.0f} MiB on GPU {self.seat.gpu} exceed its free "
                f"{free / 2**20:.0f} MiB. Use a smaller microbatch or depth, or more GPUs."
            )

    def _init(self) -> Any:
        """Initialise NVSHMEM with a unique id from PE 0. Raises PlacementError where its GPU side did not come up."""
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib
            from nvshmem import bindings
        except ImportError as error:
            raise PlacementError("the GPU backend needs NVSHMEM. Install it with: pip install nvshmem4py-cu13") from error
        load_nvidia_dynamic_lib("nvshmem_host")
        unique_id = bindings.uniqueid()
        if self.pe == 0:
            bindings.get_uniqueid(unique_id.ptr)
        first, *_ = self.group.gather(bytes(unique_id._data.view(np.int8).tobytes()))
        unique_id._data.view(np.int8)[...] = np.frombuffer(first, np.int8)
        attributes = bindings.InitAttr()
        bindings.set_attr_uniqueid_args(self.pe, self.world.num_pes, unique_id.ptr, attributes.ptr)
        bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
        status = int(bindings.init_status())
        if status < INIT_COMPLETE:
            raise PlacementError(
                f"{self.name}: NVSHMEM came up with status {status}, at least {INIT_COMPLETE} is needed. "
                "Run with NVSHMEM_DEBUG=INFO; where PEs share a GPU, check that MPS runs: "
                "python -m inc_runtime.mps -- torchrun ..."
            )
        return bindings

    def init_module(self, built: Built) -> None:
        """Tell NVSHMEM about a module that calls its device API."""
        self._bindings.cumodule_init(int(self.gpu.module(built.path)))

    def clock_offset_ns(self) -> int:
        """Nanoseconds from this GPU's timer to the host's monotonic clock; of many tries the quickest counts: right to a few us.

        Clocks drift: measure it anew for every long run, and while no kernel runs. Raises PlacementError where none answers.
        """
        function = self.gpu.function(build(CLOCK_SOURCE, arch=self.gpu.arch).path, "clock_kernel")
        answer, address = self.gpu.pinned(np.dtype([("now", "<u8")]))
        quickest, offset = float("inf"), 0
        for _ in range(CLOCK_TRIES):
            answer["now"], begin = 0, time.monotonic_ns()
            self.gpu.launch(function, [np.array(address, np.uint64)], num_blocks=1, num_threads=1)
            while not answer["now"][0]:
                if time.monotonic_ns() > begin + 5_000_000_000:
                    raise PlacementError(f"{self.name}: a kernel that reads the clock did not answer within 5 s.")
            end = time.monotonic_ns()
            if end - begin < quickest:
                quickest, offset = end - begin, (begin + end) // 2 - int(answer["now"][0])
        return offset

    def barrier(self) -> None:
        """Return once every process has called it. On the host: no kernel is needed, so persistent kernels may run."""
        self.group.barrier()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in PE order. Collective."""
        return self.group.gather(value)

    def leave(self) -> None:
        """Free the slab and finalise. Collective; ends the process with a traceback if it takes longer than the start limit."""
        faulthandler.dump_traceback_later(self.environment.start_limit_s, exit=True)
        self.barrier()
        self._bindings.free(self.slab)
        self._bindings.hostlib_finalize()
        self.group.close()
        faulthandler.cancel_dump_traceback_later()

    def __enter__(self) -> NvshmemJob:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self.leave()
            return
        # Peers may be gone, and a collective finalise would hang: report, and let the process end do the rest.
        print(f"{self.name}: {kind.__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


class DeviceHeap:
    """The slab of a job as one `HeapLayout` carves it, and the kernels that run on it. Collective to make.

    `poison`: fill rows and records with NaN bytes. Flags, magic and records of errors start from zero.
    """

    def __init__(self, job: NvshmemJob, layout: HeapLayout, *, verbs: Verbs = Verbs.DIRECT, poison: bool = False) -> None:
        if layout.heap_bytes > job.slab_bytes:
            raise HeapTooLarge(
                f"the layout needs {layout.heap_bytes} bytes, the slab holds {job.slab_bytes}. Join with a larger slab."
            )
        if layout.dims.row_dtype != BF16:
            raise ConfigurationError(
                f"row_format = {layout.dims.row_dtype}: the kernels add bfloat16. Use RowFormat.BFLOAT16."
            )
        check_options(layout.dims, verbs)
        missing = [job.world.name_of(pe) for pe, base in enumerate(job.bases) if not base]
        if missing and verbs is Verbs.DIRECT:
            raise PlacementError(f"{job.name} cannot map the memory of {', '.join(missing)}. Use the NVSHMEM verbs.")
        self._refuse_other_dims(job, layout)
        self.job, self.layout, self.verbs = job, layout, verbs
        self.gpu, self.role = job.gpu, job.world.role_of(job.pe)
        self.workspace = self.gpu.allocate(WORKSPACE.itemsize)
        self.record, record_address = self.gpu.pinned(ERROR_RECORD)
        limit_s = job.environment.wait_limit_s * (1.0 if self.role is Role.COMPUTE_RANK else SWITCH_LIMIT_SHARE)
        self.argument = heap_argument(layout, job.pe, job.bases, wait_limit_s=limit_s)
        self.argument["workspace"], self.argument["error_record"] = self.workspace, record_address
        self.generation = 0
        self.num_layers = 0
        self.layer_memory: dict[object, object] = {}  # of the layers on this heap, by their shape
        self._owned = [self.workspace]
        if layout.dims.model.in_network and self.role is Role.COMBINE_SWITCH:
            self._allocate_sums()
        if self.role is Role.COMPUTE_RANK:
            self._allocate_tables()
        self.reset(poison=poison)

    @staticmethod
    def _refuse_other_dims(job: NvshmemJob, layout: HeapLayout) -> None:
        """Raise ConfigurationError where the PEs do not lay out the same heap. Collective."""
        everyone = job.gather(layout.dims)
        for pe, dims in enumerate(everyone):
            if dims != everyone[0]:
                raise ConfigurationError(
                    f"{job.world.name_of(pe)} lays out {dims}, {job.world.name_of(0)} {everyone[0]}. Give every PE the same "
                    "model, shape and pipeline."
                )

    def _allocate_tables(self) -> None:
        """Where a rank of a plain model places each token in its messages; with local bypass, which ranks need it."""
        dims = self.layout.dims
        per_slot = {}
        if not dims.model.in_network:
            groups, placed = -(-dims.microbatch_tokens // 32) * dims.num_ranks, dims.microbatch_tokens * dims.num_ranks
            per_slot = {"group_rows": groups, "row_of_token": placed, "token_of_row": placed}
        elif dims.local_bypass:
            per_slot = {"ranks_of_token": dims.microbatch_tokens}
        for name, length in per_slot.items():
            self.argument[name] = self.gpu.allocate(dims.depth * length * np.dtype("<i4").itemsize)
            self._owned.append(int(self.argument[name]))

    def _allocate_sums(self) -> None:
        """Accumulators of a combine switch and, where rows are pulled through NVSHMEM, a landing row per warp and rank."""
        dims = self.layout.dims
        self.argument["accumulators"] = self.gpu.allocate(self.layout.region(self.role, "accumulators").num_bytes(dims), 0xFF)
        self._owned.append(int(self.argument["accumulators"]))
        if self.verbs is Verbs.NVSHMEM:
            self.argument["landing"] = self.gpu.allocate(self.job.seat.num_blocks * 16 * dims.num_ranks * dims.hidden_size * 2)
            self._owned.append(int(self.argument["landing"]))

    def reset(self, *, poison: bool = False) -> None:
        """Rebuild the heap: flags and magic from zero. Collective; no kernel may run. What kernels keep elsewhere is then stale:
        `generation` grows."""
        self.generation += 1
        self.job.barrier()
        for name, region in self.layout.regions(self.role).items():
            if region.private:
                continue
            fresh = region.kind is Kind.FLAGS or name in STARTS_AT_ZERO
            if fresh or poison:
                address = self.job.slab + self.layout.offset(self.role, name)
                self.gpu.fill(address, 0 if fresh else 0xFF, region.num_bytes(self.layout.dims))
        self.gpu.fill(self.workspace, 0, WORKSPACE.itemsize)
        self.record.view(np.uint8)[...] = 0
        self.job.barrier()

    def pace_ports(self, rank_port_gbps: float) -> None:
        """Let no rank send or receive faster than this, in GB/s each way; 0: as fast as it can. Equal on all PEs of the job."""
        self.argument["port_ps_per_kib"] = round(1024e3 / rank_port_gbps) if rank_port_gbps else 0
        self.argument["clock_offset_ns"] = self.job.clock_offset_ns() if rank_port_gbps else 0

    def write_region(self, name: str, value: np.ndarray) -> None:
        """Overwrite a whole region of this PE from the host, for a benchmark that replays half of the protocol."""
        self.gpu.write(self.job.slab + self.layout.offset(self.role, name), value)

    def close(self) -> None:
        for address in self._owned:
            self.gpu.free(address)

    # --- memory ---

    def snapshot(self) -> dict[str, np.ndarray]:
        """A copy of every symmetric region of this PE, by name."""
        return self.layout.carve(self.role, self.gpu.read(self.job.slab, self.layout.heap_bytes))

    def counters(self) -> np.ndarray:
        """The workspace of this PE: counters of rows sent and pulled."""
        return self.gpu.read(self.workspace, WORKSPACE.itemsize).view(WORKSPACE)[0]

    # --- kernels ---

    def build(self, source: Path, *, headers: Mapping[str, str] | None = None, defines: Sequence[str] = ()) -> Built:
        """Compile a kernel of the ranks for this GPU and this heap's communication model, or take it from the cache."""
        dims = self.layout.dims
        defines = [*defines, *["INC_DIRECT"] * dims.direct, *heap_defines(dims)]
        built = build(source, self.verbs, self.gpu.arch, dims.model, headers=headers, defines=defines)
        if self.verbs is Verbs.NVSHMEM:
            self.job.init_module(built)
        return built

    def launch(
        self,
        built: Built,
        kernel: str,
        arguments: Sequence[np.ndarray],
        *,
        num_blocks: int,
        num_threads: int,
        shared_bytes: int = 0,
        stream: int | None = None,
    ) -> None:
        """Start a kernel of this PE, on `stream` or the kernel stream: the heap, then `arguments`."""
        self.gpu.launch(
            self.gpu.function(built.path, kernel),
            [self.argument, *arguments],
            num_blocks=num_blocks,
            num_threads=num_threads,
            shared_bytes=shared_bytes,
            stream=stream,
        )

    def wait(self, *, limit_s: float | None = None) -> None:
        """Return once the kernels of this PE have ended. Raises what `check` raises, and ArrivalTimeout after `limit_s`.

        The host's own limit is for a grid whose blocks never all started, which no clock of the kernel sees.
        """
        deadline = time.monotonic() + limit_s if limit_s is not None else None
        while self.gpu.running():
            if deadline is not None and time.monotonic() > deadline:
                record = WaitRecord(
                    self.job.name, "KERNEL", -1, 0, 0, 0, waited_s=limit_s or 0.0, cause="The kernel did not end."
                )
                raise ArrivalTimeout(record, "Look whether another process holds the SMs, or raise the limit.")
            time.sleep(POLL_S)
        self.check()

    def check(self) -> None:
        """Raise what the kernels of this PE have reported. Raises: ArrivalTimeout, Mismatch, ConfigurationError, Aborted."""
        if self.record["state"][0]:
            error = self._reported()
            text = np.frombuffer(str(error).encode()[: ERROR_BYTES - 1] + b"\0", np.uint8)
            self.gpu.write(self.job.slab + self.layout.offset(self.role, "error_record"), text)
            raise error
        word = int(self.gpu.read(self.job.slab + self.layout.offset(self.role, "abort"), 8).view("<u8")[0])
        if word:
            peer = magic_of(word) - 1
            raise Aborted(
                f"{self.job.name} stopped: {self.job.world.name_of(peer)} raised the abort word. "
                f"It reports: {self._report_of(peer)}"
            )

    def _report_of(self, peer: int) -> str:
        """The error text that a peer's host has left in its heap; it may come a little later than the abort word."""
        address = self.job.bases[peer] + self.layout.offset(self.job.world.role_of(peer), "error_record")
        deadline = time.monotonic() + REPORT_LIMIT_S
        while True:
            text = self.gpu.read(address, ERROR_BYTES).tobytes().split(b"\0")[0].decode(errors="replace")
            if text or time.monotonic() > deadline:
                return text or "nothing yet"
            time.sleep(0.01)

    def _reported(self) -> Exception:
        return error_of_record(self.record[0], self.job.name, self.job.world, self.layout.dims)
