"""Flows of a plain all-to-all: W * W messages through ports that serve first come, first served, as arrays.

Used by the aggregated event mode and by the fast mode; proved against the packets of the relay programs at small W
(`tests/backend/test_simulator_aggregate.py`). Times in us; `work[s, d]` is the time of the message from s to d on a port.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=16)
def send_order(num_ranks: int) -> np.ndarray:
    """Destinations of every sender in the order in which it sends, the next rank first: [W, W] int64."""
    return (np.arange(num_ranks)[:, None] + 1 + np.arange(num_ranks)) % num_ranks


def message_starts(starts: np.ndarray, work: np.ndarray) -> np.ndarray:
    """When each message leaves its sender, one after another from `starts` [W]: [W, W], indexed [sender, destination]."""
    order = send_order(len(starts))
    ordered = np.take_along_axis(work, order, axis=1)
    begins = np.empty_like(ordered)
    np.put_along_axis(begins, order, starts[:, None] + np.cumsum(ordered, axis=1) - ordered, axis=1)
    return begins


def fifo_finish(arrivals: np.ndarray, work: np.ndarray, free: np.ndarray) -> np.ndarray:
    """When each destination has all its messages, served in order of arrival from `free` [W]: [W].

    Lindley: the last of the busy period that begins with message i ends at its arrival plus all work from it on.
    """
    order = np.argsort(arrivals, axis=0, kind="stable")
    sorted_work = np.take_along_axis(work, order, axis=0)
    remaining = np.cumsum(sorted_work[::-1], axis=0)[::-1]
    busy = (np.take_along_axis(arrivals, order, axis=0) + remaining).max(axis=0)
    return np.maximum(busy, free + work.sum(axis=0))


def uplink_finish(
    starts: np.ndarray, tails: np.ndarray, cross: np.ndarray, free_up: np.ndarray, free_down: np.ndarray, leaf_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When the rows between leaves have crossed: for each rank, the finish; then the new free times of the uplinks.

    `cross` [leaves, leaves]: time on an uplink of the rows from one leaf to another. A fluid: the uplinks work from the
    first start of their leaf on, and end no earlier than the senders do.
    """
    edges = np.arange(0, len(starts), leaf_size)
    first, last = np.minimum.reduceat(starts, edges), np.maximum.reduceat(tails, edges)
    up = np.maximum(np.maximum(free_up, first) + cross.sum(axis=1), last)
    down = np.maximum(np.maximum(free_down, first.min()) + cross.sum(axis=0), up.max() if cross.any() else 0.0)
    return np.repeat(down, leaf_size), up, down
