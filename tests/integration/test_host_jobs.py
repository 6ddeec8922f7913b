"""Whole jobs under torchrun on the host backend: every model and implementation, as a user would run them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from inc_runtime.config import SumOrder
from inc_runtime.protocol import World
from tests.host_jobs import NUM_TOKENS, OTHER_SHAPE, PIPELINE, SHAPE, layer_inputs, models_of, shared_memory_left, torchrun
from tests.routings import layer_of
from tests.simulate import simulate

WORLDS = {"two ranks": World(2, 1, 1), "three ranks, two combine switches": World(3, 1, 2), "three ranks alone": World(3, 0, 0)}


@pytest.fixture(scope="module", params=list(WORLDS))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    """One torchrun job that runs everything; its processes compare with the reference, and bad inputs are refused first."""
    world, folder = WORLDS[request.param], tmp_path_factory.mktemp("job")
    arguments = [world.num_ranks, world.num_dispatch_switches, world.num_combine_switches]
    job = torchrun(world.num_pes, ["models", str(folder), *map(str, arguments)], INC_WAIT_LIMIT_S="30")
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output[-6000:]
    return world, folder


def test_every_model_and_the_baseline_give_the_reference_over_poisoned_memory_and_delays(
    finished: tuple[World, Path],
) -> None:
    world, folder = finished
    assert sorted(path.name for path in folder.glob("ok-*")) == sorted(f"ok-{pe}" for pe in range(world.num_pes))


def test_a_finished_job_leaves_no_shared_memory(finished: tuple[World, Path]) -> None:
    assert shared_memory_left() == []


def outputs_of(folder: Path, name: str, rank: int) -> list[np.ndarray]:
    with np.load(folder / f"{name}-{rank}.npz") as arrays:
        return [arrays[f"arr_{i}"].view(ml_dtypes.bfloat16) for i in range(4)]


def test_sums_in_rank_order_are_bitwise_equal_on_every_model_and_in_the_baseline(finished: tuple[World, Path]) -> None:
    world, folder = finished
    names = [model.value for model in models_of(world)] + ["baseline-all_to_all", "baseline-all_gather_reduce_scatter"]
    for rank in range(world.num_ranks):
        wanted = outputs_of(folder, names[0], rank)
        for name in names[1:]:
            for number, (seen, expected) in enumerate(zip(outputs_of(folder, name, rank), wanted, strict=True)):
                assert seen.tobytes() == expected.tobytes(), f"{name}, rank {rank}, call {number}"


def test_the_simulated_backend_returns_the_same_bits_as_the_processes(finished: tuple[World, Path]) -> None:
    world, folder = finished
    shapes = [SHAPE, SHAPE, OTHER_SHAPE, OTHER_SHAPE]
    calls = [layer_inputs(number, shape, NUM_TOKENS[: world.num_ranks]) for number, shape in enumerate(shapes)]
    pipeline = type(PIPELINE)(**{**vars(PIPELINE), "sum_order": SumOrder.RANK})
    model = models_of(world)[-1]
    outputs, _ = simulate(
        layer_of(SHAPE),
        model,
        pipeline,
        world,
        calls,
        layers=[layer_of(shape) for shape in shapes],
        jitter_us=20.0,
    )
    for rank in range(world.num_ranks):
        seen = outputs_of(folder, model.value, rank)
        for number in range(4):
            assert outputs[number][rank].tobytes() == seen[number].tobytes(), f"rank {rank}, call {number}"
