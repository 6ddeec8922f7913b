"""One rank of a server without vLLM: joins by its job id, runs some steps, and writes its outputs.

    python -m tests.serving.rank_process RANK NUM_RANKS OUTPUT STEPS REPEAT

STEPS is JSON: the tokens of each rank in each step; all of them run REPEAT times. Tokens and experts are functions of the
seed, so that the test knows them.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from inc_runtime.config import Implementation, LayerShape
from inc_runtime.environment import Environment
from megakernel.vllm_rank import Placement, RankRuntime, step_bound
from tests.simulate import Layer

SHAPE = LayerShape(6, 2, 16, 8)
NUM_LAYERS = 2
LARGEST_STEP = 24
PADDING = 3


def draw(step: int, rank: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, H] and logits [n, E] of one rank in one step, float32."""
    rng = np.random.default_rng(1000 * step + rank)
    shapes = ((num_tokens, SHAPE.hidden_size), (num_tokens, SHAPE.num_experts))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def main(rank: int, num_ranks: int, output: str, steps: list[list[int]]) -> None:
    """Be the rank. Every step has rows of padding after its tokens, poisoned with NaN; so are all rows of an empty one."""
    torch.set_num_threads(1)
    runtime = RankRuntime(Implementation(Environment.read().vllm), Placement(rank, num_ranks), LARGEST_STEP, torch.float32)
    own = SHAPE.experts_of_rank(rank, num_ranks)
    for number in range(NUM_LAYERS):
        runtime.add_layer(SHAPE)
        layer = Layer(SHAPE, seed=number)
        runtime.load(number, layer.gate_up[own.start : own.stop], layer.down[own.start : own.stop])
    print("joined", flush=True)
    results = {}
    for step, counts in enumerate(steps):
        bound = step_bound([count + PADDING for count in counts], LARGEST_STEP)
        tokens, logits = (
            torch.cat([torch.from_numpy(array), torch.full((PADDING, array.shape[1]), torch.nan)])
            for array in draw(step, rank, counts[rank])
        )
        for number in range(NUM_LAYERS):
            tokens = runtime.run(number, tokens, logits, counts[rank], bound)
        results[str(step)] = tokens.numpy()
    np.savez(output, expert_rows=runtime.metrics.totals[0].expert_rows, **results)
    runtime.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]) * int(sys.argv[5]))
