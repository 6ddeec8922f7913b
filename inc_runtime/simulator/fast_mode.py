"""Fast mode: one layer in a millisecond, for sweeps. The same recurrences as the event mode, one task per step of a microbatch
and one numpy operation for all ranks, instead of one event per packet, flag and wait.

Proved against the event mode on a grid of small cases (`tests/backend/test_simulator_fast.py`). Covers real switches in every
communication model and topology, and the emulated switches of the INC collectives; refuses the rest by name.
`fast_network.py` has the steps of the network.
"""

from __future__ import annotations

import heapq
import multiprocessing
from collections.abc import Callable, Sequence

import numpy as np

from inc_runtime.errors import ConfigurationError, Deadlock
from inc_runtime.simulator.event_backend import MATRIX, VECTOR
from inc_runtime.simulator.event_mode import LayerResult
from inc_runtime.simulator.fast_network import EXACT_FLOW_RANKS, FastNetwork
from inc_runtime.simulator.fast_phases import FastPhases
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads, RoutingKind

STAGES = ("send", "receive", "multiply", "publish", "finish")
POSITION = {stage: position for position, stage in enumerate(STAGES)}


def check_fast(plan: LayerPlan) -> None:
    """Refuse what fast mode does not model. Raises ConfigurationError."""
    model = plan.scenario.model
    if not plan.real and (model.phased or not model.in_network):
        raise ConfigurationError(
            f"mode = fast: an emulated switch under {model.value} is modelled by the event mode alone. Use --mode event."
        )
    if plan.real and plan.scenario.network.planes > 1:
        raise ConfigurationError("mode = fast: planes of real switches are modelled by the event mode alone. Use --mode event.")


GAP_US = 5.0
"""Ranks whose next step begins within this of another's take it together; a straggler takes it later, on its own."""


class FastLayer:
    """Free times of all units and ports, [W] each, and the tasks that wait for their turn, in order of time.

    `done[stage]`: [M, W], when each rank has finished a stage of each microbatch, NaN until known; `arrived` likewise.
    """

    def __init__(self, plan: LayerPlan, loads: Sequence[MicrobatchLoads]) -> None:
        check_fast(plan)
        self.plan, self.loads = plan, loads
        self.num_ranks, self.depth = plan.scenario.num_ranks, plan.scenario.pipeline.depth
        self.everyone = np.arange(self.num_ranks)
        self.units = {MATRIX: np.zeros(self.num_ranks), VECTOR: np.zeros(self.num_ranks)}
        self.busy = {MATRIX: np.zeros(self.num_ranks), VECTOR: np.zeros(self.num_ranks)}
        self.tasks: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = 0
        shape = (len(loads), self.num_ranks)
        self.done = {stage: np.full(shape, np.nan) for stage in STAGES}
        self.queued = {stage: np.zeros(shape, bool) for stage in STAGES}
        self.arrived = {kind: np.full(shape, np.nan) for kind in ("tokens", "sums")}
        self.network = FastPhases(self) if plan.scenario.model.phased else FastNetwork(self)

    def at(self, time_us: float, task: Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.tasks, (time_us, self.sequence, task))

    def spread(self, ranks: np.ndarray, when: np.ndarray, task: Callable[[np.ndarray, np.ndarray], None]) -> None:
        """Run `task(ranks, when)` at its time, for groups of ranks that are ready at about the same time."""
        first, last = float(when.min()), float(when.max())
        if last - first <= GAP_US:
            self.at(first, lambda: task(ranks, when))
            return
        order = np.argsort(when, kind="stable")
        cuts = np.flatnonzero(np.diff(when[order]) > GAP_US) + 1
        for group in np.split(order, cuts):
            self.at(float(when[group[0]]), lambda g=group: task(ranks[g], when[g]))  # type: ignore[misc]

    def run(self) -> float:
        """The layer time in us."""
        self._start("send", 0, self.everyone)
        while self.tasks:
            heapq.heappop(self.tasks)[2]()
        end = float(self.done["finish"][-1].max())
        if np.isnan(end):
            unfinished = {stage: np.argwhere(np.isnan(x))[0].tolist() for stage, x in self.done.items() if np.isnan(x).any()}
            raise Deadlock(f"fast mode: no task is left, but these did not end: {unfinished}. Use --mode event.")
        return end

    def use(self, unit: str, ranks: np.ndarray, ready: np.ndarray, cost: np.ndarray) -> np.ndarray:
        """Occupy a unit of `ranks` from `ready` on, for `cost` [W]. Returns when each is done."""
        end = np.maximum(self.units[unit][ranks], ready) + cost[ranks]
        self.units[unit][ranks] = end
        self.busy[unit][ranks] += cost[ranks]
        return end

    def complete(self, stage: str, number: int, ranks: np.ndarray, when: np.ndarray) -> None:
        """A stage is done on some ranks; start whatever waited for it."""
        self.done[stage][number, ranks] = when
        self._start(stage, number + 1, ranks)
        position = POSITION[stage]
        if position + 1 < len(STAGES):
            self._start(STAGES[position + 1], number, ranks)
        else:
            self._start("send", number + self.depth, ranks)

    def arrive(self, kind: str, number: int, ranks: np.ndarray, when: np.ndarray) -> None:
        """Rows (`tokens`) or sums (`sums`) of a microbatch are on some ranks."""
        self.arrived[kind][number, ranks] = when
        self._start("receive" if kind == "tokens" else "finish", number, ranks)

    def _start(self, stage: str, number: int, ranks: np.ndarray) -> None:
        """Queue a stage on the ranks where everything that it waits for is known; once each."""
        if number >= len(self.loads):
            return
        ready = self.done[stage][number - 1, ranks] if number else np.zeros(len(ranks))
        position, depth = POSITION[stage], self.depth
        if position:
            ready = np.maximum(ready, self.done[STAGES[position - 1]][number, ranks])
        elif number >= depth:
            ready = np.maximum(ready, self.done["finish"][number - depth, ranks])
        if stage in ("receive", "finish"):
            ready = np.maximum(ready, self.arrived["tokens" if stage == "receive" else "sums"][number, ranks])
        run = getattr(self, f"_{stage}")
        go = (ready == ready) & ~self.queued[stage][number, ranks]
        if not go.all():
            if not go.any():
                return
            ranks, ready = ranks[go], ready[go]
        self.queued[stage][number, ranks] = True
        self.spread(ranks, ready, lambda r, w: run(number, r, w))

    def _send(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        end = self.use(VECTOR, ranks, ready, self.plan.costs.route(self.loads[number].tokens))
        # The next step asks for its unit or port when the route is done, after those who asked meanwhile.
        inc = self.plan.scenario.model.in_network
        self.spread(ranks, end, lambda r, w: self.network.send(number, r, w) if inc else self._pack(number, r, w))

    def _pack(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        end = self.use(VECTOR, ranks, ready, self.plan.costs.pack(self.loads[number].sent_copies))
        self.spread(ranks, end, lambda r, w: self.network.send(number, r, w))

    def _receive(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        cost = self.plan.costs.group(self.loads[number].pairs)
        self.complete("receive", number, ranks, self.use(VECTOR, ranks, ready, cost))

    def _multiply(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        loads, costs = self.loads[number], self.plan.costs
        end = self.use(MATRIX, ranks, ready, costs.matmul("matmul_gate_up", loads.padded, loads.active))
        if not costs.fused:
            end = self.use(VECTOR, ranks, end, costs.swiglu(loads.pairs))
        end = self.use(MATRIX, ranks, end, costs.matmul("matmul_down", loads.padded, loads.active))
        self.complete("multiply", number, ranks, end)

    def _publish(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        loads = self.loads[number]
        end = self.use(VECTOR, ranks, ready, self.plan.costs.reduce(loads.pairs, loads.received))
        self.spread(ranks, end, lambda r, w: self.network.publish(number, r, w))

    def _finish(self, number: int, ranks: np.ndarray, ready: np.ndarray) -> None:
        costs, tokens = self.plan.costs, self.loads[number].tokens
        cost = costs.copy_out(tokens) if self.plan.scenario.model.in_network else costs.global_reduce(tokens)
        self.complete("finish", number, ranks, self.use(VECTOR, ranks, ready, cost))


def simulate_fast(plan: LayerPlan, loads: Sequence[MicrobatchLoads] | None = None) -> LayerResult:
    """One layer in fast mode. `loads`: one per microbatch; without, those of `expected_loads`."""
    layer = FastLayer(plan, expected_loads(plan) if loads is None else loads)
    end = layer.run()
    busy = {unit: float(times.max()) / end for unit, times in layer.busy.items()}
    busy |= {port: float(np.max(times)) / end for port, times in layer.network.busy.items()}
    return LayerResult(plan, "fast", end, busy)


def drawn_loads(plan: LayerPlan) -> list[MicrobatchLoads]:
    """The loads that the event mode draws: exact, and slow for many tokens."""
    return [plan.loads(number) for number in range(plan.num_microbatches)]


SAMPLE_TOKENS = 4096


_rates: dict[tuple, tuple[np.ndarray, ...]] = {}


def _sampled_rates(plan: LayerPlan) -> tuple[np.ndarray, ...]:
    """Per token: choices of each expert, rows [W, W], leaf_up, leaf_down, leaf_cross, at_home. Kept for each routing."""
    scenario = plan.scenario
    key = (plan.shape, scenario.num_ranks, scenario.routing, scenario.replicas, scenario.model.selective, scenario.ranks_per_leaf)
    if key not in _rates:
        num_tokens = max(1, SAMPLE_TOKENS // scenario.num_ranks)
        ids = plan.sample_experts(scenario.num_ranks, num_tokens)
        loads = plan.loads(0, ids)
        experts = np.bincount(ids[ids >= 0], minlength=plan.shape.num_experts) / (scenario.num_ranks * num_tokens)
        if scenario.routing.kind is RoutingKind.UNIFORM:
            experts = np.full(plan.shape.num_experts, plan.shape.top_k / plan.shape.num_experts)
        per_token = (loads.rows, loads.leaf_up, loads.leaf_down, loads.leaf_cross, loads.at_home)
        _rates[key] = (experts, *(x / num_tokens for x in per_token))
    return _rates[key]


def expected_loads(plan: LayerPlan) -> list[MicrobatchLoads]:
    """Loads drawn around the rates of a sample of tokens, binomially: what a drawn routing gives, in a fraction of the time."""
    scenario, shape = plan.scenario, plan.shape
    num_ranks, tile = scenario.num_ranks, plan.machine.tile_rows
    experts, rows, leaf_up, leaf_down, leaf_cross, at_home = _sampled_rates(plan)
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
        if num_ranks <= EXACT_FLOW_RANKS:
            drawn = rng.binomial(tokens, np.clip(column, 0, 1))
        else:
            # One draw per expert rank, shared out evenly: what its port sees is the sum.
            total = rng.binomial(tokens * num_ranks, np.clip(column[0], 0, 1))
            drawn = np.tile(total / num_ranks, (num_ranks, 1))
        up, down, cross, home = (np.rint(x * tokens).astype(np.int64) for x in (leaf_up, leaf_down, leaf_cross, at_home))
        result.append(MicrobatchLoads(np.full(num_ranks, tokens), drawn, pairs, padded, active, up, down, cross, home))
    return result


def sweep(plans: Sequence[LayerPlan], *, processes: int = 2, progress: Callable[[int], None] = lambda done: None) -> list[float]:
    """Layer times in us of many plans in fast mode, in order, on `processes` processes."""
    times: list[float] = []
    if processes <= 1 or len(plans) < 64:
        for plan in plans:
            times.append(simulate_fast(plan).layer_time_us)
            progress(len(times))
        return times
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for time_us in pool.imap(_layer_time, plans, chunksize=32):
            times.append(time_us)
            progress(len(times))
    return times


def _layer_time(plan: LayerPlan) -> float:
    return simulate_fast(plan).layer_time_us
