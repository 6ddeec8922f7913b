"""What the user chooses, frozen and checked once.

The symbols of the formulas, and their names in the code:

| symbol | name                     | meaning                                                      |
|--------|--------------------------|--------------------------------------------------------------|
| W      | num_ranks                | compute ranks                                                |
| E      | num_experts              | experts of one layer, over all ranks                         |
| k      | top_k                    | experts of one token                                         |
| N      | num_tokens               | tokens of one rank in one call                               |
| m_b    | microbatch_tokens        | tokens of one rank in one microbatch                         |
| M      | num_microbatches         | microbatches of one call, equal on all ranks                 |
| D      | depth                    | slot sets of the ring, i.e. microbatches in flight at most   |
| H      | hidden_size              | width of a token row, in elements                            |
| I      | intermediate_size        | width of an expert                                           |
| G      | ranks_per_phase          | ranks served at once by a phased collective                  |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from inc_runtime.errors import ConfigurationError


class Router(enum.Enum):
    """How logits become routing weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class CommunicationModel(enum.Enum):
    """The seven forms of dispatch and combine."""

    ALL_GATHER_REDUCE_SCATTER = "all_gather_reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_PHASED = "all_to_all_phased"
    INC_ALL_GATHER_REDUCE_SCATTER = "inc_all_gather_reduce_scatter"
    INC_ALL_GATHER_REDUCE_SCATTER_PHASED = "inc_all_gather_reduce_scatter_phased"
    INC_ALL_TO_ALL = "inc_all_to_all"
    INC_ALL_TO_ALL_PHASED = "inc_all_to_all_phased"

    @property
    def in_network(self) -> bool:
        """True where the switch multicasts and sums; False where a relay only forwards."""
        return self.value.startswith("inc_")

    @property
    def phased(self) -> bool:
        return self.value.endswith("_phased")

    @property
    def selective(self) -> bool:
        """True where a token goes only to the ranks of its experts; False where it goes to every rank."""
        return "all_to_all" in self.value


class Implementation(enum.Enum):
    """The five implementations that are compared."""

    BASELINE = "baseline"
    MEGAKERNEL = "megakernel"
    MEGAKERNEL_PHASED = "megakernel_phased"
    MEGAKERNEL_INC = "megakernel_inc"
    MEGAKERNEL_INC_PHASED = "megakernel_inc_phased"


class RowFormat(enum.Enum):
    """How token rows and partial sums lie in the heap and on the wire. Accumulators are float32 in both.

    In BFLOAT16 the experts round where the tensors of a bfloat16 kernel do; in FLOAT32 nothing is rounded.
    """

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 2 if self is RowFormat.BFLOAT16 else 4


class SumOrder(enum.Enum):
    """The order in which the partial sums of a token are added."""

    ARRIVAL = "arrival"
    RANK = "rank"


MAX_HIDDEN_SIZE = 16_384
"""A row of bfloat16 is then one relayed chunk (32 KiB)."""


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer. `hidden_size` must be a multiple of 8 (16 bytes of bfloat16), MAX_HIDDEN_SIZE at most."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    router: Router = Router.SOFTMAX
    renormalize: bool = False

    def experts_of_rank(self, rank: int, num_ranks: int) -> range:
        """Global ids of the experts of `rank`: contiguous; the first E mod W ranks hold one more."""
        small, extra = divmod(self.num_experts, num_ranks)
        first = rank * small + min(rank, extra)
        return range(first, first + small + (1 if rank < extra else 0))


OLMOE_1B_7B = LayerShape(num_experts=64, top_k=8, hidden_size=2048, intermediate_size=1024)


@dataclass(frozen=True)
class Pipeline:
    """How the layer is cut and carried: equal on all PEs of a job.

    `bound_tokens` is the largest number of tokens that any rank may bring to one call: M follows from it, so that
    every rank runs the same number of microbatches, however few tokens it has. `local_bypass`: rows of a rank's own
    experts stay on it, also on the way back; they never cross a switch or a relay. `row_group_tokens`: the dispatch switch
    forwards groups of so many tokens as they arrive (cut-through); None: a microbatch of all ranks at once.

    With `edge_tokens` the first and the last microbatch have so many tokens, and sizes double from either end until they reach
    m_b: the experts begin sooner, and less is left to combine behind them. Without it all but the last have m_b.
    """

    bound_tokens: int
    microbatch_tokens: int
    depth: int = 3
    ranks_per_phase: int = 1
    barrier_after_dispatch: bool = True
    sum_order: SumOrder = SumOrder.ARRIVAL
    row_format: RowFormat = RowFormat.BFLOAT16
    local_bypass: bool = False
    row_group_tokens: int | None = None
    edge_tokens: int | None = None

    @property
    def ramp_steps(self) -> int:
        """Microbatches at either end that are smaller than m_b by design: as many as fit, with a token between them."""
        steps = 0
        while (
            self.edge_tokens is not None
            and self.edge_tokens << steps < self.microbatch_tokens
            and 2 * self._ramp(steps + 1) < self.bound_tokens
        ):
            steps += 1
        return steps

    def _ramp(self, steps: int) -> int:
        """Tokens of the first, or of the last, `steps` microbatches of a ramp."""
        return ((1 << steps) - 1) * (self.edge_tokens or 0)

    @property
    def num_microbatches(self) -> int:
        steps = self.ramp_steps
        return 2 * steps - (2 * self._ramp(steps) - self.bound_tokens) // self.microbatch_tokens

    def first_token(self, number: int) -> int:
        """Where microbatch `number` begins; for M, the bound. Twin: MicrobatchCut in inc_runtime/device/microbatch.cuh."""
        steps, behind = self.ramp_steps, self.num_microbatches - number
        if behind <= steps:
            return self.bound_tokens - self._ramp(behind)
        ramped = min(number, steps)
        return min(self._ramp(ramped) + (number - ramped) * self.microbatch_tokens, self.bound_tokens)

    def tokens_of(self, number: int) -> slice:
        """The tokens of microbatch `number`, of a rank that has them all."""
        return slice(self.first_token(number), self.first_token(number + 1))


def _require(condition: bool, name: str, value: object, limit: str, remedy: str) -> None:
    if not condition:
        raise ConfigurationError(f"{name} = {value}: it must be {limit}. {remedy}")


def check(shape: LayerShape, pipeline: Pipeline, num_ranks: int) -> None:
    """Refuse a configuration that cannot run. The only place that does.

    Raises: ConfigurationError, which names the value, the limit and the remedy.
    """
    for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
        _require(getattr(shape, name) >= 1, name, getattr(shape, name), "at least 1", "Give a real layer shape.")
    _require(num_ranks >= 1, "num_ranks", num_ranks, "at least 1", "Start at least one compute rank.")
    _require(
        shape.top_k <= shape.num_experts,
        "top_k",
        shape.top_k,
        f"at most num_experts = {shape.num_experts}",
        "Choose fewer experts per token.",
    )
    _require(
        shape.hidden_size % 8 == 0 and shape.hidden_size <= MAX_HIDDEN_SIZE,
        "hidden_size",
        shape.hidden_size,
        f"a multiple of 8, so that rows are whole 16-byte words, and at most {MAX_HIDDEN_SIZE}, so that a row fits a chunk",
        "Pad the hidden size, or split the row.",
    )
    for name in ("bound_tokens", "microbatch_tokens"):
        _require(getattr(pipeline, name) >= 1, name, getattr(pipeline, name), "at least 1", "Give a token count.")
    _require(
        pipeline.edge_tokens is None or 1 <= pipeline.edge_tokens <= pipeline.microbatch_tokens,
        "edge_tokens",
        pipeline.edge_tokens,
        f"between 1 and microbatch_tokens = {pipeline.microbatch_tokens}",
        "Leave it out for microbatches of one size.",
    )
    _require(
        pipeline.depth >= 1, "depth", pipeline.depth, "at least 1", "Use 3 or more to overlap microbatches."
    )
    _require(
        1 <= pipeline.ranks_per_phase <= num_ranks,
        "ranks_per_phase",
        pipeline.ranks_per_phase,
        f"between 1 and num_ranks = {num_ranks}",
        "Choose G within the world.",
    )
    _require(
        pipeline.row_group_tokens is None or 1 <= pipeline.row_group_tokens <= pipeline.microbatch_tokens,
        "row_group_tokens",
        pipeline.row_group_tokens,
        f"between 1 and microbatch_tokens = {pipeline.microbatch_tokens}",
        "Leave it out, so that the switch forwards whole microbatches.",
    )
    _require(
        not pipeline.local_bypass or num_ranks > 1,
        "local_bypass",
        pipeline.local_bypass,
        "False with one rank, whose rows are all its own",
        "Leave it off, or start more ranks.",
    )
