"""The layer of one rank for the discrete-event mode: the rank programs of the collectives, with stages that only take time.

Fused: five threads per rank, as the warps of the persistent kernel divide the stages: send (route, pack, put), receive
(group), multiply (both MatMuls), publish (reduce), finish (global reduce or copy to the output). They meet at counters, in
order of microbatch; vector stages of one microbatch run while the matrix units work on another. A microbatch is sent once
the one that used its slots has finished. Baseline: one thread, stage after stage, the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inc_runtime.collectives import RankPrograms
from inc_runtime.collectives.microbatch import Call, RoutedTokens
from inc_runtime.one_sided import Flag
from inc_runtime.protocol import signal_word
from inc_runtime.simulator.event_backend import MATRIX, VECTOR, TimedPe
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.traffic import MicrobatchLoads


@dataclass(frozen=True)
class RankLayer:
    """One rank's part of one call. `routed(m)`: its tokens of microbatch m; `loads(m)`: the loads of microbatch m."""

    pe: TimedPe
    plan: LayerPlan
    programs: RankPrograms
    routed: Callable[[int, int], RoutedTokens]
    loads: Callable[[int], MicrobatchLoads]
    on_finish: Callable[[], None]

    @property
    def call(self) -> Call:
        return Call(self.plan.shape, self.plan.scenario.pipeline)

    def threads(self) -> list[Callable[[TimedPe], None]]:
        """The programs of this rank that run at once."""
        stages = (self.send, self.receive, self.multiply, self.publish, self.finish)
        count, depth = self.plan.num_microbatches, self.plan.scenario.pipeline.depth
        if not self.plan.scenario.fused:
            return [lambda pe: self._in_turn(stages, count)]

        def loop(position: int) -> Callable[[TimedPe], None]:
            stage, before = stages[position], stages[position - 1]

            def run(pe: TimedPe) -> None:
                for number in range(count):
                    pe.gate(before.__name__).wait(number + 1 - (0 if position else depth))
                    stage(number)
                    pe.gate(stage.__name__).advance()

            return run

        return [loop(position) for position in range(len(stages))]

    def _in_turn(self, stages: tuple[Callable[[int], None], ...], count: int) -> None:
        for number in range(count):
            for stage in stages:
                stage(number)

    def _vector(self, stage: str, number: int, rows: int, cost_us: float) -> None:
        self.pe.work(VECTOR, stage, number + 1, rows, cost_us)

    def send(self, number: int) -> None:
        tokens = self.plan.tokens_of(number)
        self._vector("route", number, tokens, self.plan.costs.route(tokens))
        self.programs.push_microbatch(self.pe, self.call, number + 1, self.routed(self.pe.pe, number))

    def receive(self, number: int) -> None:
        self.programs.wait_for_expert_rows(self.pe, self.call, number + 1)
        loads, rank = self.loads(number + 1), self.pe.pe
        pairs = int(loads.pairs[rank])
        self._vector("group", number, pairs, self.plan.costs.group(pairs, int(loads.received[rank])))

    def multiply(self, number: int) -> None:
        loads, rank = self.loads(number + 1), self.pe.pe
        pairs, costs = int(loads.pairs[rank]), self.plan.costs
        products = {stage: float(cost[rank]) for stage, cost in costs.products(loads).items()}
        self.pe.work(MATRIX, "matmul_gate_up", number + 1, pairs, products["matmul_gate_up"])
        if not costs.fused:
            self._vector("swiglu", number, pairs, float(costs.swiglu(pairs)))
        self.pe.work(MATRIX, "matmul_down", number + 1, pairs, products["matmul_down"])

    def publish(self, number: int) -> None:
        loads, rank = self.loads(number + 1), self.pe.pe
        pairs = int(loads.pairs[rank])
        self._vector("reduce", number, pairs, self.plan.costs.reduce(pairs, int(loads.received[rank])))
        self.programs.publish_partial_sums(self.pe, self.call, number + 1)

    def finish(self, number: int) -> None:
        tokens = self.plan.tokens_of(number)
        self.programs.wait_for_token_sums(self.pe, self.call, number + 1, tokens)
        if self.plan.scenario.model.in_network:
            self._vector("copy_out", number, tokens, self.plan.costs.copy_out(tokens))
        if self.pe.pe == 0:
            self.on_finish()
        self.pe.simulation.layer_end = max(self.pe.simulation.layer_end, self.pe.now_us())
        if number == self.plan.num_microbatches - 1:
            self._stop()

    def _stop(self) -> None:
        for switch in range(self.pe.world.num_ranks, self.pe.world.num_pes):
            word = signal_word(self.plan.num_microbatches + 1, True)
            self.pe.signal(switch, Flag("stop", (self.pe.pe,)), word, magic=0)



def rank_threads(*parts) -> list[Callable[[TimedPe], None]]:
    """The threads of one rank from the fields of `RankLayer`, in order."""
    return RankLayer(*parts).threads()
