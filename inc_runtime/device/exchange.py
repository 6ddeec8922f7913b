"""Host side of `exchange_kernel.cu`: a rank that exchanges microbatches with the switches around a trivial expert."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.collectives.microbatch import RoutedTokens
from inc_runtime.config import LayerShape, Pipeline
from inc_runtime.device.arguments import EXCHANGE_ARGUMENTS, EXCHANGE_MOMENT, EXCHANGE_RESULT, ExchangeMode
from inc_runtime.heap_layout import BF16

SOURCE = Path(__file__).with_name("exchange_kernel.cu")
RANK_THREADS = 512


@dataclass(frozen=True)
class Exchanged:
    """What one call left: the sums [num_tokens, H], counts of wrong words, and the moments of each microbatch in microseconds."""

    output: np.ndarray
    wrong_rows: int
    wrong_sums: int
    moments: np.ndarray


class Exchange:
    """One call of a rank. `start`, then `finish`.

    `given`: tokens [n, H] bfloat16, expert_ids [n, k], weights [n, k]. `verify`: tokens are made and compared on the device, and
    each stage begins with a random delay of at most `delay_us`. `timed`: note the moments of each microbatch.
    """

    def __init__(
        self,
        heap: DeviceHeap,
        shape: LayerShape,
        pipeline: Pipeline,
        given: RoutedTokens,
        *,
        mode: ExchangeMode = ExchangeMode.BOTH,
        verify: bool = False,
        seed: int = 0,
        delay_us: float = 0.0,
        timed: bool = False,
        layer: int = 0,
    ) -> None:
        gpu, self.heap, self.num_microbatches = heap.gpu, heap, pipeline.num_microbatches
        tokens, expert_ids, weights = given.tokens, given.expert_ids.astype(np.int32), given.weights.astype(np.float32)
        self.shape_of_output, self.timed = tokens.shape, timed
        self._addresses: dict[str, int] = {}
        self.arguments = np.zeros((), EXCHANGE_ARGUMENTS)
        for name, array in (("tokens", tokens), ("expert_ids", expert_ids), ("weights", weights)):
            self._addresses[name] = gpu.allocate(array.nbytes)
            gpu.write(self._addresses[name], array)
        self._addresses["output"] = gpu.allocate(tokens.nbytes, 0xFF)
        self._addresses["result"] = gpu.allocate(EXCHANGE_RESULT.itemsize)
        if timed:
            self._addresses["timeline"] = gpu.allocate(self.num_microbatches * EXCHANGE_MOMENT.itemsize)
        for name, address in self._addresses.items():
            self.arguments[name] = address
        self.arguments["num_tokens"], self.arguments["bound_tokens"] = len(tokens), pipeline.bound_tokens
        self.arguments["num_experts"], self.arguments["top_k"] = shape.num_experts, expert_ids.shape[1]
        self.arguments["layer"], self.arguments["num_microbatches"] = layer, self.num_microbatches
        self.arguments["edge_tokens"], self.arguments["ramp_steps"] = pipeline.edge_tokens or 0, pipeline.ramp_steps
        self.arguments["mode"], self.arguments["verify"] = int(mode), verify
        heap.argument["barrier_after_dispatch"] = pipeline.barrier_after_dispatch
        self.arguments["seed"], self.arguments["delay_ns"] = seed, int(delay_us * 1000)

    def start(self, *, num_blocks: int | None = None) -> Exchange:
        built, blocks = self.heap.build(SOURCE), num_blocks or self.heap.job.seat.num_blocks
        self.heap.launch(built, "exchange_kernel", [self.arguments], num_blocks=blocks, num_threads=RANK_THREADS)
        return self

    def finish(self, *, limit_s: float | None = None) -> Exchanged:
        """Wait for the kernel and free its memory. Raises what `DeviceHeap.check` raises."""
        self.heap.wait(limit_s=limit_s)
        gpu = self.heap.gpu
        output = gpu.read(self._addresses["output"], int(np.prod(self.shape_of_output)) * BF16.itemsize).view(BF16)
        result = gpu.read(self._addresses["result"], EXCHANGE_RESULT.itemsize).view(EXCHANGE_RESULT)[0]
        moments = np.zeros(0, EXCHANGE_MOMENT)
        if self.timed:
            num_bytes = self.num_microbatches * EXCHANGE_MOMENT.itemsize
            moments = gpu.read(self._addresses["timeline"], num_bytes).view(EXCHANGE_MOMENT)
        for address in self._addresses.values():
            gpu.free(address)
        wrong_rows, wrong_sums = int(result["wrong_rows"]), int(result["wrong_sums"])
        return Exchanged(output.reshape(self.shape_of_output), wrong_rows, wrong_sums, _microseconds(moments, result))


def _microseconds(moments: np.ndarray, result: np.void) -> np.ndarray:
    """Moments in microseconds since the kernel began: [num_microbatches, 4]. Clock cycles, scaled by the timer over the call."""
    cycles = np.array(moments.tolist(), np.float64).reshape(len(moments), 4) - float(result["clock_begin"])
    total_ns = float(result["timer_end"]) - float(result["timer_begin"])
    return cycles * total_ns / 1e3 / max(float(result["clock_end"]) - float(result["clock_begin"]), 1.0)


def stop_switches(heap: DeviceHeap) -> None:
    """Raise this rank's stop words, where there are switches: they end once all ranks have."""
    if heap.layout.dims.direct:
        return
    heap.launch(heap.build(SOURCE), "stop_kernel", [], num_blocks=1, num_threads=1)
    heap.wait()
