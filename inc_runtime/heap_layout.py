"""The places of the protocol: every region of memory that a verb may touch, listed once per role.

A heap is symmetric: each PE allocates the same number of bytes, the maximum over the roles, and carves them by the
table of its own role. Offsets, total bytes, the switch memory of a role and the buffer units of the post follow
from the table; nothing else in the project knows an offset.

Shapes use the symbols of `config.py`; `P_d` and `P_c` are the numbers of dispatch and combine switches (planes),
`c_d` and `c_c` the tokens of a microbatch that one plane serves, and `C` the chunks of one relayed message.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import ml_dtypes
import numpy as np

from inc_runtime.config import CommunicationModel, LayerShape, Pipeline
from inc_runtime.errors import ConfigurationError, UnknownRegion
from inc_runtime.protocol import CHUNK_FIELDS, HEADER_FIELDS, MAX_CHUNK_BYTES, MIN_RELAY_CELLS, RELAY_CELLS, Role, World

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype("<f4")
ALIGNMENT = 256
ERROR_BYTES = 4096


class Kind(enum.Enum):
    """What a region holds."""

    ROWS = "rows"
    RECORDS = "records"
    FLAGS = "flags"
    CONTROL = "control"


@dataclass(frozen=True)
class Dims:
    """The sizes that every shape of the table is made of."""

    model: CommunicationModel
    world: World
    depth: int
    microbatch_tokens: int
    hidden_size: int
    top_k: int
    ranks_per_phase: int
    row_element_bytes: int = BF16.itemsize
    local_bypass: bool = False
    row_group_tokens: int = 0

    @classmethod
    def of(cls, model: CommunicationModel, world: World, shape: LayerShape, pipeline: Pipeline) -> Dims:
        if world.num_pes == world.num_ranks and (model.in_network or model.phased):
            raise ConfigurationError(
                f"{model.value} in {world}: it needs a switch of each role. Add them, or use {CommunicationModel.ALL_TO_ALL.value}."
            )
        only_inc = model is CommunicationModel.INC_ALL_TO_ALL
        for name, value, fits, why in (
            ("local_bypass", pipeline.local_bypass, model.selective, "Its rows go to every rank."),
            ("row_group_tokens", pipeline.row_group_tokens, only_inc, "The switch of inc_all_to_all alone cuts through."),
        ):
            if value and not fits:
                raise ConfigurationError(f"{name} = {value}: it must be left out for {model.value}. {why}")
        group = pipeline.ranks_per_phase if model.phased else world.num_ranks
        wire, groups = pipeline.row_format.num_bytes, pipeline.row_group_tokens or 0
        sizes = (pipeline.depth, pipeline.microbatch_tokens, shape.hidden_size, shape.top_k)
        return cls(model, world, *sizes, group, wire, pipeline.local_bypass, groups)

    @property
    def num_ranks(self) -> int:
        return self.world.num_ranks

    @property
    def row_dtype(self) -> np.dtype:
        """Elements of token rows and partial sums: bfloat16 or float32."""
        return BF16 if self.row_element_bytes == BF16.itemsize else F32

    @property
    def direct(self) -> bool:
        """A world without switches: the ranks put their messages straight to each other, whole."""
        return self.num_relays == 0

    @property
    def whole_message_slots(self) -> int:
        """Slots in which a rank keeps the header of each message: a relay fills its own copy, so none where there is one."""
        return self.depth if self.num_relays == 0 else 0

    @property
    def dispatch_planes(self) -> int:
        """Shares of a microbatch that are dispatched apart: one per dispatch switch; one where there is none."""
        return max(1, self.world.num_dispatch_switches)

    @property
    def combine_planes(self) -> int:
        return max(1, self.world.num_combine_switches)

    @property
    def dispatch_plane_tokens(self) -> int:
        return -(-self.microbatch_tokens // self.dispatch_planes)

    @property
    def combine_plane_tokens(self) -> int:
        return -(-self.microbatch_tokens // self.combine_planes)

    @property
    def row_groups(self) -> int:
        """Groups of one plane's share of a microbatch that are forwarded by themselves; 0 where the switch does not cut through."""
        return 0 if self.row_group_tokens == 0 else -(-self.dispatch_plane_tokens // self.row_group_tokens)

    @property
    def expert_row_capacity(self) -> int:
        """Rows that one expert rank can receive in one microbatch."""
        return self.dispatch_planes * self.num_ranks * self.dispatch_plane_tokens

    @property
    def rows_per_chunk(self) -> int:
        """No more than a microbatch has, so that small ones take little memory; all of it where nothing is relayed."""
        if self.num_relays == 0:
            return self.microbatch_tokens
        return min(max(1, MAX_CHUNK_BYTES // (self.hidden_size * self.row_element_bytes)), self.microbatch_tokens)

    @property
    def relay_cells(self) -> int:
        """Chunks that one sender may have in one relay: its share, but no more than its messages of two rings have.

        With one ring, a relay that gives several cells back together would do so in the middle of a microbatch.
        """
        rings = 2 * self.depth * self.num_ranks * max(self.dispatch_chunks, self.combine_chunks)
        return min(max(MIN_RELAY_CELLS, RELAY_CELLS // self.num_ranks), rings)

    @property
    def num_relays(self) -> int:
        """Switches of both roles, which relay for the plain models."""
        return self.world.num_dispatch_switches + self.world.num_combine_switches

    @property
    def dispatch_chunks(self) -> int:
        """Chunks of the longest dispatch message of one plane; an empty message is one chunk."""
        return max(1, -(-self.dispatch_plane_tokens // self.rows_per_chunk))

    @property
    def combine_chunks(self) -> int:
        return max(1, -(-self.combine_plane_tokens // self.rows_per_chunk))

    @property
    def senders_per_flag(self) -> int:
        """Flags per plane on the expert rank: one per sender when phased, else one for the coalesced packet."""
        return self.num_ranks if self.model.phased else 1

    @property
    def inbox_slots(self) -> int:
        return self.ranks_per_phase if self.model.phased else self.depth * self.num_ranks

    @property
    def routing_dtype(self) -> np.dtype:
        """Routing record of one row: its token and sender, and the experts and weights that the token chose."""
        k = self.top_k
        return np.dtype(
            [("token", "<i4"), ("sender", "<i4"), ("expert_ids", "<i4", (k,)), ("weights", "<f4", (k,))]
        )


@dataclass(frozen=True)
class Region:
    """One place. `writer` and `reader` say who touches it, `units` how many units of m_b rows one slot set holds."""

    name: str
    kind: Kind
    shape: Callable[[Dims], tuple[int, ...]]
    dtype: Callable[[Dims], np.dtype]
    writer: str
    reader: str
    when: Callable[[CommunicationModel], bool] = lambda model: True
    private: bool = False

    def num_bytes(self, dims: Dims) -> int:
        return prod(self.shape(dims)) * self.dtype(dims).itemsize


def _row(dims: Dims) -> np.dtype:
    return dims.row_dtype


def _f32(_: Dims) -> np.dtype:
    return F32


def _word(_: Dims) -> np.dtype:
    return np.dtype("<u8")


def _int64(_: Dims) -> np.dtype:
    return np.dtype("<i8")


def _int32(_: Dims) -> np.dtype:
    return np.dtype("<i4")


def _byte(_: Dims) -> np.dtype:
    return np.dtype("<u1")


def _routing(dims: Dims) -> np.dtype:
    return dims.routing_dtype


def _inc(model: CommunicationModel) -> bool:
    return model.in_network


def _inc_phased(model: CommunicationModel) -> bool:
    return model.in_network and model.phased


def _inc_collective(model: CommunicationModel) -> bool:
    return model.in_network and not model.phased


def _relayed(model: CommunicationModel) -> bool:
    return not model.in_network


def _relayed_phased(model: CommunicationModel) -> bool:
    return not model.in_network and model.phased


def _phased(model: CommunicationModel) -> bool:
    return model.phased


def _flags(name: str, shape: Callable[[Dims], tuple[int, ...]], writer: str, reader: str, **more) -> Region:
    return Region(name, Kind.FLAGS, shape, _word, writer, reader, **more)


COMMON = (
    _flags("abort", lambda d: (1,), "any PE", "every wait"),
    _flags("pe_barrier", lambda d: (d.world.num_pes,), "every PE, its own word", "this PE"),
    Region("magic", Kind.CONTROL, lambda d: (1,), _word, "this PE", "this PE"),
    Region("error_record", Kind.CONTROL, lambda d: (ERROR_BYTES,), _byte, "this PE", "PEs that see its abort"),
)

STARTS_AT_ZERO = ("magic", "chunks_sent", "ports", "error_record")
"""Regions that a fresh heap holds zeros in, besides all flags; anything else may hold anything."""

RANK = (
    Region("tokens", Kind.ROWS, lambda d: (d.depth, d.microbatch_tokens, d.hidden_size), _row, "this rank", "its own put", when=_inc),
    Region("tokens_header", Kind.CONTROL, lambda d: (d.depth, d.dispatch_planes, HEADER_FIELDS), _int64, "this rank", "its own put"),
    Region("tokens_routing", Kind.RECORDS, lambda d: (d.depth, d.microbatch_tokens), _routing, "this rank", "its own put"),
    Region("packed_tokens", Kind.ROWS, lambda d: (d.depth, d.num_ranks, d.microbatch_tokens, d.hidden_size), _row, "pack", "its own puts", when=_relayed),
    # With local bypass this rank itself writes the rows of its own tokens, in a run of its own: collectives/local_bypass.py.
    Region("expert_rows", Kind.ROWS, lambda d: (d.depth, d.expert_row_capacity, d.hidden_size), _row, "dispatch switch; then this rank, whose partial sums overwrite them", "this rank, combine switch"),
    Region("expert_rows_routing", Kind.RECORDS, lambda d: (d.depth, d.expert_row_capacity), _routing, "dispatch switch", "this rank"),
    # The rank itself writes NUM_ROWS = 0 where a relayed message came without rows, hence without a header.
    Region("expert_rows_header", Kind.CONTROL, lambda d: (d.depth, d.dispatch_planes, d.num_ranks, HEADER_FIELDS), _int64, "dispatch switch", "this rank"),
    # With cut-through every group of every sender has a word of its own, on its way in and out, also one without tokens.
    _flags("expert_group_arrived", lambda d: (d.depth, d.dispatch_planes, d.num_ranks, d.row_groups), "dispatch switch", "this rank", when=_inc_collective),
    _flags("expert_rows_arrived", lambda d: (d.depth, d.dispatch_planes, d.senders_per_flag), "dispatch switch", "this rank", when=_inc),
    Region("token_sums", Kind.ROWS, lambda d: (d.depth, d.microbatch_tokens, d.hidden_size), _row, "combine switch", "this rank", when=_inc),
    _flags("token_sums_arrived", lambda d: (d.depth, d.combine_planes), "combine switch", "this rank", when=_inc),
    _flags("dispatch_grants", lambda d: (d.dispatch_planes, d.ranks_per_phase), "dispatch switch", "this rank", when=_phased),
    _flags("barrier_released", lambda d: (1,), "dispatch switch 0", "this rank", when=_phased),
    # Plain models: the counts travel with chunk 0 of every message; each chunk has a flag of its own. Without switches the sender
    # writes what a relay would, and a message is one chunk.
    _flags("expert_chunk_arrived", lambda d: (d.depth, d.dispatch_planes, d.num_ranks, d.dispatch_chunks), "relay", "this rank", when=_relayed),
    Region("received_partial_sums", Kind.ROWS, lambda d: (d.depth, d.combine_planes, d.num_ranks, d.combine_plane_tokens, d.hidden_size), _row, "relay", "global reduce", when=_relayed),
    _flags("partial_chunk_arrived", lambda d: (d.depth, d.combine_planes, d.num_ranks, d.combine_chunks), "relay", "this rank", when=_relayed),
    _flags("relay_credits", lambda d: (d.num_relays, d.relay_cells), "relay", "this rank", when=_relayed),
    Region("message_header", Kind.CONTROL, lambda d: (d.whole_message_slots, d.num_ranks, HEADER_FIELDS), _int64, "this rank", "its own put", when=_relayed),
    Region("chunks_sent", Kind.CONTROL, lambda d: (d.num_relays,), _word, "this rank", "this rank", when=_relayed),
    Region("chunk_header", Kind.CONTROL, lambda d: (d.num_relays, d.relay_cells, CHUNK_FIELDS), _int64, "this rank", "its own put", when=_relayed),
    _flags("phase_opened", lambda d: (d.depth, d.combine_planes, d.num_ranks), "relay", "this rank", when=_relayed_phased),
    # On GPUs, where ports are paced: when what was charged to egress and ingress is through, in picoseconds of the host's clock.
    Region("ports", Kind.CONTROL, lambda d: (2,), _word, "whoever moves rows through a port of this rank", "the same"),
)

RELAY = (
    Region("relay_chunk", Kind.CONTROL, lambda d: (d.num_ranks, d.relay_cells, CHUNK_FIELDS), _int64, "rank", "this relay", when=_relayed),
    Region("relay_header", Kind.CONTROL, lambda d: (d.num_ranks, d.relay_cells, HEADER_FIELDS), _int64, "rank", "this relay", when=_relayed),
    Region("relay_routing", Kind.RECORDS, lambda d: (d.num_ranks, d.relay_cells, d.rows_per_chunk), _routing, "rank", "this relay", when=_relayed),
    Region("relay_rows", Kind.ROWS, lambda d: (d.num_ranks, d.relay_cells, d.rows_per_chunk, d.hidden_size), _row, "rank", "this relay", when=_relayed),
    _flags("relay_arrived", lambda d: (d.num_ranks, d.relay_cells), "rank", "this relay", when=_relayed),
    _flags("stop", lambda d: (d.num_ranks,), "rank", "this switch"),
)

DISPATCH_SWITCH = (
    *RELAY,
    Region("inbox_tokens", Kind.ROWS, lambda d: (d.inbox_slots, d.dispatch_plane_tokens, d.hidden_size), _row, "rank", "this switch", when=_inc),
    Region("inbox_header", Kind.CONTROL, lambda d: (d.inbox_slots, HEADER_FIELDS), _int64, "rank", "this switch", when=_inc),
    Region("inbox_routing", Kind.RECORDS, lambda d: (d.inbox_slots, d.dispatch_plane_tokens), _routing, "rank", "this switch", when=_inc),
    _flags("group_arrived", lambda d: (d.depth, d.num_ranks, d.row_groups), "rank", "this switch", when=_inc_collective),
    _flags("tokens_arrived", lambda d: (d.depth, d.num_ranks), "rank", "this switch", when=_inc),
    Region("outbox_header", Kind.CONTROL, lambda d: (d.depth, d.num_ranks, d.num_ranks, HEADER_FIELDS), _int64, "this switch", "its own puts", when=_inc),
    _flags("dispatch_requests", lambda d: (d.num_ranks,), "rank", "this switch", when=_phased),
    _flags("barrier_joined", lambda d: (d.num_ranks,), "rank", "dispatch switch 0", when=_phased),
)

COMBINE_SWITCH = (
    *RELAY,
    Region("plan_header", Kind.CONTROL, lambda d: (d.depth, d.dispatch_planes, d.num_ranks, HEADER_FIELDS), _int64, "dispatch switch; rank when phased", "this switch", when=_inc),
    Region("plan_routing", Kind.RECORDS, lambda d: (d.depth, d.dispatch_planes, d.num_ranks, d.dispatch_plane_tokens), _routing, "dispatch switch; rank when phased", "this switch", when=_inc),
    _flags("plan_arrived", lambda d: (d.depth, d.dispatch_planes), "dispatch switch", "this switch", when=_inc_collective),
    _flags("partial_sums_ready", lambda d: (d.depth, d.num_ranks), "rank", "this switch", when=_inc_collective),
    _flags("combine_requests", lambda d: (d.depth, d.num_ranks), "rank", "this switch", when=_phased),
    Region("sums_out", Kind.ROWS, lambda d: (d.ranks_per_phase, d.combine_plane_tokens, d.hidden_size), _row, "this switch", "its own puts", when=_inc),
    Region("landing", Kind.ROWS, lambda d: (d.ranks_per_phase * d.combine_plane_tokens, d.hidden_size), _row, "its own get", "this switch", when=_inc, private=True),
    Region("accumulators", Kind.ROWS, lambda d: (d.ranks_per_phase, d.combine_plane_tokens, d.hidden_size), _f32, "this switch", "this switch", when=_inc, private=True),
)

REGIONS: dict[Role, tuple[Region, ...]] = {
    Role.COMPUTE_RANK: COMMON + RANK,
    Role.DISPATCH_SWITCH: COMMON + DISPATCH_SWITCH,
    Role.COMBINE_SWITCH: COMMON + COMBINE_SWITCH,
}


class HeapLayout:
    """Offsets of all regions for one set of `Dims`.

    `region(role, name)`, `offset(role, name)` and `shape(role, name)` raise UnknownRegion for a name that the role
    does not have under this communication model.
    """

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self._regions: dict[Role, dict[str, Region]] = {}
        self._offsets: dict[Role, dict[str, int]] = {}
        self._ends: dict[Role, int] = {}
        for role, table in REGIONS.items():
            offset = 0
            self._regions[role], self._offsets[role] = {}, {}
            for region in table:
                if not region.when(dims.model):
                    continue
                self._regions[role][region.name] = region
                if region.private:
                    continue
                self._offsets[role][region.name] = offset
                offset += -(-region.num_bytes(dims) // ALIGNMENT) * ALIGNMENT
            self._ends[role] = offset

    @cached_property
    def heap_bytes(self) -> int:
        """Bytes of the symmetric heap on every PE: the maximum over the roles."""
        return max(self._ends.values())

    def regions(self, role: Role) -> dict[str, Region]:
        return self._regions[role]

    def region(self, role: Role, name: str) -> Region:
        try:
            return self._regions[role][name]
        except KeyError:
            known = ", ".join(self._regions[role])
            raise UnknownRegion(
                f"a {role.value} has no region {name!r} under {self.dims.model.value}. It has: {known}."
            ) from None

    def shape(self, role: Role, name: str) -> tuple[int, ...]:
        return self.region(role, name).shape(self.dims)

    def offset(self, role: Role, name: str) -> int:
        region = self.region(role, name)
        if region.private:
            raise UnknownRegion(f"{name!r} is private memory of the {role.value}; no other PE can reach it.")
        return self._offsets[role][name]

    def carve(self, role: Role, slab: np.ndarray) -> dict[str, np.ndarray]:
        """Views of the symmetric regions of `role` in `slab`: [heap_bytes], uint8."""
        views = {}
        for name, offset in self._offsets[role].items():
            region = self._regions[role][name]
            size = region.num_bytes(self.dims)
            views[name] = slab[offset : offset + size].view(region.dtype(self.dims)).reshape(region.shape(self.dims))
        return views

    def private(self, role: Role) -> dict[str, np.ndarray]:
        """Fresh private regions of `role`, poisoned so that a read before a write shows."""
        views = {}
        for name, region in self._regions[role].items():
            if region.private:
                views[name] = np.full(region.num_bytes(self.dims), 0xFF, np.uint8)
                views[name] = views[name].view(region.dtype(self.dims)).reshape(region.shape(self.dims))
        return views

    def row_bytes(self, role: Role) -> int:
        """Bytes of token rows that a PE of `role` holds, private memory included."""
        return sum(r.num_bytes(self.dims) for r in self._regions[role].values() if r.kind is Kind.ROWS)

    def rank_buffer_units(self) -> float:
        """Units of m_b rows in one slot set of a rank: W + 2 for the INC models."""
        unit = self.dims.depth * self.dims.microbatch_tokens * self.dims.hidden_size * self.dims.row_element_bytes
        return self.row_bytes(Role.COMPUTE_RANK) / unit
