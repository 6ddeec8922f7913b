"""The routings that every model is tried on, and random cases of all of them. A routing gives one LayerInput per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, SumOrder
from inc_runtime.protocol import World
from megakernel.fused_layer import LayerInput
from tests.simulate import Layer, given_experts, random_tokens

Draw = Callable[[np.random.Generator, LayerShape, int, int], np.ndarray]


def distinct(rng: np.random.Generator, scores: np.ndarray, num_tokens: int, top_k: int) -> np.ndarray:
    """Draw `top_k` distinct experts per token with odds `scores` (Gumbel trick)."""
    noise = rng.gumbel(size=(num_tokens, len(scores)))
    return np.argsort(-(np.log(scores) + noise), axis=1)[:, :top_k]


def uniform(rng: np.random.Generator, shape: LayerShape, num_ranks: int, num_tokens: int) -> np.ndarray:
    return distinct(rng, np.ones(shape.num_experts), num_tokens, shape.top_k)


def zipf(rng: np.random.Generator, shape: LayerShape, num_ranks: int, num_tokens: int) -> np.ndarray:
    return distinct(rng, 1.0 / np.arange(1, shape.num_experts + 1), num_tokens, shape.top_k)


def one_hot_expert(rng: np.random.Generator, shape: LayerShape, num_ranks: int, num_tokens: int) -> np.ndarray:
    """Every token chooses the last expert, once, and nothing else."""
    ids = np.full((num_tokens, shape.top_k), -1)
    ids[:, 0] = shape.num_experts - 1
    return ids


def one_hot_rank(rng: np.random.Generator, shape: LayerShape, num_ranks: int, num_tokens: int) -> np.ndarray:
    """Every choice is an expert of rank 0."""
    return rng.choice(shape.experts_of_rank(0, num_ranks), (num_tokens, shape.top_k))


def masked_rows(rng: np.random.Generator, shape: LayerShape, num_ranks: int, num_tokens: int) -> np.ndarray:
    """About half of the tokens choose nothing."""
    ids = uniform(rng, shape, num_ranks, num_tokens)
    ids[rng.random(num_tokens) < 0.5] = -1
    return ids


def nothing(rng: np.random.Generator, shape: LayerShape, num_ranks: int, num_tokens: int) -> np.ndarray:
    return np.full((num_tokens, shape.top_k), -1)


def minus_one_anywhere(rng: np.random.Generator, shape: LayerShape, num_ranks: int, num_tokens: int) -> np.ndarray:
    ids = uniform(rng, shape, num_ranks, num_tokens)
    ids[rng.random(ids.shape) < 0.4] = -1
    return ids


def duplicates(rng: np.random.Generator, shape: LayerShape, num_ranks: int, num_tokens: int) -> np.ndarray:
    """Drawn with replacement: an id may occur twice in a row, and then counts twice."""
    ids = rng.integers(0, shape.num_experts, (num_tokens, shape.top_k))
    ids[:, -1] = ids[:, 0]
    return ids


ROUTINGS: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (uniform, zipf, one_hot_expert, one_hot_rank, masked_rows, nothing, minus_one_anywhere, duplicates)
}


def full(rng: np.random.Generator, num_ranks: int, bound: int) -> list[int]:
    return [bound] * num_ranks


def ragged(rng: np.random.Generator, num_ranks: int, bound: int) -> list[int]:
    counts = rng.integers(0, bound + 1, num_ranks)
    return [int(count) for count in counts]


def empty_ranks(rng: np.random.Generator, num_ranks: int, bound: int) -> list[int]:
    """Only one rank has tokens."""
    counts = [0] * num_ranks
    counts[int(rng.integers(num_ranks))] = bound
    return counts


COUNTS = {count.__name__: count for count in (full, ragged, empty_ranks)}


@cache
def layer_of(shape: LayerShape) -> Layer:
    return Layer(shape, seed=shape.num_experts * 10 + shape.top_k)


def draw_call(
    rng: np.random.Generator, shape: LayerShape, counts: Sequence[int], routing: str, num_ranks: int
) -> list[LayerInput]:
    """One call: for each rank its tokens, experts and weights (0.1 to 1.1, so that none vanishes)."""
    call = []
    for num_tokens in counts:
        ids = ROUTINGS[routing](rng, shape, num_ranks, num_tokens)
        weights = rng.random(ids.shape) + 0.1
        call.append(given_experts(shape, random_tokens(rng, num_tokens, shape.hidden_size), ids, weights))
    return call


@dataclass
class Case:
    """All that one simulated run needs."""

    layers: list[Layer]
    pipelines: list[Pipeline]
    world: World
    calls: list[list[LayerInput]]
    jitter_us: float
    label: str


TINY_SHAPES = [LayerShape(e, k, 8, 8) for e, k in ((1, 1), (2, 1), (2, 2), (3, 2), (4, 3), (5, 1), (5, 5))]


def random_case(model: CommunicationModel, seed: int) -> Case:
    """Everything is drawn from `seed`: W of 2 or 3, planes, depth, m_b, G, barrier, order, layers, routing, counts, jitter."""
    rng = np.random.default_rng([seed, list(CommunicationModel).index(model)])
    num_ranks = int(rng.choice([2, 2, 3]))
    world = World(num_ranks, int(rng.choice([1, 1, 2])), int(rng.choice([1, 1, 2])))
    depth = int(rng.choice([1, 2, 3, 4], p=[0.3, 0.35, 0.25, 0.1]))
    microbatch_tokens = int(rng.integers(1, 4))
    microbatches = 2 * depth + 1
    layers, pipelines, calls, labels = [], [], [], []
    common = {
        "microbatch_tokens": microbatch_tokens,
        "depth": depth,
        "ranks_per_phase": int(rng.integers(1, num_ranks + 1)),
        "barrier_after_dispatch": bool(rng.random() < 0.5),
        "sum_order": SumOrder.RANK if rng.random() < 0.3 else SumOrder.ARRIVAL,
    }
    for number in range(1 + (rng.random() < 0.2)):
        bound = max(1, microbatches * microbatch_tokens // (1 + number) - int(rng.integers(microbatch_tokens)))
        shape = TINY_SHAPES[int(rng.integers(len(TINY_SHAPES)))]
        routing = list(ROUTINGS)[int(rng.integers(len(ROUTINGS)))]
        counts = list(COUNTS)[int(rng.integers(len(COUNTS)))]
        layers.append(layer_of(shape))
        pipelines.append(Pipeline(bound_tokens=bound, **common))
        calls.append(draw_call(rng, shape, COUNTS[counts](rng, num_ranks, bound), routing, num_ranks))
        labels.append(f"E={shape.num_experts} k={shape.top_k} {routing} {counts}")
    jitter_us = float(rng.choice([2.0, 20.0, 200.0]))
    if model.selective and rng.random() < 0.3:
        pipelines = [replace(one, local_bypass=True) for one in pipelines]
    label = f"{model.value}, seed {seed}: {world}, {pipelines[0]}, {'; '.join(labels)}, jitter {jitter_us} us"
    return Case(layers, pipelines, world, calls, jitter_us, label)
