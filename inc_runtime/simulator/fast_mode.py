"""Fast mode: one layer in milliseconds, for sweeps. The event mode's network under state machines in place of the role programs.

`fast_transfers.py` has the ranks, `fast_switches.py` and `fast_phases.py` the INC switches, `fast_plain.py` and `fast_relay.py`
the plain forms.
Proved against the event mode on samples of small cases (`tests/backend/test_simulator_fast.py`); `exchanges.tested_error` states
what those tests allow.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence

import numpy as np

from inc_runtime.simulator.event_mode import LayerResult, busy_shares
from inc_runtime.simulator.exchanges import fast_as_flows
from inc_runtime.simulator.fast_phases import PhasedSwitches
from inc_runtime.simulator.fast_plain import FlowSwitches, Messages
from inc_runtime.simulator.fast_relay import Relays
from inc_runtime.simulator.fast_switches import InNetworkSwitches
from inc_runtime.simulator.fast_transfers import Switches, TransferLayer
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads, RoutingKind


def switches_of(plan: LayerPlan) -> Callable[[TransferLayer], Switches]:
    """What stands between the ranks of a plan."""
    model = plan.scenario.model
    if model.in_network:
        return PhasedSwitches if model.phased else InNetworkSwitches
    if fast_as_flows(plan):
        return FlowSwitches
    return Messages if plan.real and plan.scenario.num_leaves == 1 and not model.phased else Relays


def simulate_fast(plan: LayerPlan, loads: Sequence[MicrobatchLoads] | None = None) -> LayerResult:
    """One layer in fast mode. `loads`: one per microbatch; without, those of `expected_loads`. Raises Deadlock."""
    layer = TransferLayer(plan, expected_loads(plan) if loads is None else loads, switches_of(plan))
    end = layer.run()
    units = {(unit, rank): busy for unit, of_rank in layer.unit_busy.items() for rank, busy in enumerate(of_rank)}
    shares = busy_shares(units, layer.network.busy, end)
    layer.release()
    return LayerResult(plan, "fast", end, shares)


def drawn_loads(plan: LayerPlan) -> list[MicrobatchLoads]:
    """The loads that the event mode draws: exact, and slow for many tokens."""
    return [plan.loads(number) for number in range(plan.num_microbatches)]


SAMPLE_TOKENS = 4096
DRAWN_ONE_BY_ONE = 64
"""Up to this many ranks the rows of every pair of ranks are drawn; above, the sum that a rank receives, shared out evenly."""
KEPT_LOADS = 64
"""Loads of so many scenarios are kept."""
_rates: dict[tuple, tuple[np.ndarray, ...]] = {}


def _sampled_rates(plan: LayerPlan) -> tuple[np.ndarray, ...]:
    """Per token: choices of each expert, rows [W, W], leaf_up, leaf_rows, leaf_cross, at_home. Kept for each routing."""
    scenario = plan.scenario
    key = (plan.shape, scenario.num_ranks, scenario.routing, scenario.replicas, scenario.model.selective, scenario.ranks_per_leaf)
    if key not in _rates:
        num_tokens = max(1, SAMPLE_TOKENS // scenario.num_ranks)
        ids = plan.sample_experts(scenario.num_ranks, num_tokens)
        loads = plan.loads(0, ids)
        experts = np.bincount(ids[ids >= 0], minlength=plan.shape.num_experts) / (scenario.num_ranks * num_tokens)
        if scenario.routing.kind is RoutingKind.UNIFORM:
            experts = np.full(plan.shape.num_experts, plan.shape.top_k / plan.shape.num_experts)
        per_token = (loads.rows, loads.leaf_up, loads.leaf_rows, loads.leaf_cross, loads.at_home)
        _rates[key] = (experts, *(x / num_tokens for x in per_token))
    return _rates[key]


def expected_loads(plan: LayerPlan) -> tuple[MicrobatchLoads, ...]:
    """Loads drawn around the rates of a sample of tokens, binomially: what a drawn routing gives, in a fraction of the time.

    Scenarios that differ in links, switches or units alone share them.
    """
    scenario = plan.scenario
    key = (
        *(plan.shape, scenario.num_ranks, scenario.routing, scenario.replicas, scenario.model.selective),
        *(scenario.ranks_per_leaf, plan.machine.tile_rows, scenario.network.planes),
        *(scenario.pipeline.bound_tokens, scenario.pipeline.microbatch_tokens, scenario.pipeline.edge_tokens),
    )
    if key not in _drawn:
        if len(_drawn) >= KEPT_LOADS:
            _drawn.clear()
        _drawn[key] = _draw_loads(plan)
    return _drawn[key]


_drawn: dict[tuple, tuple[MicrobatchLoads, ...]] = {}


def _draw_loads(plan: LayerPlan) -> tuple[MicrobatchLoads, ...]:
    scenario, shape = plan.scenario, plan.shape
    num_ranks, tile = scenario.num_ranks, plan.machine.tile_rows
    experts, rows, leaf_up, leaf_rows, leaf_cross, at_home = _sampled_rates(plan)
    rng = np.random.default_rng(scenario.routing.seed)
    first = [shape.experts_of_rank(rank, num_ranks).start for rank in range(num_ranks)]
    # Rows of one rank for another: their mean over senders, as all ranks draw alike.
    column = np.tile(rows.mean(axis=0), (num_ranks, 1)) if scenario.model.selective else rows
    result = []
    for number in range(plan.num_microbatches):
        tokens = plan.tokens_of(number)
        counts = rng.binomial(tokens * num_ranks, np.minimum(experts, 1.0))
        tiles = -(-counts // tile) * tile
        pairs, padded, active = (np.add.reduceat(x, first) for x in (counts, tiles, (counts > 0).astype(np.int64)))
        if num_ranks <= DRAWN_ONE_BY_ONE:
            drawn = rng.binomial(tokens, np.clip(column, 0, 1))
        else:
            # One draw per expert rank, shared out evenly: what its port sees is the sum.
            total = rng.binomial(tokens * num_ranks, np.clip(column[0], 0, 1))
            drawn = np.tile(total / num_ranks, (num_ranks, 1))
        up, down, cross, home = (np.rint(x * tokens).astype(np.int64) for x in (leaf_up, leaf_rows, leaf_cross, at_home))
        by_plane = drawn * (np.array(plan.plane_tokens(number)) / tokens)[:, None, None]
        result.append(MicrobatchLoads(np.full(num_ranks, tokens), drawn, pairs, padded, active, up, down, cross, home, by_plane))
    return tuple(result)


def sweep(plans: Sequence[LayerPlan], *, processes: int = 2, progress: Callable[[int], None] = lambda done: None) -> list[float]:
    """Layer times in us of many plans in fast mode, in order, on `processes` processes."""
    times: list[float] = []
    gc.disable()  # nothing of a layer is left for it, and looking takes a fifth of the time
    try:
        _sweep(plans, processes, times, progress)
    finally:
        gc.enable()
    return times


def _sweep(plans: Sequence[LayerPlan], processes: int, times: list[float], progress: Callable[[int], None]) -> None:
    if processes <= 1 or len(plans) < 64:
        for plan in plans:
            times.append(simulate_fast(plan).layer_time_us)
            progress(len(times))
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for time_us in pool.imap(_layer_time, plans, chunksize=32):
            times.append(time_us)
            progress(len(times))


def _layer_time(plan: LayerPlan) -> float:
    return simulate_fast(plan).layer_time_us
