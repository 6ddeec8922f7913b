"""One compute rank inside a process of vLLM: the heap of its job, its MoE layers, and the bound of each step. Imports no vLLM.

Every rank runs every layer in every step, also with no tokens: the switches wait for all. How many microbatches a step has
follows from its bound, the most tokens that any rank brings, which vLLM's ranks tell each other before each step; without
that, from the most tokens that vLLM may schedule.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from inc_runtime.backends.host import HostPe
from inc_runtime.config import Implementation, LayerShape, Pipeline, RowFormat, SumOrder, check
from inc_runtime.environment import Environment, require_job_id
from inc_runtime.errors import ConfigurationError
from inc_runtime.protocol import Role, World
from inc_runtime.rendezvous import JOB_NOTE, Claim, JobNote, note, world_of_switches
from megakernel.checkpoint import ExpertWeights
from megakernel.implementations import MODELS_OF
from megakernel.moe_layer import TORCH_DTYPES, MoELayer
from megakernel.vllm_metrics import StepMetrics


@dataclass(frozen=True)
class Placement:
    """Where this rank stands: its number, W, and the group of all ranks, which only the Baseline uses."""

    rank: int
    num_ranks: int
    group: ProcessGroup | None = None


def row_format_of(dtype: torch.dtype) -> RowFormat:
    """The row format of a model in `dtype`. Raises ConfigurationError for one that rows cannot have."""
    for row_format, known in TORCH_DTYPES.items():
        if dtype == known:
            return row_format
    raise ConfigurationError(f"the model runs in {dtype}: rows are bfloat16 or float32. Start vLLM with --dtype bfloat16.")


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
        size = min(self.environment.vllm_microbatch, largest_step)
        self.pipeline = Pipeline(largest_step, size, sum_order=SumOrder.RANK, row_format=row_format_of(dtype))
        self.layers: dict[int, MoELayer] = {}
        self.shapes: list[LayerShape] = []
        self.called: set[int] = set()
        self.metrics = StepMetrics(placement.rank, World(placement.num_ranks), self.environment)
        self._pe: HostPe | None = None
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
        environment, rank = self.environment, self.placement.rank
        require_job_id(environment)
        self._claim = Claim(environment, f"{Role.COMPUTE_RANK.value}-{rank}")
        world = self.metrics.world = world_of_switches(environment, self.placement.num_ranks)
        job = JobNote(shape, self.pipeline, MODELS_OF[self.implementation][0], world)
        if rank == 0:
            with note(environment, JOB_NOTE, job.to_json()):
                self._pe = self._join_heap(job, world)
        else:
            self._pe = self._join_heap(job, world)
        # A worker of vLLM leaves by the exit functions of multiprocessing, or of the interpreter.
        multiprocessing.util.Finalize(self, self.close, exitpriority=100)
        atexit.register(self.close)

    def _join_heap(self, job: JobNote, world: World) -> HostPe:
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

    def load(self, number: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Take the weights of this rank's experts: `gate_up` [num_local, 2*I, H], gate rows first, `down` [num_local, H, I]."""
        shape = self.shapes[number]
        own = shape.experts_of_rank(self.placement.rank, self.placement.num_ranks)
        weights = ExpertWeights(own, gate_up.detach(), down.detach())
        backend = self._pe or self.placement.group
        self.layers[number] = MoELayer(shape, self.pipeline, self.implementation, backend, weights, layer=number)

    def run(
        self, number: int, hidden_states: torch.Tensor, router_logits: torch.Tensor, num_real: int, bound: int
    ) -> torch.Tensor:
        """One layer of one step: [N, H] to [N, H]. The rows from `num_real` on are padding: they go nowhere and return 0.

        Raises: everything that `MoELayer` raises.
        """
        layer = self.layers[number]
        self.called.add(number)
        output = torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
        with self.metrics.layer(number, layer.trace, num_real):
            layer(hidden_states[:num_real].contiguous(), router_logits[:num_real], out=output[:num_real], bound_tokens=bound)
        return output

    def close(self) -> None:
        """Leave the job: the switches end once every rank has left."""
        if self._pe is not None:
            self._pe.close()
            self._pe = None
        if self._claim is not None:
            self._claim.release()
            self._claim = None
