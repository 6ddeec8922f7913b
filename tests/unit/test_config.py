"""What `config.check` refuses: the message names the value, the limit and the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inc_runtime.config import LayerShape, Pipeline, check
from inc_runtime.environment import Environment
from inc_runtime.errors import ConfigurationError

SHAPE = LayerShape(8, 2, 16, 4)
PIPELINE = Pipeline(10, 4)


def test_what_can_run_is_not_refused() -> None:
    check(SHAPE, PIPELINE, 4)
    check(replace(SHAPE, top_k=8), replace(PIPELINE, depth=1, ranks_per_phase=4), 4)
    check(LayerShape(1, 1, 8, 1), Pipeline(1, 100), 30)


@pytest.mark.parametrize(
    ("changes", "limit", "remedy"),
    [
        ({"num_experts": 0}, "at least 1", "real layer shape"),
        ({"top_k": 0}, "at least 1", "real layer shape"),
        ({"hidden_size": 0}, "at least 1", "real layer shape"),
        ({"intermediate_size": -1}, "at least 1", "real layer shape"),
        ({"top_k": 9}, "num_experts = 8", "fewer experts"),
        ({"hidden_size": 12}, "multiple of 8", "Pad"),
    ],
    ids=str,
)
def test_a_shape_that_cannot_run_is_refused(changes: dict[str, int], limit: str, remedy: str) -> None:
    refused(replace(SHAPE, **changes), PIPELINE, changes, limit, remedy)


@pytest.mark.parametrize(
    ("changes", "limit", "remedy"),
    [
        ({"bound_tokens": 0}, "at least 1", "token count"),
        ({"microbatch_tokens": 0}, "at least 1", "token count"),
        ({"edge_tokens": 0}, "between 1 and microbatch_tokens", "one size"),
        ({"edge_tokens": 10**6}, "between 1 and microbatch_tokens", "one size"),
        ({"depth": 0}, "at least 1", "overlap"),
        ({"ranks_per_phase": 0}, "between 1 and num_ranks = 4", "within the world"),
        ({"ranks_per_phase": 5}, "between 1 and num_ranks = 4", "within the world"),
    ],
    ids=str,
)
def test_a_pipeline_that_cannot_run_is_refused(changes: dict[str, int], limit: str, remedy: str) -> None:
    refused(SHAPE, replace(PIPELINE, **changes), changes, limit, remedy)


def refused(shape: LayerShape, pipeline: Pipeline, changes: dict[str, int], limit: str, remedy: str) -> None:
    (name, value), *_ = changes.items()
    with pytest.raises(ConfigurationError) as refusal:
        check(shape, pipeline, 4)
    message = str(refusal.value)
    assert message.startswith(f"{name} = {value}: ") and limit in message and remedy in message, message


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_ranks = 0"):
        check(SHAPE, PIPELINE, 0)


@pytest.mark.parametrize(("bound", "microbatch", "number"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2), (9, 4, 3)])
def test_microbatches_follow_from_the_bound(bound: int, microbatch: int, number: int) -> None:
    assert Pipeline(bound, microbatch).num_microbatches == number


@pytest.mark.parametrize(
    ("bound", "microbatch", "edge", "sizes"),
    [
        (32, 8, 2, [2, 4, 8, 8, 4, 4, 2]),
        (28, 8, 4, [4, 8, 8, 4, 4]),
        (24, 8, 3, [3, 6, 6, 6, 3]),
        (7, 8, 2, [2, 3, 2]),
        (4, 8, 2, [4]),
        (1, 8, 1, [1]),
        (3, 8, 1, [1, 1, 1]),
        (24, 8, 8, [8, 8, 8]),
    ],
)
def test_sizes_double_from_either_edge(bound: int, microbatch: int, edge: int, sizes: list[int]) -> None:
    pipeline = Pipeline(bound, microbatch, edge_tokens=edge)
    parts = [pipeline.tokens_of(number) for number in range(pipeline.num_microbatches)]
    assert [part.stop - part.start for part in parts] == sizes


def test_every_cut_covers_the_tokens_once_and_no_microbatch_is_empty_or_too_large() -> None:
    for bound in range(1, 50):
        for microbatch in range(1, 18):
            for edge in (None, *range(1, microbatch + 1)):
                pipeline = Pipeline(bound, microbatch, edge_tokens=edge)
                parts = [pipeline.tokens_of(number) for number in range(pipeline.num_microbatches)]
                assert [t for part in parts for t in range(bound)[part]] == list(range(bound)), pipeline
                assert all(0 < part.stop - part.start <= microbatch for part in parts), pipeline


def test_an_environment_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INC_WAIT_LIMIT_S", "soon")
    with pytest.raises(ConfigurationError, match="INC_WAIT_LIMIT_S = 'soon'"):
        Environment.read()


def test_the_environment_is_read_with_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INC_WAIT_LIMIT_S", "INC_TRACE", "RANK", "WORLD_SIZE", "INC_SHARED_MEMORY_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    environment = Environment.read()
    assert environment.wait_limit_s == 60 and environment.shared_memory_folder == "/dev/shm"
    assert not environment.trace and not environment.under_torchrun
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert Environment.read().under_torchrun and Environment.read().rank == 3
