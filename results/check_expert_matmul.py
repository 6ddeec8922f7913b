"""Check the expert products against float64, with poisoned buffers, and their handling of late and missing rows.

    python results/check_expert_matmul.py [--shape E,H,I] [--max-rows N]

Needs what `megakernel/expert_matmul.py` needs. Exit status 1 and the case at the first wrong result.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megakernel.device_arguments import TILE_ROWS  # noqa: E402
from megakernel.expert_matmul import ExpertMatmul, Inputs, Shape  # noqa: E402


def split_rows(num_rows: int, num_experts: int, distribution: str, generator: torch.Generator) -> list[int]:
    """Rows of each expert; the sum is `num_rows`."""
    if distribution == "uniform":
        counts = [num_rows // num_experts] * num_experts
    elif distribution == "random":  # what a balanced router gives: multinomial
        choice = torch.randint(num_experts, (num_rows,), generator=generator)
        counts = torch.bincount(choice, minlength=num_experts).tolist()
    elif distribution == "skewed":  # proportional to 1 / (rank + 1), shuffled
        share = 1.0 / torch.arange(1, num_experts + 1, dtype=torch.float64)
        share = share[torch.randperm(num_experts, generator=generator)]
        counts = (share / share.sum() * num_rows).long().tolist()
    elif distribution == "edges":  # a quarter empty, a quarter of one row (the last too), the rest skewed
        share = torch.rand(num_experts, generator=generator, dtype=torch.float64)
        share[0::4] = 0.0
        share[3::4] = 0.0
        ones = [1 if expert % 4 == 3 else 0 for expert in range(num_experts)]
        spread = (share / share.sum() * (num_rows - sum(ones))).long().tolist()
        counts = [a + b for a, b in zip(ones, spread, strict=True)]
    elif distribution == "one_expert":
        counts = [0] * num_experts
        counts[num_experts // 2] = num_rows
    else:
        raise ValueError(f"no distribution {distribution!r}")
    largest = max(range(num_experts), key=lambda expert: counts[expert])
    counts[largest] += num_rows - sum(counts)
    return counts


def make_inputs(shape: Shape, num_rows: int, distribution: str, seed: int, gap: int = 0) -> Inputs:
    """Random inputs of scale 1. With `gap`, that many rows of NaN lie between experts."""
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(device="cuda").manual_seed(seed)
    num_experts, hidden, intermediate = shape.num_experts, shape.hidden, shape.intermediate
    counts = split_rows(num_rows, num_experts, distribution, generator)
    offsets = [sum(counts[:expert]) + gap * expert for expert in range(num_experts)]
    total = num_rows + gap * num_experts

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=on_device, device="cuda", dtype=torch.float32) * scale).bfloat16()

    num_tokens = max(num_rows // 2, 1)
    tokens = normal(num_tokens, hidden)
    row_to_token = torch.randint(num_tokens, (total,), generator=on_device, device="cuda", dtype=torch.int32)
    rows = tokens[row_to_token.long()]
    if gap:
        for expert in range(num_experts):
            end = offsets[expert] + counts[expert]
            rows[end : end + gap] = float("nan")
    as_tensor = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
    return Inputs(
        rows=rows, gate_up=normal(num_experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        down=normal(num_experts, hidden, intermediate, scale=intermediate**-0.5), offsets=as_tensor(offsets),
        counts=as_tensor(counts), ends=as_tensor([sum(counts[: e + 1]) for e in range(num_experts)]),
        weight=torch.rand(total, generator=on_device, device="cuda") + 0.25, tokens=tokens, row_to_token=row_to_token,
        count_list=counts,
    )


def relative_error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(seen.double() - expected) / torch.linalg.vector_norm(expected))


def check(kernel: ExpertMatmul, inputs: Inputs, kind: str, *, weighted: bool, **launch: object) -> float:
    """Compare one launch with float64 per expert; returns the larger relative error. bf16 rounding alone is 1.7e-3."""
    total = inputs.rows.shape[0]
    kernel.activation[:total] = float("nan")
    kernel.output[:total] = float("nan")
    kernel.launch(inputs, kind, weighted=weighted, **launch)
    torch.cuda.synchronize()
    kernel.raise_on_error()
    worst, written = 0.0, torch.zeros(total, dtype=torch.bool, device="cuda")
    for expert, count in enumerate(inputs.count_list):
        first = int(inputs.offsets[expert])
        written[first : first + count] = True
        for start in range(first, first + count, 8192):
            part = slice(start, min(start + 8192, first + count))
            both = inputs.rows[part].double() @ inputs.gate_up[expert].double().T
            gate, up = both.split(kernel.shape.intermediate, dim=1)
            activation = torch.nn.functional.silu(gate) * up
            seen = kernel.activation[part]
            output = seen.double() @ inputs.down[expert].double().T
            if weighted:
                output *= inputs.weight[part, None].double()
            errors = relative_error(seen, activation), relative_error(kernel.output[part], output)
            bound = output.abs() * 2.0**-8 + 2e-3
            if not max(errors) < 2.5e-3 or not bool(((kernel.output[part].double() - output).abs() <= bound).all()):
                raise AssertionError(f"{kind}, expert {expert}, rows {part.start}..{part.stop}: errors {errors}")
            worst = max(worst, *errors)
    for region in (kernel.activation[:total], kernel.output[:total]):
        if not bool(region[~written].isnan().all()):
            raise AssertionError(f"{kind}: a row that belongs to no expert was written")
    return worst


def run_checks(kernel: ExpertMatmul, max_rows: int) -> None:
    seed = 100
    for num_rows, distribution, gap in [
        (5, "one_expert", 0), (1, "one_expert", 0), (128, "random", 3), (1000, "edges", 7), (1024, "uniform", 0),
        (4096, "random", 0), (4097, "edges", 5), (8192, "skewed", 1), (20000, "random", 0), (16384, "one_expert", 0),
        (65536, "uniform", 0), (65536, "edges", 0), (540672, "random", 0),  # the last: rows beyond 2^31 bytes
    ]:
        if num_rows + gap * kernel.shape.num_experts > max_rows:
            continue
        seed += 1
        inputs = make_inputs(kernel.shape, num_rows, distribution, seed, gap)
        errors = []
        for kind in kernel.functions:
            for weighted, blocks, lag_tiles in ((False, 0, None), (True, 32, 3)):
                errors.append(check(kernel, inputs, kind, weighted=weighted, blocks=blocks, lag_tiles=lag_tiles))
        print(f"check rows={num_rows} {distribution} gap={gap}: worst relative error {max(errors):.2e}", flush=True)
    check_bitwise(kernel)
    check_arrival(kernel)


def check_bitwise(kernel: ExpertMatmul) -> None:
    """The same rows give the same bits whatever the grid, the order of tiles, and the way in which rows are read."""
    inputs = make_inputs(kernel.shape, 6000, "random", 3)
    kernel.launch(inputs, "expert_matmul")
    expected = kernel.output[:6000].clone()
    kinds = list(kernel.functions)
    for repeat in range(50):
        kernel.output.fill_(float("nan"))
        kind = kinds[repeat % len(kinds)]
        kernel.launch(inputs, kind, blocks=7 + 5 * (repeat % 26), lag_tiles=11 * (repeat % 9))
        if not torch.equal(kernel.output[:6000], expected):
            kernel.raise_on_error()
            raise AssertionError(f"{kind}: launch {repeat} gave other bits")
    kernel.raise_on_error()
    print("check bitwise: 50 launches of different grids and orders gave the same bits", flush=True)


def check_arrival(kernel: ExpertMatmul) -> None:
    """Rows that land during the launch, tile by tile in reverse order; and rows that never land."""
    inputs = make_inputs(kernel.shape, 4096, "edges", 7)
    num_tiles = sum((count + TILE_ROWS - 1) // TILE_ROWS for count in inputs.count_list)
    late = torch.zeros_like(inputs.rows)
    torch.cuda._sleep(1)  # loads the kernels of this check before one of ours occupies the GPU
    torch.zeros(1, dtype=torch.int64, device="cuda").fill_(8)
    torch.mul(late, 1.0, out=late)
    kind = "expert_matmul"
    arrival = torch.zeros(num_tiles, dtype=torch.int64, device="cuda")
    kernel.activation.fill_(float("nan"))
    kernel.output.fill_(float("nan"))
    kernel.launch(inputs, kind, blocks=64)
    expected = kernel.output[:4096].clone()
    kernel.output.fill_(float("nan"))
    whole = inputs.rows.clone()
    inputs.rows.copy_(late)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # about 10 ms: everything is queued before the first row lands
        tile = num_tiles
        for expert in reversed(range(kernel.shape.num_experts)):
            first = int(sum(inputs.count_list[:expert]))
            count = inputs.count_list[expert]
            for start in reversed(range(0, count, TILE_ROWS)):
                tile -= 1
                part = slice(first + start, first + min(start + TILE_ROWS, count))
                torch.mul(whole[part], 1.0, out=inputs.rows[part])
                arrival[tile : tile + 1].fill_(8)
    kernel.launch(inputs, kind, arrival=arrival, blocks=64)  # leaves SMs to the copies
    torch.cuda.synchronize()
    kernel.raise_on_error()
    if not torch.equal(kernel.output[:4096], expected):
        raise AssertionError(f"{kind}: rows that arrived late gave another result")
    arrival.zero_()
    kernel.launch(inputs, kind, arrival=arrival, limit=1 << 22)
    torch.cuda.synchronize()
    try:
        kernel.raise_on_error()
    except TimeoutError as error:
        print(f"check arrival {kind}: late rows right; missing rows reported: {error}", flush=True)
    else:
        raise AssertionError(f"{kind}: rows never arrived and nobody said so")
    inputs = make_inputs(kernel.shape, 4096, "edges", 7)
    check(kernel, inputs, "expert_matmul", weighted=False)  # a stuck launch leaves nothing behind


def load_kernel(max_rows: int, shape: str) -> ExpertMatmul:
    """Build and load the kernels for `shape`, "experts,hidden,intermediate"."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("expert_matmul needs a Hopper GPU (compute capability 9.0) and torch with CUDA")
    return ExpertMatmul(max_rows, Shape(*map(int, shape.split(","))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="16,2048,1024", help="experts, hidden, intermediate")
    parser.add_argument("--max-rows", type=int, default=65536, help="largest number of rows of the cases")
    options = parser.parse_args()
    run_checks(load_kernel(max(options.max_rows, 6000), options.shape), options.max_rows)


if __name__ == "__main__":
    main()
