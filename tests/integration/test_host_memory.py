"""Shared memory of the host backend: what does not fit is refused, what a crash left is swept, and nothing stays behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inc_runtime.backends.host import HostPe
from inc_runtime.backends.host_memory import MAGIC_NUMBER, PREFIX, Control, SharedSlabs, process_start, remove_stale
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.environment import Environment
from inc_runtime.errors import ConfigurationError, HeapTooLarge, PeerMissing
from inc_runtime.protocol import World

SHAPE, PIPELINE, MODEL = LayerShape(4, 2, 64, 8), Pipeline(16, 8), CommunicationModel.INC_ALL_TO_ALL


@pytest.fixture
def one_of_four(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process is PE 0 of a job of two ranks and two switches whose shared memory lies in a folder of the test."""
    values = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1, "INC_START_LIMIT_S": 0.3}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("INC_SHARED_MEMORY_FOLDER", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(PREFIX + "*")]


def join(num_ranks: int = 2, pipeline: Pipeline = PIPELINE, **more) -> HostPe:
    return HostPe.join(SHAPE, pipeline, MODEL, num_ranks=num_ranks, **more)


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("a tmpfs cannot be mounted without root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_heap_that_does_not_fit_the_folder_is_refused_with_both_sizes_and_leaves_nothing(
    one_of_four: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INC_SHARED_MEMORY_FOLDER", str(tiny_folder))
    with pytest.raises(HeapTooLarge) as refusal:
        join(pipeline=replace(PIPELINE, microbatch_tokens=64))
    message = str(refusal.value)
    assert "rank 0 needs" in message and "65,536 are free" in message and "INC_SHARED_MEMORY_FOLDER" in message
    assert files(tiny_folder) == []


def test_a_full_disk_is_refused_before_a_byte_is_touched(one_of_four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where nothing can be mounted: the kernel says that there is no space."""

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HeapTooLarge, match="Lower microbatch_tokens or depth"):
        join()
    assert files(one_of_four) == []


def test_heaps_are_really_allocated_and_private_to_the_user(one_of_four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[os.stat_result] = []
    original = SharedSlabs._create

    def create(self, layout_digest):
        own = original(self, layout_digest)
        seen.append(os.stat(self.path))
        assert seen[0].st_size == self.num_bytes
        return own

    monkeypatch.setattr(SharedSlabs, "_create", create)
    with pytest.raises(PeerMissing):
        join()
    assert seen[0].st_mode & 0o777 == 0o600
    assert seen[0].st_blocks * 512 >= seen[0].st_size, "a sparse file would end in SIGBUS"


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_a_world_size_that_does_not_fit_the_roles_is_refused_with_the_command_to_use(
    one_of_four: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world_size))
    with pytest.raises(ConfigurationError, match=rf"WORLD_SIZE = {world_size}.*need 4 processes.*--nproc-per-node 4"):
        join()
    assert files(one_of_four) == []


def test_several_machines_no_switches_and_too_many_pes_are_refused(one_of_four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="one node"):
        join()
    with pytest.raises(ConfigurationError, match="at least one"):
        join(num_dispatch_switches=0)
    with pytest.raises(ConfigurationError, match="at most"):
        join(num_ranks=2000)
    with pytest.raises(ConfigurationError, match="ranks_per_phase = 3"):
        join(pipeline=replace(PIPELINE, ranks_per_phase=3))


def test_a_peer_that_never_comes_is_named_and_nothing_is_left(one_of_four: Path) -> None:
    with pytest.raises(PeerMissing, match=r"rank 0 waited 0 s for rank 1 to join the job \(PE 1 of 4\)"):
        join()
    assert files(one_of_four) == []


def in_threads(calls: list) -> list[object]:
    """Run each call in a thread of its own. Returns results or exceptions."""
    results: list[object] = [None] * len(calls)

    def keep(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=keep, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(("sizes", "digests"), [((8192, 8192, 8192), (1, 2, 1)), ((8192, 12288, 8192), (1, 1, 1))])
def test_processes_that_lay_out_the_heap_differently_refuse_each_other(
    one_of_four: Path, sizes: tuple[int, ...], digests: tuple[int, ...]
) -> None:
    environment = replace(Environment.read(), start_limit_s=2.0)
    calls = [
        lambda pe=pe: SharedSlabs(World(1), pe, sizes[pe], digests[pe], 0, environment) for pe in range(3)
    ]
    results = in_threads(calls)
    refusals = [str(result) for result in results if isinstance(result, PeerMissing)]
    assert any("lay out the heap differently" in refusal for refusal in refusals), results
    assert files(one_of_four) == []


def test_a_peer_that_allocates_its_file_meanwhile_is_not_taken_for_another_layout(
    one_of_four: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a peer grows from 0 to its full size between two looks at it."""
    environment = replace(Environment.read(), start_limit_s=5.0)
    original, sizes = os.fstat, {}

    def fstat(fd: int):
        seen = original(fd)
        if sizes.setdefault(seen.st_ino, 0) == 0:  # the first look at every file comes too early
            sizes[seen.st_ino] = seen.st_size
            return os.stat_result((*seen[:6], 0, *seen[7:]))
        return seen

    monkeypatch.setattr(os, "fstat", fstat)
    slabs = in_threads([lambda pe=pe: SharedSlabs(World(1), pe, 8192, 7, 0, environment) for pe in range(3)])
    assert all(isinstance(slab, SharedSlabs) for slab in slabs), slabs


def test_a_put_through_one_mapping_shows_in_the_other_and_no_file_is_left(one_of_four: Path) -> None:
    environment = replace(Environment.read(), start_limit_s=5.0)
    slabs = in_threads([lambda pe=pe: SharedSlabs(World(1), pe, 8192, 7, 0, environment) for pe in range(3)])
    assert all(isinstance(slab, SharedSlabs) for slab in slabs), slabs
    assert files(one_of_four) == [], "unlinked as soon as all have mapped"
    slabs[0].peers[2].slab[100:104] = [1, 2, 3, 4]  # type: ignore[attr-defined]
    for mapped in slabs:
        assert mapped.peers[2].slab[99:105].tolist() == [0, 1, 2, 3, 4, 0]  # type: ignore[attr-defined]
        assert not mapped.peers[1].slab.any()  # type: ignore[attr-defined]


def test_two_jobs_of_one_user_do_not_share_names(monkeypatch: pytest.MonkeyPatch, one_of_four: Path) -> None:
    from inc_runtime.backends.host_memory import job_key

    first = Environment.read()
    assert job_key(first) == job_key(Environment.read())
    others = [replace(first, master_port=2), replace(first, run_id="x"), replace(first, restart_count=1)]
    assert len({job_key(other) for other in [first, *others]}) == 4


def write_slab(path: Path, pid: int, started: int) -> None:
    head = np.zeros(512, np.int64)
    head[Control.READY], head[Control.PID], head[Control.PROCESS_START] = MAGIC_NUMBER, pid, started
    head.tofile(path)


def test_files_of_dead_processes_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    started = process_start(dead.pid)
    dead.wait()
    write_slab(tmp_path / f"{PREFIX}dead-0", dead.pid, started)
    write_slab(tmp_path / f"{PREFIX}reused-0", os.getpid(), process_start(os.getpid()) - 1)
    write_slab(tmp_path / f"{PREFIX}alive-0", os.getpid(), process_start(os.getpid()))
    write_slab(tmp_path / "inc-other-0", dead.pid, started)
    (tmp_path / f"{PREFIX}young-0").touch()
    (tmp_path / f"{PREFIX}old-0").touch()
    os.utime(tmp_path / f"{PREFIX}old-0", (time.time() - 3600,) * 2)
    swept = {path.name for path in remove_stale(tmp_path)}
    assert swept == {f"{PREFIX}{name}-0" for name in ("dead", "reused", "old")}
    assert {path.name for path in tmp_path.iterdir()} == {f"{PREFIX}alive-0", f"{PREFIX}young-0", "inc-other-0"}


def test_a_start_sweeps_what_a_crash_left(one_of_four: Path) -> None:
    write_slab(one_of_four / f"{PREFIX}crashed-0", 2**22 - 1, 1)
    with pytest.raises(PeerMissing):
        join()
    assert files(one_of_four) == []


def test_a_zombie_counts_as_dead() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    time.sleep(0.01)
    deadline = time.monotonic() + 10
    while process_start(zombie.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_start(zombie.pid) == 0 and process_start(os.getpid()) > 0
    zombie.wait()
