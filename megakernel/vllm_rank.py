"""One compute rank inside a process of vLLM: the heap of its job, its MoE layers, and the bound of each step. Imports no vLLM.

Every rank runs every layer in every step, also with no tokens: the switches wait for all. How many microbatches a step has
follows from its bound, the most tokens that any rank brings, which vLLM's ranks tell each other before each step; without
that, from the most tokens that vLLM may schedule. On GPUs the tokens before the padding are counted in device memory, which a
step fills before it begins: a captured graph that is replayed reads it, where the host program does not run.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from inc_runtime.backends.host import HostPe
from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.config import Implementation, LayerShape, Pipeline, RowFormat, SumOrder, check
from inc_runtime.device.exchange import stop_switches
from inc_runtime.environment import Environment, require_job_id
from inc_runtime.errors import ConfigurationError
from inc_runtime.host_group import free_port
from inc_runtime.protocol import Role, World
from inc_runtime.rendezvous import JOB_NOTE, Claim, JobNote, await_note, note, world_of_switches
from inc_runtime.server_job import join_server_heap
from megakernel.checkpoint import ExpertWeights
from megakernel.implementations import MODELS_OF
from megakernel.moe_layer import TORCH_DTYPES, MoELayer
from megakernel.vllm_events import LayerEvents
from megakernel.vllm_metrics import StepMetrics

HOST_CUT, GPU_CUT = (256, 3), (1024, 4)
"""m_b and D on each backend."""


@dataclass(frozen=True)
class Placement:
    """Where this rank stands: its number, W, its GPU (None: the host backend), and the group of all ranks, for the Baseline."""

    rank: int
    num_ranks: int
    group: ProcessGroup | None = None
    gpu: int | None = None


def device_of(placement: Placement) -> torch.device:
    """Where the tensors of this rank are."""
    return torch.device("cpu") if placement.gpu is None else torch.device("cuda", placement.gpu)


def row_format_of(dtype: torch.dtype) -> RowFormat:
    """The row format of a model in `dtype`. Raises ConfigurationError for one that rows cannot have."""
    for row_format, known in TORCH_DTYPES.items():
        if dtype == known:
            return row_format
    raise ConfigurationError(f"the model runs in {dtype}: rows are bfloat16 or float32. Start vLLM with --dtype bfloat16.")


def pipeline_of(environment: Environment, placement: Placement, largest_step: int, dtype: torch.dtype) -> Pipeline:
    """How a step is cut: INC_VLLM_MICROBATCH, or what was best on each backend; sums in the order of the ranks."""
    microbatch, depth = HOST_CUT if placement.gpu is None else GPU_CUT
    size = min(environment.vllm_microbatch or microbatch, largest_step)
    return Pipeline(largest_step, size, depth, sum_order=SumOrder.RANK, row_format=row_format_of(dtype))


def step_bound(tokens_of_ranks: Sequence[int] | None, largest: int) -> int:
    """The bound of one step: the most tokens that any rank brings to it, and at least 1.

    `tokens_of_ranks`: of all ranks, as each of them knows it; None: unknown, so that `largest`, vLLM's own limit, holds.
    Raises: ConfigurationError when vLLM brings more than its limit.
    """
    bound = largest if tokens_of_ranks is None else max(1, *tokens_of_ranks)
    if bound > largest:
        raise ConfigurationError(
            f"a rank brings {bound} tokens to one step, but vLLM's max_num_batched_tokens = {largest}. "
            f"Start vLLM with --max-num-batched-tokens {bound}."
        )
    return bound


def tokens_of_ranks(context: Any, placement: Placement, num_rows: int) -> list[int] | None:
    """The rows that each rank brings to this step, by vLLM's forward context, as all ranks know them; None: it does not say.

    Raises: ConfigurationError when this rank brings others than that: vLLM has moved rows between ranks, which is our part.
    """
    if placement.num_ranks == 1:
        return [num_rows]
    if context.dp_metadata is None:
        return None
    tokens = context.dp_metadata.num_tokens_across_dp_cpu.tolist()
    if tokens[placement.rank] != num_rows:
        raise ConfigurationError(
            f"rank {placement.rank} was called with {num_rows} rows, but has {tokens[placement.rank]} of {tokens} in this step: "
            "vLLM exchanges rows itself. Report it with the versions; unset INC_VLLM until then."
        )
    return tokens


def num_real_rows(context: Any, num_rows: int) -> int:
    """Rows before the padding: all but those that vLLM added; none of a dummy batch, which has no attention metadata."""
    metadata = context.attn_metadata
    if not metadata:
        return 0
    if isinstance(metadata, dict):
        counts = {getattr(each, "num_actual_tokens", num_rows) for each in metadata.values()}
        return min(num_rows, max(counts))
    return num_rows


class RankRuntime:
    """The layers of one model on this rank, over one heap. The first layer joins the job; all must fit its heap."""

    def __init__(self, implementation: Implementation, placement: Placement, largest_step: int, dtype: torch.dtype) -> None:
        self.environment = Environment.read()
        self.implementation, self.placement = implementation, placement
        self.pipeline = pipeline_of(self.environment, placement, largest_step, dtype)
        self.layers: dict[int, MoELayer] = {}
        self.shapes: list[LayerShape] = []
        self.called: set[int] = set()
        self.metrics = StepMetrics(placement.rank, World(placement.num_ranks), self.environment)
        self.token_count: torch.Tensor | None = None  # int32 [1] on the GPU: tokens of this step, without padding
        self._tokens, self._events = 0, LayerEvents()
        self._heap: HostPe | DeviceHeap | None = None
        self._claim: Claim | None = None

    def add_layer(self, shape: LayerShape) -> int:
        """Announce the next layer, before its weights are loaded; the first one joins the job. Returns its number.

        Raises: ConfigurationError for a shape or a job that cannot work; PeerMissing for switches that do not come.
        """
        check(shape, self.pipeline, self.placement.num_ranks)
        if not self.shapes:
            if self.implementation is not Implementation.BASELINE:
                self._join(shape)
        elif (shape.hidden_size, shape.top_k) != (self.shapes[0].hidden_size, self.shapes[0].top_k):
            raise ConfigurationError(
                f"layer {len(self.shapes)} has hidden_size {shape.hidden_size} and top_k {shape.top_k}, the first one "
                f"{self.shapes[0].hidden_size} and {self.shapes[0].top_k}: layers that share a heap share these. "
                "Set INC_VLLM=off for this model."
            )
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def _join(self, shape: LayerShape) -> None:
        environment, placement = self.environment, self.placement
        require_job_id(environment)
        self._claim = Claim(environment, f"{Role.COMPUTE_RANK.value}-{placement.rank}")
        world = self.metrics.world = self._world()
        if placement.rank == 0:
            port = None if placement.gpu is None else free_port()
            job = JobNote(shape, self.pipeline, MODELS_OF[self.implementation][0], world, port)
        elif placement.gpu is None:
            job = JobNote(shape, self.pipeline, MODELS_OF[self.implementation][0], world)
        else:
            job = JobNote.from_json(await_note(environment, JOB_NOTE, "Look at what rank 0 printed."))
        with note(environment, JOB_NOTE, job.to_json()) if placement.rank == 0 else nullcontext():
            self._heap = self._join_host(job, world) if placement.gpu is None else self._join_gpu(job)
        # A worker of vLLM leaves by the exit functions of multiprocessing, or of the interpreter.
        multiprocessing.util.Finalize(self, self.close, exitpriority=100)
        atexit.register(self.close)

    def _world(self) -> World:
        """The switches that were started for this job. On GPUs the plain all-to-all needs none."""
        if self.placement.gpu is not None and self.implementation is Implementation.MEGAKERNEL:
            return World(self.placement.num_ranks, 0, 0)
        return world_of_switches(self.environment, self.placement.num_ranks)

    def _join_host(self, job: JobNote, world: World) -> HostPe:
        return HostPe.join(
            job.shape,
            job.pipeline,
            job.model,
            num_ranks=world.num_ranks,
            num_dispatch_switches=world.num_dispatch_switches,
            num_combine_switches=world.num_combine_switches,
            pe=self.placement.rank,
            traced=True,
        )

    def _join_gpu(self, job: JobNote) -> DeviceHeap:
        heap, gpu = join_server_heap(job, self.placement.rank), self.placement.gpu
        if heap.job.seat.gpu != gpu:
            raise ConfigurationError(
                f"rank {self.placement.rank} runs on GPU {gpu}, but its place is GPU {heap.job.seat.gpu}. Let all ranks see "
                "all GPUs, in one order: unset CUDA_VISIBLE_DEVICES, or set it to the same list for all of them."
            )
        self.token_count = torch.zeros(1, dtype=torch.int32, device=device_of(self.placement))
        return heap

    def load(self, number: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Take the weights of this rank's experts: `gate_up` [num_local, 2*I, H], gate rows first, `down` [num_local, H, I]."""
        shape = self.shapes[number]
        own = shape.experts_of_rank(self.placement.rank, self.placement.num_ranks)
        weights = ExpertWeights(own, gate_up.detach(), down.detach())
        backend = self._heap or self.placement.group
        self.layers[number] = MoELayer(shape, self.pipeline, self.implementation, backend, weights, layer=number)

    def begin_step(self, num_tokens: int) -> None:
        """Say how many tokens this rank brings to the step that begins, without padding: 0 for a dummy batch.

        Raises what the kernels of an earlier step have reported.
        """
        if self.token_count is not None:
            for layer in self.layers.values():
                layer.raise_on_error()
            self.metrics.finished_on_gpu(self._events.finished(), self._tokens)
            self._tokens = num_tokens
            self.token_count.fill_(num_tokens)

    def run(
        self, number: int, hidden_states: torch.Tensor, router_logits: torch.Tensor, num_real: int, bound: int
    ) -> torch.Tensor:
        """One layer of one step: [N, H] to [N, H]. The rows from `num_real` on are padding: they go nowhere and return 0.

        On a GPU `num_real` is what `begin_step` was told. Raises: everything that `MoELayer` raises.
        """
        layer = self.layers[number]
        self.called.add(number)
        output = torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
        if self.token_count is not None:
            rows, logits = hidden_states.contiguous(), router_logits.contiguous()
            with self._events.around(number) if self.environment.vllm_log_s else nullcontext():
                return layer(rows, logits, out=output, bound_tokens=bound, token_count=self.token_count)
        with self.metrics.layer(number, layer.trace, num_real):
            layer(hidden_states[:num_real].contiguous(), router_logits[:num_real], out=output[:num_real], bound_tokens=bound)
        return output

    def close(self) -> None:
        """Leave the job: the switches end once every rank has left."""
        heap, self._heap = self._heap, None
        if isinstance(heap, HostPe):
            heap.close()
        elif heap is not None:
            stop_switches(heap)  # the rest goes with the process: to finalise would wait for ranks that may be gone
        if self._claim is not None:
            self._claim.release()
            self._claim = None
