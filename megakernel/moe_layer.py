"""The public layer: hidden states and router logits in, hidden states out, on any implementation.

In a torchrun script, on every compute rank (the switch PEs run `switch_emulator.run_switch` meanwhile):

    layer = MoELayer(shape, pipeline, Implementation.MEGAKERNEL_INC, backend, experts)
    output = layer(hidden_states, router_logits)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from inc_runtime.backends.host import HostPe
from inc_runtime.backends.nvshmem import DeviceHeap
from inc_runtime.collectives.microbatch import Call
from inc_runtime.config import CommunicationModel, Implementation, LayerShape, Pipeline, Router, RowFormat, check
from inc_runtime.errors import ConfigurationError
from inc_runtime.op_trace import OpTrace
from inc_runtime.routing import check_expert_ids, check_router_logits
from megakernel.baseline import run_baseline
from megakernel.checkpoint import ExpertWeights
from megakernel.experts import HostExperts, rows_to_numpy
from megakernel.fused_layer import LayerInput, run_fused
from megakernel.gpu_layer import GpuLayer, make_baseline, make_megakernel
from megakernel.implementations import MODELS_OF, check_model
from megakernel.library_group import LibraryGroup

TORCH_DTYPES = {RowFormat.BFLOAT16: torch.bfloat16, RowFormat.FLOAT32: torch.float32}


class MoELayer:
    """One MoE layer of a model, on one compute rank. Several layers may share one `backend`, in the same order on all ranks.

    `backend`: the PE that `HostPe.join` returned, or a `DeviceHeap` on GPUs, or for the Baseline a torch.distributed process
    group of the compute ranks (None: the default group). `experts`: this rank's, `shape.experts_of_rank(rank, W)`; on a Hopper
    GPU with a `DeviceHeap`, or with a NCCL group for the Baseline. Then all tensors of a call are on that GPU.
    `layer` names the layer in headers, so that ranks that call layers in another order are refused; default: a running number.
    `bias` [E] float32 is added to sigmoid scores for the selection. `model` is for the Baseline; the others take it from
    the backend. Raises: ConfigurationError before anything is sent.
    """

    def __init__(
        self,
        shape: LayerShape,
        pipeline: Pipeline,
        implementation: Implementation,
        backend: HostPe | DeviceHeap | torch.distributed.ProcessGroup | None,
        experts: ExpertWeights,
        *,
        bias: torch.Tensor | None = None,
        layer: int | None = None,
        model: CommunicationModel | None = None,
    ) -> None:
        self.dtype = TORCH_DTYPES[pipeline.row_format]
        self.implementation = implementation
        self.gpu: GpuLayer | None = None
        self.trace = OpTrace(0)  # on GPUs it stays empty
        if isinstance(backend, HostPe):
            self._pe: HostPe | None = backend
            self.model = backend.layout.dims.model
            if implementation is Implementation.BASELINE or model not in (None, self.model):
                raise ConfigurationError(
                    f"implementation = {implementation.value} on {(model or self.model).value}: the backend is a heap for "
                    f"{self.model.value}. The baseline takes a process group; the others follow the heap's model."
                )
            if backend.is_switch:
                raise ConfigurationError(f"{backend.name} has no experts: a layer lives on a rank. Call run_switch here.")
            rank, num_ranks = backend.pe, backend.world.num_ranks
            layer = backend.num_layers if layer is None else layer
            backend.num_layers += 1
            _check_heap(backend, shape, pipeline)
            self.trace = backend.trace
        elif isinstance(backend, DeviceHeap):
            self.model = backend.layout.dims.model
            check_model(implementation, self.model)
            layer = backend.num_layers if layer is None else layer
            backend.num_layers += 1
            checked = None if bias is None else torch.from_numpy(_checked_bias(bias, shape))
            kernel = make_megakernel(backend, shape, pipeline, experts, checked, layer)
            self.gpu = GpuLayer(kernel, shape, pipeline.bound_tokens, kernel.device, (torch.float32, torch.bfloat16))
            return
        else:
            if implementation is not Implementation.BASELINE:
                raise ConfigurationError(
                    f"implementation = {implementation.value} needs a symmetric heap as its backend: pass what HostPe.join "
                    "returned. Only the baseline takes a process group."
                )
            self._pe = None
            self.model = model or MODELS_OF[implementation][0]
            check_model(implementation, self.model)
            if experts.gate_up.device.type == "cuda":
                checked = None if bias is None else torch.from_numpy(_checked_bias(bias, shape))
                run = make_baseline(shape, pipeline, backend, experts, checked, self.model)
                self.gpu = GpuLayer(run, shape, pipeline.bound_tokens, experts.gate_up.device, (torch.float32,))
                return
            self.trace = OpTrace(torch.distributed.get_rank(backend))
            self._library = LibraryGroup(backend, self.trace)
            rank, num_ranks = self._library.rank, self._library.num_ranks
        check_model(implementation, self.model)
        check(shape, pipeline, num_ranks)
        self.call = Call(shape, pipeline, layer or 0)
        self._bias = None if bias is None else _checked_bias(bias, shape)
        self._experts = _host_experts(experts, shape, shape.experts_of_rank(rank, num_ranks))

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        *,
        expert_ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        bound_tokens: int | None = None,
        token_count: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on this rank's tokens. Collective: every rank calls, also one with no tokens.

        `hidden_states` [N, H] on the CPU (or the experts' GPU) in the pipeline's row format, bfloat16 or float32, N between 0
        and the pipeline's bound; `router_logits` [N, E], any float dtype, finite. Or `expert_ids` [N, k] int32 or int64, -1
        where a choice does not count, with `weights` [N, k] float. Returns [N, H] in the caller's memory: `out` if given, never
        a view of a slot.

        `bound_tokens`: the most tokens that any rank brings to this call, if all ranks know it: no more microbatches than it
        needs are run. Equal on all ranks, at most the pipeline's bound, which is the default.

        `token_count` [1] int32 on the GPU, for the megakernel there: how many of the N tokens count, read when the kernel runs;
        rows of `out` behind them stay. It may change between the replays of a captured graph.

        Raises: ConfigurationError before anything is sent; ArrivalTimeout, PeerDied or Aborted while running.
        """
        if (router_logits is None) == (expert_ids is None) or (expert_ids is None) != (weights is None):
            raise ConfigurationError("give either router_logits, or both expert_ids and weights, not both forms.")
        if self.gpu is not None:
            return self.gpu(hidden_states, router_logits, expert_ids, weights, out, bound_tokens, token_count)
        if token_count is not None:
            raise ConfigurationError("token_count is for GPUs. On the host, call with the tokens that count.")
        call = self.call if bound_tokens is None else _bounded(self.call, bound_tokens)
        shape = call.shape
        self._check_hidden_states(hidden_states, call.pipeline.bound_tokens)
        if out is None:
            out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        elif out.shape != hidden_states.shape or out.dtype != self.dtype or not out.is_contiguous():
            raise ConfigurationError(
                f"out is {tuple(out.shape)} {out.dtype}, expected contiguous {tuple(hidden_states.shape)} {self.dtype}."
            )
        tokens = rows_to_numpy(hidden_states.detach())
        if router_logits is not None:
            logits = router_logits.detach().float().cpu().numpy()
            _check_num_tokens("router_logits", len(logits), len(tokens))
            check_router_logits(logits, shape)
            given = LayerInput(shape, tokens, logits=logits, bias=self._bias)
        else:
            assert expert_ids is not None and weights is not None
            ids, chosen = expert_ids.detach().cpu().numpy(), weights.detach().float().cpu().numpy()
            check_expert_ids(ids, chosen, len(tokens), shape)
            chosen = np.where(ids < 0, np.float32(0), chosen)
            given = LayerInput(shape, tokens, expert_ids=ids.astype(np.int32), weights=chosen)
        target = rows_to_numpy(out)
        if self._pe is not None:
            run_fused(self._pe, call, self._experts, given, target)
        else:
            run_baseline(self._library, call, self.model, self._experts, given, target)
        return out

    def raise_on_error(self) -> None:
        """Raise ConfigurationError for what only the GPU could see in a call that has finished; on the host there is nothing."""
        if self.gpu is not None:
            self.gpu.run.raise_on_error()

    def _check_hidden_states(self, hidden_states: torch.Tensor, bound: int) -> None:
        shape = self.call.shape
        if hidden_states.device.type != "cpu":
            raise ConfigurationError(
                f"hidden_states is on {hidden_states.device}, expected the CPU: this is the host backend. Move it first."
            )
        if hidden_states.dtype != self.dtype:
            raise ConfigurationError(
                f"hidden_states is {hidden_states.dtype}, expected {self.dtype}. Convert it first, or choose the pipeline's "
                "row_format."
            )
        if hidden_states.ndim != 2 or hidden_states.shape[1] != shape.hidden_size:
            raise ConfigurationError(
                f"hidden_states has shape {tuple(hidden_states.shape)}, expected [num_tokens, {shape.hidden_size}]."
            )
        if len(hidden_states) > bound:
            raise ConfigurationError(
                f"hidden_states has {len(hidden_states)} tokens, at most bound_tokens = {bound}. "
                "Give every rank a larger bound, or split the batch."
            )


def _bounded(call: Call, bound_tokens: int) -> Call:
    """The call with a bound of its own."""
    largest = call.pipeline.bound_tokens
    if not 1 <= bound_tokens <= largest:
        raise ConfigurationError(
            f"bound_tokens = {bound_tokens} of this call: it must be between 1 and the layer's bound_tokens = {largest}."
        )
    return replace(call, pipeline=replace(call.pipeline, bound_tokens=bound_tokens))


def _check_num_tokens(name: str, seen: int, expected: int) -> None:
    if seen != expected:
        raise ConfigurationError(f"{name} has {seen} rows, but hidden_states has {expected} tokens.")


def _check_heap(pe: HostPe, shape: LayerShape, pipeline: Pipeline) -> None:
    """Refuse a layer that does not fit the heap it would share."""
    dims = pe.layout.dims
    wanted = {
        "hidden_size": (shape.hidden_size, dims.hidden_size),
        "microbatch_tokens": (pipeline.microbatch_tokens, dims.microbatch_tokens),
        "depth": (pipeline.depth, dims.depth),
        "ranks_per_phase": (pipeline.ranks_per_phase if dims.model.phased else dims.ranks_per_phase, dims.ranks_per_phase),
        "local_bypass": (pipeline.local_bypass, dims.local_bypass),
        "row_group_tokens": (pipeline.row_group_tokens or 0, dims.row_group_tokens),
        "bytes of a row's element": (pipeline.row_format.num_bytes, dims.row_element_bytes),
    }
    for name, (layer_value, heap_value) in wanted.items():
        if layer_value != heap_value:
            raise ConfigurationError(
                f"{name} = {layer_value}: the heap was made for {heap_value}. Layers that share a heap share {name}."
            )
    if shape.top_k > dims.top_k:
        raise ConfigurationError(
            f"top_k = {shape.top_k}: the heap was made for {dims.top_k} at most. Join with the largest top_k of all layers."
        )


def _checked_bias(bias: torch.Tensor, shape: LayerShape) -> np.ndarray:
    """The selection bias as [num_experts] float32. Raises ConfigurationError for what cannot be one."""
    array = bias.detach().float().cpu().numpy()
    if shape.router is not Router.SIGMOID:
        raise ConfigurationError(f"bias with router = {shape.router.value}: only the sigmoid router selects with a bias.")
    if array.shape != (shape.num_experts,) or not np.isfinite(array).all():
        raise ConfigurationError(f"bias must be {shape.num_experts} finite numbers, it has shape {array.shape}: {array}.")
    return array


def _host_experts(experts: ExpertWeights, shape: LayerShape, own: range) -> HostExperts:
    if experts.experts != own:
        raise ConfigurationError(
            f"experts are {experts.experts.start} to {experts.experts.stop - 1}, expected {own.start} to {own.stop - 1} on this "
            "rank. Load shape.experts_of_rank(rank, num_ranks)."
        )
    expected = {
        "gate_up": (len(own), 2 * shape.intermediate_size, shape.hidden_size),
        "down": (len(own), shape.hidden_size, shape.intermediate_size),
    }
    for name, size in expected.items():
        seen = tuple(getattr(experts, name).shape)
        if seen != size:
            raise ConfigurationError(
                f"experts.{name} has shape {list(seen)}, expected {list(size)}: this rank holds experts {own.start} to "
                f"{own.stop - 1}. Load shape.experts_of_rank(rank, num_ranks)."
            )
        tensor = getattr(experts, name)
        if tensor.device.type != "cpu" or not tensor.is_floating_point():
            raise ConfigurationError(f"experts.{name} is {tensor.dtype} on {tensor.device}, expected floating point on the CPU.")
    return HostExperts(own.start, experts.gate_up.float(), experts.down.float())
