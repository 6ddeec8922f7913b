"""Measure the expert products (stages 4 to 6 in one launch) against torch's grouped matrix products.

Checks every shape against float64 before it is timed (check_expert_matmul.py has the edge cases). Times are medians over
interleaved runs that rotate through several input sets; a short sleep kernel before each run lets the host run ahead, so
that launch gaps of neither side are counted. Writes one long CSV to results/data/.

    python results/measure_expert_matmul.py [--rows 1024,8192] [--sets 3] [--repeats 21] [--output FILE]

Needs what `megakernel/expert_matmul.py` needs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from check_expert_matmul import ROOT, check, load_kernel, make_inputs

from megakernel.expert_matmul import ExpertMatmul, Inputs

EXPERTS_PER_TOKEN = 8
COLUMNS = ["measurement", "source", "placement", "implementation", "num_ranks", "num_tokens", "microbatch_tokens", "metric",
           "value", "unit", "num_rows", "distribution", "num_experts", "hidden", "intermediate", "num_sms"]


def grouped_products(inputs: Inputs, swiglu: bool, activation: torch.Tensor) -> None:
    both = torch._grouped_mm(inputs.rows, inputs.gate_up.transpose(1, 2), offs=inputs.ends)
    if swiglu:
        gate, up = both.chunk(2, dim=1)
        activation = torch.nn.functional.silu(gate) * up
    torch._grouped_mm(activation, inputs.down.transpose(1, 2), offs=inputs.ends)


def time_interleaved(functions: dict[str, Callable[[int], object]], repeats: int, sets: int) -> dict[str, float]:
    """Median milliseconds of each function(set index), run in turn."""
    for function in functions.values():
        for index in range(sets):
            function(index)
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    for repeat in range(repeats):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(300_000)
            start.record()
            function(repeat % sets)
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def rows_of(kernel: ExpertMatmul, num_rows: int, distribution: str, times: dict[str, float], error: float) -> list[dict]:
    """CSV rows of the medians `times` (ms)."""
    operations = 6.0 * num_rows * kernel.shape.hidden * kernel.shape.intermediate
    lines = []
    for name, ms in times.items():
        metrics = [("stage_time", ms * 1e3, "us")]
        if name != "copy_rows":
            metrics.append(("rate", operations / ms / 1e9, "TFLOP/s"))
        if name.startswith("expert_matmul"):
            metrics.append(("relative_error", error, "1"))
            for rival in ("grouped_mm", "grouped_mm_swiglu"):
                if rival in times and not name.endswith("32_sms"):
                    metrics.append((f"speedup_over_{rival}", times[rival] / ms, "1"))
        tokens = num_rows // EXPERTS_PER_TOKEN  # per rank, when the rows of W ranks spread evenly
        for metric, value, unit in metrics:
            lines.append({
                "measurement": "expert_matmul", "source": "measured_gpu", "placement": "native", "implementation": name,
                "num_ranks": 1, "num_tokens": tokens, "microbatch_tokens": tokens, "metric": metric,
                "value": f"{value:.6g}", "unit": unit, "num_rows": num_rows, "distribution": distribution,
                "num_experts": kernel.shape.num_experts, "hidden": kernel.shape.hidden,
                "intermediate": kernel.shape.intermediate, "num_sms": 32 if name.endswith("32_sms") else kernel.num_sms,
            })
    return lines


def measure(kernel: ExpertMatmul, num_rows: int, distribution: str, repeats: int, num_sets: int) -> list[dict]:
    sets = [make_inputs(kernel.shape, num_rows, distribution, 1000 + index) for index in range(num_sets)]
    error = max(check(kernel, sets[0], kind, weighted=False) for kind in kernel.functions)
    activation = kernel.activation[:num_rows]
    functions: dict[str, Callable[[int], object]] = {
        name: (lambda i, name=name: kernel.launch(sets[i], name)) for name in kernel.functions
    }
    functions |= {
        "expert_matmul_32_sms": lambda i: kernel.launch(sets[i], "expert_matmul", blocks=32),
        "grouped_mm": lambda i: grouped_products(sets[i], False, activation),
        "grouped_mm_swiglu": lambda i: grouped_products(sets[i], True, activation),
        "copy_rows": lambda i: torch.index_select(sets[i].tokens, 0, sets[i].row_to_token),  # what gathering saves
    }
    times = time_interleaved(functions, repeats, num_sets)
    kernel.raise_on_error()
    print(f"rows={num_rows} {distribution}: error {error:.1e}; " + "; ".join(
        f"{name} {ms * 1e3:.1f} us" for name, ms in times.items()), flush=True)
    print(f"    grouped_mm / expert_matmul {times['grouped_mm'] / times['expert_matmul']:.3f}, with silu*mul between "
          f"{times['grouped_mm_swiglu'] / times['expert_matmul']:.3f}", flush=True)
    return rows_of(kernel, num_rows, distribution, times, error)


def measure_torch_on_32_sms(kernel: ExpertMatmul, sizes: list[int], repeats: int, num_sets: int) -> list[dict]:
    """torch's pair alone in a green context of 32 SMs; nothing where torch cannot make one."""
    try:
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext.create(num_sms=32, device_id=0)
        context.set_context()
    except (ImportError, RuntimeError, AttributeError, TypeError) as error:
        print(f"no green context, torch is not measured on 32 SMs: {error}", flush=True)
        return []
    lines = []
    for num_rows in sizes:
        with torch.cuda.stream(torch.cuda.Stream()):
            sets = [make_inputs(kernel.shape, num_rows, "uniform", 1000 + index) for index in range(num_sets)]
            activation = kernel.activation[:num_rows]
            functions = {"grouped_mm_32_sms": lambda i, s=sets, a=activation: grouped_products(s[i], False, a)}
            times = time_interleaved(functions, repeats, num_sets)
        print(f"rows={num_rows} uniform, 32 SMs: grouped_mm {times['grouped_mm_32_sms'] * 1e3:.1f} us", flush=True)
        lines += rows_of(kernel, num_rows, "uniform", times, 0.0)
    context.pop_context()
    return lines


def write_csv(path: Path, lines: list[dict]) -> None:
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# date: {datetime.datetime.now().isoformat(timespec='seconds')}\n")
        file.write(f"# device: {torch.cuda.get_device_name(0)}; placement: native, one rank alone\n")
        file.write(f"# commit: {commit.stdout.strip() or 'uncommitted'}\n")
        file.write(f"# software: torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}\n")
        file.write(f"# command: python results/{Path(__file__).name} {' '.join(sys.argv[1:])}\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1024,2048,4096,8192,16384,32768,65536")
    parser.add_argument("--distributions", default="uniform,skewed,edges")
    parser.add_argument("--shape", default="16,2048,1024", help="experts, hidden, intermediate")
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--kernels", default="expert_matmul,expert_matmul_gather")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "data" / "expert_matmul_native_uncommitted.csv")
    options = parser.parse_args()
    sizes = [int(rows) for rows in options.rows.split(",")]
    kernel = load_kernel(max(sizes), options.shape)
    kernel.functions = {name: kernel.functions[name] for name in options.kernels.split(",")}
    lines = []
    for num_rows in sizes:
        for distribution in options.distributions.split(","):
            lines += measure(kernel, num_rows, distribution, options.repeats, options.sets)
            write_csv(options.output, lines)
    lines += measure_torch_on_32_sms(kernel, sizes, options.repeats, options.sets)
    write_csv(options.output, lines)


if __name__ == "__main__":
    main()
