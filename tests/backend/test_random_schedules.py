"""Random schedules of random cases on the simulator: at least 2,000 in all, each against the float64 reference.

Every case runs at least 2D+1 microbatches over poisoned memory. A failure names the model and the seed; run it alone with
`run_case(model, seed)`. Relayed chunks hold one, two or four rows here, so that messages of several chunks occur.
"""

from __future__ import annotations

import pytest

from inc_runtime import heap_layout
from inc_runtime.config import CommunicationModel
from tests.expected import check_outputs
from tests.routings import random_case
from tests.simulate import simulate

SCHEDULES = 300


def run_case(model: CommunicationModel, seed: int) -> None:
    case = random_case(model, seed)
    row_bytes = 2 * case.layers[0].shape.hidden_size
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heap_layout, "MAX_CHUNK_BYTES", row_bytes << seed % 3)
            patch.setattr(heap_layout, "RELAY_CELLS", 0)  # the least number of cells, so that senders wait for credits
            outputs, _ = simulate(
                case.layers[0],
                model,
                case.pipelines[0],
                case.world,
                case.calls,
                seed=seed,
                jitter_us=case.jitter_us,
                layers=case.layers,
                pipelines=case.pipelines,
                traced=False,
            )
    except Exception as error:
        raise AssertionError(f"{case.label}: {type(error).__name__}: {error}") from error
    for layer, call, output in zip(case.layers, case.calls, outputs, strict=True):
        check_outputs(layer, call, output, case.label, sum_roundings=1 + case.pipelines[0].local_bypass)


@pytest.mark.parametrize("model", list(CommunicationModel), ids=lambda model: model.value)
def test_every_schedule_of_every_case_gives_the_reference(model: CommunicationModel) -> None:
    for seed in range(SCHEDULES):
        run_case(model, seed)


def test_there_are_at_least_two_thousand_schedules() -> None:
    assert SCHEDULES * len(CommunicationModel) >= 2000
