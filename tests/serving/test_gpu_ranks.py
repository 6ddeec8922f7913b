"""How a rank inside vLLM and a switch join a job on GPUs, and what a step hands to the kernel. Heap and kernel are stand-ins.

What needs a GPU, that the kernel reads the count from device memory also in a captured graph: tests/gpu/megakernel_program.py,
and results/measure_vllm.py with vLLM around it.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from inc_runtime import server_job
from inc_runtime.config import CommunicationModel, Implementation, LayerShape, Pipeline, SumOrder
from inc_runtime.environment import Environment
from inc_runtime.errors import ArrivalTimeout, ConfigurationError, WaitRecord
from inc_runtime.placement import PlacementKind
from inc_runtime.protocol import Role, World
from inc_runtime.rendezvous import JOB_NOTE, JobNote, note
from megakernel import vllm_rank
from megakernel.vllm_rank import Placement, RankRuntime, pipeline_of
from switch_emulator import switch_command

SHAPE = LayerShape(num_experts=8, top_k=2, hidden_size=16, intermediate_size=8)
LARGEST = 8192


class Heap:
    """Stands for a DeviceHeap."""

    def __init__(self, gpu: int) -> None:
        self.job = SimpleNamespace(seat=SimpleNamespace(gpu=gpu))
        self.layout = SimpleNamespace(heap_bytes=1)


class Event:
    """Stands for a CUDA event: each is 2 ms after the one before."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        Event.now_ms += 2.0
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


class Layer:
    """Stands for a MoELayer on a GPU: adds 1 to the rows that count."""

    error: Exception | None = None

    def __init__(self, shape, pipeline, implementation, backend, experts, *, layer) -> None:
        self.backend, self.experts, self.number = backend, experts, layer
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, rows, logits, *, out, bound_tokens, token_count):
        count = int(token_count)
        self.calls.append((len(rows), count, bound_tokens))
        out[:count] = rows[:count] + 1
        return out

    def raise_on_error(self) -> None:
        if self.error:
            raise self.error


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors on the CPU, a job of its own."""
    monkeypatch.setattr(vllm_rank, "device_of", lambda placement: torch.device("cpu"))
    monkeypatch.setattr(vllm_rank, "MoELayer", Layer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setenv("INC_JOB_ID", f"gpu-ranks-{os.getpid()}")
    monkeypatch.setenv("INC_SHARED_MEMORY_FOLDER", str(tmp_path))
    monkeypatch.setenv("INC_START_LIMIT_S", "20")


def joined(monkeypatch: pytest.MonkeyPatch, implementation: Implementation, ranks: int = 2) -> tuple[list, list]:
    """All ranks of one job, and the (note, PE) that each came with."""
    seen: list = [None] * ranks
    all_there = Barrier(ranks)

    def join(job: JobNote, pe: int) -> Heap:
        seen[pe] = (job, pe)
        all_there.wait(20)
        return Heap(pe)

    monkeypatch.setattr(vllm_rank, "join_server_heap", join)

    def rank(number: int) -> RankRuntime:
        runtime = RankRuntime(implementation, Placement(number, ranks, gpu=number), LARGEST, torch.bfloat16)
        runtime.add_layer(SHAPE)
        return runtime

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks))), seen


def leave(runtimes: list[RankRuntime], monkeypatch: pytest.MonkeyPatch) -> list[Heap]:
    """Close all; returns the heaps whose switches were told to stop."""
    stopped: list[Heap] = []
    monkeypatch.setattr(vllm_rank, "stop_switches", stopped.append)
    for runtime in runtimes:
        runtime.close()
        runtime.close()
    return stopped


def test_the_plain_all_to_all_of_gpus_needs_no_switch_and_all_ranks_meet_at_the_port_of_rank_0(monkeypatch) -> None:
    runtimes, seen = joined(monkeypatch, Implementation.MEGAKERNEL)
    (first, _), (second, pe) = seen
    assert first.world == World(2, 0, 0) and first.model is CommunicationModel.ALL_TO_ALL
    assert first.port and second == first and pe == 1
    assert len(leave(runtimes, monkeypatch)) == 2, "each rank says once that it leaves"


def test_the_forms_with_switches_take_those_that_were_started(monkeypatch) -> None:
    environment = Environment.read()
    started = {"world": [2, 1, 1]}
    with note(environment, "dispatch-switch-0", started), note(environment, "combine-switch-0", started):
        runtimes, seen = joined(monkeypatch, Implementation.MEGAKERNEL_INC)
    assert seen[1][0].world == World(2, 1, 1) and seen[1][0].pipeline.sum_order is SumOrder.RANK
    leave(runtimes, monkeypatch)


def test_a_step_hands_over_all_rows_and_the_count_lies_where_the_kernel_reads_it(monkeypatch) -> None:
    runtimes, _ = joined(monkeypatch, Implementation.MEGAKERNEL, ranks=1)
    [rank] = runtimes
    rank.load(0, torch.zeros(8, 16, 16), torch.zeros(8, 16, 8))
    rows, logits = torch.ones(8, 16), torch.zeros(8, 8)
    address = rank.token_count.data_ptr()
    for tokens in (5, 0, 8):
        rank.begin_step(tokens)
        output = rank.run(0, rows, logits, 99, 64)
        assert (output[:tokens] == 2).all() and not output[tokens:].any()
    assert rank.layers[0].calls == [(8, 5, 64), (8, 0, 64), (8, 8, 64)]
    assert rank.token_count.data_ptr() == address, "a captured graph reads this address"
    leave(runtimes, monkeypatch)


def test_launches_are_timed_by_events_and_captured_ones_are_not(monkeypatch) -> None:
    [rank], _ = joined(monkeypatch, Implementation.MEGAKERNEL, ranks=1)
    rank.load(0, torch.zeros(8, 16, 16), torch.zeros(8, 16, 8))
    rows, logits = torch.ones(8, 16), torch.zeros(8, 8)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        rank.begin_step(5)
        rank.run(0, rows, logits, 5, 8)
    rank.begin_step(0)
    totals = rank.metrics.totals[0]
    assert (totals.calls, totals.time_us, totals.tokens) == (1, 2000.0, 5)
    leave([rank], monkeypatch)


def test_what_a_kernel_has_reported_ends_the_next_step(monkeypatch) -> None:
    [rank], _ = joined(monkeypatch, Implementation.MEGAKERNEL, ranks=1)
    rank.load(0, torch.zeros(8, 16, 16), torch.zeros(8, 16, 8))
    record = WaitRecord("rank 0", "SUMS", -1, 0, 0, 0, waited_s=1.0, cause="The combine switch is gone.")
    rank.layers[0].error = ArrivalTimeout(record, "Look at it.")
    with pytest.raises(ArrivalTimeout, match="combine switch"):
        rank.begin_step(1)
    leave([rank], monkeypatch)


def test_a_rank_on_another_gpu_than_its_place_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(vllm_rank, "join_server_heap", lambda job, pe: Heap(gpu=1))
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES"):
        RankRuntime(Implementation.MEGAKERNEL, Placement(0, 1, gpu=0), LARGEST, torch.bfloat16).add_layer(SHAPE)


def test_steps_are_cut_as_was_best_on_the_backend_unless_the_user_says_otherwise(monkeypatch) -> None:
    on_gpu, on_host = Placement(0, 2, gpu=0), Placement(0, 2)
    cut = pipeline_of(Environment.read(), on_gpu, LARGEST, torch.bfloat16)
    assert (cut.microbatch_tokens, cut.depth) == (1024, 4)
    assert pipeline_of(Environment.read(), on_gpu, 64, torch.bfloat16).microbatch_tokens == 64
    assert pipeline_of(Environment.read(), on_host, LARGEST, torch.float32).microbatch_tokens == 256
    monkeypatch.setenv("INC_VLLM_MICROBATCH", "512")
    assert pipeline_of(Environment.read(), on_gpu, LARGEST, torch.bfloat16).microbatch_tokens == 512


@pytest.mark.parametrize(
    ("world", "kind"),
    [(World(2, 0, 0), PlacementKind.NATIVE), (World(2, 1, 1), PlacementKind.SHARED)],
    ids=["direct", "switches"],
)
def test_switches_share_the_gpus_of_the_ranks(monkeypatch, world: World, kind: PlacementKind) -> None:
    seen = {}
    monkeypatch.setattr(server_job, "StoreGroup", lambda port, pe, names, limit_s: (port, pe, names))
    monkeypatch.setattr(server_job, "DeviceHeap", lambda job, layout: (job, layout))
    monkeypatch.setattr(
        server_job.NvshmemJob, "join", lambda world, slab, kind, *, pe, group: seen.update(kind=kind, slab=slab, group=group)
    )
    model = CommunicationModel.INC_ALL_TO_ALL if world.num_pes > 2 else CommunicationModel.ALL_TO_ALL
    _, layout = server_job.join_server_heap(JobNote(SHAPE, Pipeline(64, 16, 4), model, world, 4711), 1)
    assert seen["kind"] is kind and seen["slab"] == layout.heap_bytes
    assert seen["group"] == (4711, 1, [world.name_of(pe) for pe in range(world.num_pes)])


@pytest.mark.parametrize("role", ["dispatch", "combine"])
def test_a_switch_of_a_job_on_gpus_runs_its_kernel(monkeypatch, role: str) -> None:
    world, seen = World(2, 1, 1), {}

    class Running:
        def __init__(self, heap: Heap, order: SumOrder) -> None:
            seen["order"] = order

        def wait(self) -> None:
            seen["waited"] = True

    monkeypatch.setattr(switch_command, "join_server_heap", lambda job, pe: seen.update(pe=pe) or Heap(0))
    monkeypatch.setattr(switch_command, "RunningSwitch", Running)
    monkeypatch.setattr(switch_command.signal, "signal", lambda *_: None)
    pipeline = Pipeline(64, 16, 4, sum_order=SumOrder.RANK)
    job = JobNote(SHAPE, pipeline, CommunicationModel.INC_ALL_TO_ALL, world, 4711)
    with note(Environment.read(), JOB_NOTE, job.to_json()):
        options = argparse.Namespace(role=role, plane=0, ranks=2, dispatch_switches=1, combine_switches=1)
        assert switch_command.run(options) == 0
    expected = Role.DISPATCH_SWITCH if role == "dispatch" else Role.COMBINE_SWITCH
    assert seen == {"pe": seen["pe"], "order": SumOrder.RANK, "waited": True} and world.role_of(seen["pe"]) is expected
