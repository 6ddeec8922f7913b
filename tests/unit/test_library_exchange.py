"""The Baseline's library exchange without NCCL: ranks are threads, and the all-to-all copies between their tensors."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

import megakernel.library_exchange as module
from inc_runtime.errors import PlacementError
from megakernel.library_exchange import BlockSizes, Counting, LibraryExchange

RANKS = 3
SIZES = BlockSizes(bound_tokens=4, packet_bytes=48, row_bytes=32)


class Library:
    """Stands for torch.distributed. `astray`: (sender, receiver) whose blocks are lost."""

    def __init__(self, astray: tuple[int, int] | None = None) -> None:
        self.meet, self.own, self.astray = threading.Barrier(RANKS), threading.local(), astray
        self.sent: dict[int, list[torch.Tensor]] = {}
        self.ProcessGroup = object

    def get_rank(self, group: object) -> int:
        return self.own.rank

    def get_world_size(self, group: object) -> int:
        return RANKS

    def all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor], group: object) -> None:
        rank = self.own.rank
        self.sent[rank] = outgoing
        self.meet.wait(10)
        for sender in range(RANKS):
            assert len(incoming[sender]) == len(self.sent[sender][rank])
            if (sender, rank) != self.astray:
                incoming[sender][...] = self.sent[sender][rank]
        self.meet.wait(10)

    def all_to_all_single(self, incoming: torch.Tensor, outgoing: torch.Tensor, group: object) -> None:
        self.all_to_all(list(incoming.split(1)), list(outgoing.split(1)), group)

    def run(self, monkeypatch: pytest.MonkeyPatch, counting: Counting, check) -> list[Exception]:
        """`check(exchange)` on every rank; returns what was raised."""
        allocate = lambda num_bytes: torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # noqa: E731
        monkeypatch.setattr(module, "dist", self)
        memory = SimpleNamespace(allocate=allocate, numbers=itertools.repeat(5))
        monkeypatch.setattr(module.RegisteredMemory, "of", lambda group: memory)
        raised: list[Exception] = []

        def rank(number: int) -> None:
            self.own.rank = number
            try:
                check(LibraryExchange(None, SIZES, counting))
            except Exception as error:
                raised.append(error)
                self.meet.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised


@pytest.mark.parametrize("counting", list(Counting))
def test_blocks_arrive_and_answers_return(monkeypatch, counting):
    def check(exchange: LibraryExchange) -> None:
        memory, rank = exchange.memory, exchange.rank
        for peer in range(RANKS):
            exchange.sent_counts[peer] = (rank + peer) % 4
            if peer != rank:
                memory.send[peer][...] = 10 * rank + peer
                memory.received[peer][...] = 0
        exchange.dispatch(None, 3)
        for peer in range(RANKS):
            if peer == rank:
                continue
            length = SIZES.packets(3 if counting is Counting.BOUNDED else (rank + peer) % 4)
            assert memory.received[peer][:length].unique().tolist() == [10 * peer + rank]
            assert not memory.received[peer][length:].any()
            memory.partial[peer][...] = 100 + 10 * rank + peer
        exchange.combine(3)
        for peer in range(RANKS):
            length = SIZES.rows(3 if counting is Counting.BOUNDED else (rank + peer) % 4)
            if peer != rank and length:
                assert memory.returned[peer][:length].unique().tolist() == [100 + 10 * peer + rank]

    assert Library().run(monkeypatch, counting, check) == []


def test_own_blocks_are_written_where_they_are_read(monkeypatch):
    def check(exchange: LibraryExchange) -> None:
        places, rank = exchange.places, exchange.rank
        assert places.send[rank] == places.received_counts[rank] and places.partial[rank] == places.returned[rank]
        assert len({*places.send, *places.received_counts}) == 2 * RANKS - 1

    assert Library().run(monkeypatch, Counting.BOUNDED, check) == []


def test_a_block_that_goes_astray_is_noticed_when_the_exchange_is_made(monkeypatch):
    library = Library(astray=(2, 0))
    raised = library.run(monkeypatch, Counting.BOUNDED, lambda exchange: None)
    found = [error for error in raised if isinstance(error, PlacementError)]
    assert len(found) == 1 and "rank 0: a block of rank 2 did not arrive" in str(found[0])
