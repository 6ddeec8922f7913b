"""Mutants of the protocol: one rule removed, searched for over seeds, and the same seed without the mutant.

A mutant replaces one piece of a role program or of the simulated fabric. Jitter is large against the length of a microbatch, so
that reorderings are real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from inc_runtime import heap_layout
from inc_runtime.backends.simulated import SimulatedPe
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.protocol import World
from tests.expected import check_outputs
from tests.routings import draw_call, layer_of
from tests.simulate import simulate

Model = CommunicationModel
SEEDS = range(50)
THREE_RANKS = World(3)
SHAPE = LayerShape(6, 3, 8, 8)
LAYER = layer_of(SHAPE)


@dataclass(frozen=True)
class Setting:
    """One job. `tokens` per rank; microbatches in `nothing_in` choose no expert; at least 2D+1 microbatches."""

    model: Model
    world: World = THREE_RANKS
    depth: int = 2
    microbatch_tokens: int = 2
    ranks_per_phase: int = 1
    num_microbatches: int = 5
    tokens: tuple[int, ...] = (10, 10, 10)
    routing: str = "uniform"
    nothing_in: tuple[int, ...] = ()
    jitter_us: float = 100.0
    calls: int = 1
    relay_cells: int = 8
    barrier: bool = True
    local_bypass: bool = False
    row_group_tokens: int | None = None

    @property
    def pipeline(self) -> Pipeline:
        bound = self.num_microbatches * self.microbatch_tokens
        return Pipeline(
            bound, self.microbatch_tokens, self.depth, self.ranks_per_phase, self.barrier,
            local_bypass=self.local_bypass, row_group_tokens=self.row_group_tokens,
        )  # fmt: skip


def run(setting: Setting, seed: int) -> None:
    """Run one seed. Raises AssertionError for wrong rows, or what the simulation raised."""
    rng = np.random.default_rng(seed)
    calls = [
        draw_call(rng, SHAPE, setting.tokens, setting.routing, setting.world.num_ranks) for _ in range(setting.calls)
    ]
    for call in calls:
        for given in call:
            for number in setting.nothing_in:
                given.expert_ids[number * setting.microbatch_tokens : (number + 1) * setting.microbatch_tokens] = -1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heap_layout, "RELAY_CELLS", setting.relay_cells * setting.world.num_ranks)
        patch.setattr(heap_layout, "MIN_RELAY_CELLS", 1)
        patch.setattr(heap_layout, "MAX_CHUNK_BYTES", 2 * SHAPE.hidden_size * setting.microbatch_tokens)
        outputs, _ = simulate(
            LAYER,
            setting.model,
            setting.pipeline,
            setting.world,
            calls,
            seed=seed,
            jitter_us=setting.jitter_us,
            traced=False,
        )
    for call, output in zip(calls, outputs, strict=True):
        check_outputs(LAYER, call, output, f"{setting} seed {seed}", sum_roundings=1 + setting.local_bypass)


def caught(setting: Setting, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]) -> Exception:
    """Return what the first seed that shows the mutant raised. Without the mutant that seed must pass."""
    mutate(monkeypatch)
    for seed in SEEDS:
        try:
            run(setting, seed)
        except Exception as error:  # a mutant may break anything
            monkeypatch.undo()
            run(setting, seed)
            return error
    raise AssertionError(f"{setting}: fifty schedules ran without a sign of the mutant")


def without_quiet_in(function: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutant whose `function` does not call quiet."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        original = SimulatedPe.quiet

        def quiet(self: SimulatedPe) -> None:
            if sys._getframe(1).f_code.co_name != function:
                original(self)

        monkeypatch.setattr(SimulatedPe, "quiet", quiet)

    return mutate


INC = Setting(Model.INC_ALL_TO_ALL)
INC_WITH_EMPTY_SUMS = replace(INC, depth=3, num_microbatches=7, tokens=(14, 14, 14), nothing_in=(1, 3, 5))
INC_PHASED = Setting(Model.INC_ALL_TO_ALL_PHASED)
RELAYED = Setting(Model.ALL_TO_ALL)
ALL_MODELS = [Setting(model) for model in Model]
TWO_CALLS = [replace(s, depth=1, num_microbatches=3, tokens=(6, 6, 6), calls=2) for s in ALL_MODELS]
model_of = {"ids": lambda setting: setting.model.value}
