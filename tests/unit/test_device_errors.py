"""What a record of the device becomes on the host, and which heaps the kernels refuse. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, RowFormat
from inc_runtime.device.arguments import ERROR_RECORD, ErrorKind
from inc_runtime.errors import ArrivalTimeout, ConfigurationError, HeapTooLarge, Mismatch, PlacementError
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.protocol import Header, Tag, World, arrival_threshold, signal_word

WORLD = World(4)
SHAPE = LayerShape(num_experts=16, top_k=2, hidden_size=64, intermediate_size=64)


def layout(pipeline: Pipeline = Pipeline(8, 8), model=CommunicationModel.INC_ALL_TO_ALL) -> HeapLayout:  # noqa: B008
    return HeapLayout(Dims.of(model, WORLD, SHAPE, pipeline))


def job(slab_bytes: int = 1 << 30, bases: tuple[int, ...] = (1,) * 6) -> SimpleNamespace:
    return SimpleNamespace(world=WORLD, name="dispatch switch 0", pe=4, slab_bytes=slab_bytes, bases=bases)


def reported(*, model=CommunicationModel.INC_ALL_TO_ALL, **fields) -> Exception:
    """What a dispatch switch raises when its kernel left this record."""
    heap = DeviceHeap.__new__(DeviceHeap)
    heap.job, heap.layout = job(), layout(model=model)
    heap.record = np.zeros(1, ERROR_RECORD)
    for name, value in fields.items():
        heap.record[name] = value
    return heap._reported()


def test_an_expired_wait_names_who_is_missing_and_what_was_seen():
    seen = np.zeros(32, np.uint64)
    seen[:4] = [signal_word(7, True), signal_word(7, False), signal_word(6, True), signal_word(7, True)]
    error = reported(
        kind=ErrorKind.TIMEOUT,
        tag=Tag.DISPATCH_TOKENS,
        magic=7,
        expected=arrival_threshold(7),
        missing=0b0100,
        seen=seen,
        waited_ns=2_000_000_000,
    )
    assert isinstance(error, ArrivalTimeout)
    assert error.record.missing == ["rank 2"] and error.record.slot == 7 % 3 and error.record.waited_s == 2.0
    assert "Missing: rank 2 (its flag holds magic 6)" in str(error)


@pytest.mark.parametrize(
    "model, tag, sender, missing, names",
    [
        (CommunicationModel.ALL_TO_ALL, Tag.EXPERT_ROWS, -1, 0b10, ["dispatch switch 0 for rank 1"]),
        (CommunicationModel.ALL_TO_ALL, Tag.TOKEN_SUMS, 3, 0b110, ["combine switch 0 for rank 3"]),
        (CommunicationModel.ALL_TO_ALL, Tag.RELAY_CREDIT, 5, 0b1, ["combine switch 0"]),
        (CommunicationModel.ALL_TO_ALL_PHASED, Tag.RELAY_PHASE, -1, 0b100, ["combine switch 0 for rank 2"]),
        (CommunicationModel.INC_ALL_TO_ALL_PHASED, Tag.EXPERT_ROWS, -1, 0b1000, ["dispatch switch 0 for rank 3"]),
        (CommunicationModel.INC_ALL_TO_ALL_PHASED, Tag.DISPATCH_GRANT, 4, 0b1, ["dispatch switch 0"]),
        (CommunicationModel.INC_ALL_TO_ALL_PHASED, Tag.DISPATCH_BARRIER, -1, 0b100, ["rank 2"]),
    ],
)
def test_a_wait_behind_a_relay_or_a_phase_names_the_switch_and_the_rank(model, tag, sender, missing, names):
    error = reported(model=model, kind=ErrorKind.TIMEOUT, tag=tag, magic=2, sender=sender, missing=missing, expected=4)
    assert isinstance(error, ArrivalTimeout) and error.record.missing == names


def test_a_wrong_header_names_the_sender_and_both_values():
    seen = np.full(32, 16, np.uint64)
    error = reported(
        kind=ErrorKind.MISMATCH, tag=Tag.DISPATCH_TOKENS, magic=3, sender=1, field=Header.BOUND_TOKENS, expected=8, seen=seen
    )
    assert isinstance(error, Mismatch)
    assert "rank 1 brought bound_tokens = 16 to magic 3, expected 8" in str(error)


def test_a_bad_expert_names_the_token_and_a_negative_id_stays_negative():
    seen = np.full(32, np.int64(-5).view(np.uint64))
    error = reported(kind=ErrorKind.BAD_EXPERT, tag=Tag.DISPATCH_TOKENS, magic=1, sender=2, field=3, expected=16, seen=seen)
    assert isinstance(error, ConfigurationError)
    assert "rank 2 sent token 3 of magic 1 to expert -5, expected -1 to 15" in str(error)


@pytest.mark.parametrize(
    "given, pipeline, error, words",
    [
        (job(slab_bytes=1024), Pipeline(8, 8), HeapTooLarge, "Join with a larger slab"),
        (job(), Pipeline(8, 8, depth=65), ConfigurationError, "depth = 65"),
        (job(), Pipeline(8, 8, row_format=RowFormat.FLOAT32), ConfigurationError, "row_format = float32"),
        (job(bases=(1, 1, 0, 1, 1, 1)), Pipeline(8, 8), PlacementError, "cannot map the memory of rank 2"),
    ],
)
def test_a_heap_that_the_kernels_cannot_serve_is_refused(given, pipeline, error, words):
    with pytest.raises(error, match=words):
        DeviceHeap(given, layout(pipeline))
