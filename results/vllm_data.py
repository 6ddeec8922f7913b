"""Data file of runs of `measure_vllm.py`: one row per figure, from the folders that the runs left.

    python -m results.vllm_data --placement native --commit 1980be4 --device "2 x NVIDIA H200" --software "vLLM 0.26.0" \\
        --output results/data/serving_native_1980be4.csv off=/tmp/stock megakernel=/tmp/ours

Log-probabilities are compared with the folder named `float32`, if there is one, else with `off`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np

from inc_runtime.simulator.measured import COLUMNS
from results.provenance import header, write_data_file

MOE_KERNELS = re.compile(r"megakernel|fused_moe|nccl|act_and_mul|moe_sum|moe_align|count_and_sort|topk", re.IGNORECASE)
"""Kernels of the MoE layer, ours and vLLM's; what is not among the kernels that took most is missing from the sum."""
LAYERS = 16
STEP_TOKENS = 8192
FIGURE = re.compile(r"(prefill_tokens_per_s_per_rank|decode_ms_per_step|bare_layer_us)_?(\d*)")
UNITS = {
    "prefill_tokens_per_s_per_rank": ("prefill_rate", "tokens/s per rank"),
    "decode_ms_per_step": ("decode_step_time", "ms"),
    "bare_layer_us": ("bare_layer_time", "us"),
}


def figures(folder: Path) -> list[tuple[str, int, float, str]]:
    """Metric, tokens per rank, value and unit of one run."""
    found = []
    for name, value in json.loads((folder / "times-0.json").read_text()).items():
        if match := FIGURE.fullmatch(name):
            metric, unit = UNITS[match[1]]
            found.append((metric, int(match[2] or STEP_TOKENS), float(value), unit))
        elif name == "prefill_kernels":
            spent = sum(count * mean for kernel, count, mean in value if MOE_KERNELS.search(kernel))
            found.append(("moe_kernel_time", STEP_TOKENS, spent / LAYERS, "us"))
    return found


def apart(folder: Path, other: Path) -> float | None:
    """Mean absolute difference of the log-probabilities of rank 0."""
    ours, theirs = (each / "answers-0.npz" for each in (folder, other))
    if not (ours.exists() and theirs.exists()):
        return None
    return float(np.abs(np.load(ours)["logprobs"] - np.load(theirs)["logprobs"]).mean())


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="IMPLEMENTATION=FOLDER; off is vLLM's own MoE")
    for name in ("placement", "commit", "device", "software", "command"):
        parser.add_argument(f"--{name}", default="python -m results.measure_vllm", required=name != "command")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    runs = {name: Path(folder) for name, _, folder in (run.partition("=") for run in options.runs)}
    reference = "float32" if "float32" in runs else "off"
    rows = []
    for name, folder in runs.items():
        found = figures(folder) if (folder / "times-0.json").exists() else []
        difference = apart(folder, runs[reference]) if name != reference else None
        if difference is not None:
            found.append((f"logprob_difference_to_{reference}", 128, difference, "1"))
        for metric, tokens, value, unit in found:
            cells = ("serving", "measured_gpu", options.placement, name, 2, tokens, 1024, metric, f"{value:.6g}", unit)
            rows.append(dict(zip(COLUMNS, cells, strict=True)))
    notes = header(
        device=options.device,
        placement=options.placement,
        commit=options.commit,
        command=options.command,
        software=options.software,
    )
    write_data_file(options.output, notes, COLUMNS, rows)


if __name__ == "__main__":
    main()
