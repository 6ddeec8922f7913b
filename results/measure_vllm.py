"""OLMoE at its real shape, random weights, served by vLLM's offline engine: its own MoE, or ours, with the same questions.

    python -m results.measure_vllm --implementation off --output /tmp/stock
    python -m results.measure_vllm --implementation megakernel --output /tmp/ours --against /tmp/stock

Data and expert parallel over `--ranks` GPUs, one process a rank; `megakernel_inc` starts two switches beside them, through
MPS. Each run leaves answers-RANK.npz and times-RANK.json: log-probabilities and greedy tokens, prefill and decode throughput, the
kernels of one prefill step and of decode steps, and the bare layer in the same process. Weights are drawn by a seed of the
parameter and the rank, so that both runs serve the same model. Needs vLLM; on CPUs it checks itself in small (`--config`).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from inc_runtime.host_group import StoreGroup
from inc_runtime.mps import private_daemon

WORKER = "megakernel.vllm_worker.IncWorker"
CONFIG: dict = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 50279,
}
CHECKED_PROMPTS, CHECKED_LENGTH, GREEDY_TOKENS = 8, 128, 16
DECODE_STEPS = 32
BARE_TOKENS = (1, 64, 1024, 4096, 8192)
NUM_KERNELS = 14
START = time.monotonic()


def say(text: str) -> None:
    """One line, with the seconds since the start."""
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


def draw_weights(shares: int, hidden_size: int) -> None:
    """Let vLLM's loader of dummy weights draw such that the experts matter. Call it before the engine is made.

    Values are bfloat16 in any dtype of the model, with a spread that leaves rows alike in any size. `shares`: of the experts
    on one rank, drawn apart: as many ranks would hold.
    """
    import torch
    from vllm.distributed import get_ep_group
    from vllm.model_executor.model_loader import dummy_loader

    drawn, spread = 0, 0.02 * (CONFIG["hidden_size"] / hidden_size) ** 0.5

    def draw(module: torch.nn.Module, _: object) -> None:
        nonlocal drawn
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            drawn += 1
            if parameter.ndim == 1:
                parameter.data.fill_(1.0)
                continue
            experts = name in ("w13_weight", "w2_weight")
            for share, part in enumerate(parameter.data.chunk(shares if experts else 1)):
                generator = torch.Generator(device=part.device)
                generator.manual_seed(drawn + 1_000_003 * (get_ep_group().rank_in_group + share if experts else 0))
                values = torch.empty_like(part, dtype=torch.bfloat16)
                part.copy_(values.normal_(0.0, spread * (2 if experts else 1), generator=generator))

    dummy_loader.initialize_dummy_weights = draw


class Rank:
    """The engine of one rank, and what is asked of it. Every method is collective over the ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        draw_weights(options.shares, json.loads((options.output / "model" / "config.json").read_text())["hidden_size"])
        from vllm import LLM

        self.options = options
        names = [f"rank {rank}" for rank in range(options.ranks)]
        self.group = StoreGroup(int(os.environ["MEASURE_PORT"]), options.rank, names, options.limit)
        ours = options.implementation != "off"
        more = {"worker_cls": WORKER} if ours else {}
        if not options.on_cpu:
            sizes = [1 << power for power in range(options.prompts.bit_length())]
            more |= {"kv_cache_memory_bytes": options.kv_gib << 30, "distributed_executor_backend": "uni"}
            more |= {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        if options.dtype == "float32":
            more |= {"attention_backend": "TRITON_ATTN"}
        self.llm = LLM(
            str(options.output / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=options.dtype,
            max_model_len=min(2048, options.length + 256),
            max_num_batched_tokens=options.batch,
            max_num_seqs=max(8, options.prompts),
            enable_prefix_caching=False,
            enable_expert_parallel=options.ranks > 1,
            enforce_eager=options.eager,
            seed=0,
            **more,
        )
        say("the engine is up")

    def together(self, value: object) -> list:
        """`value` of every rank."""
        return self.group.gather(value)

    def prompts(self, count: int, length: int, seed: int) -> list[dict]:
        """Token ids, others on each rank."""
        rng = np.random.default_rng([seed, self.options.rank])
        ids = rng.integers(0, self.llm.llm_engine.model_config.get_vocab_size(), (count, length))
        return [{"prompt_token_ids": row.tolist()} for row in ids]

    def generate(self, prompts: list[dict], tokens: int, **more: object) -> list:
        """Greedy answers of exactly `tokens` tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
        return self.llm.generate(prompts, sampling, use_tqdm=False)

    def seconds(self, prompts: list[dict], tokens: int) -> float:
        """Of the slowest rank, from a common start."""
        self.together(None)
        start = time.monotonic()
        self.generate(prompts, tokens)
        return max(self.together(time.monotonic() - start))

    def answers(self) -> dict[str, np.ndarray]:
        """Log-probabilities of given tokens, in one batch and prompt by prompt, and greedy tokens."""
        prompts = self.prompts(CHECKED_PROMPTS, min(CHECKED_LENGTH, self.options.length), seed=1)
        together = self.generate(prompts, GREEDY_TOKENS, prompt_logprobs=0)
        alone = [self.generate([prompt], 1, prompt_logprobs=0)[0] for prompt in prompts]
        return {
            "logprobs": np.array([_logprobs(each) for each in together]),
            "logprobs_alone": np.array([_logprobs(each) for each in alone]),
            "tokens": np.array([each.outputs[0].token_ids for each in together]),
        }

    def times(self) -> dict[str, float]:
        """Prefill and decode, tokens per second of one rank and milliseconds per step."""
        options = self.options
        prompts = self.prompts(options.prompts, options.length, seed=2)
        self.seconds(prompts[:8], 1)
        prefill = min(self.seconds(prompts, 1) for _ in range(2))
        found = {"prefill_tokens_per_s_per_rank": options.prompts * options.length / prefill}
        for count in (1, options.prompts):
            short = self.prompts(count, 32, seed=3)
            self.seconds(short, DECODE_STEPS + 1)
            first = min(self.seconds(short, 1) for _ in range(2))
            whole = min(self.seconds(short, DECODE_STEPS + 1) for _ in range(2))
            found[f"decode_ms_per_step_{count}"] = (whole - first) / DECODE_STEPS * 1e3
        return found

    def kernels(self, prompts: list[dict], tokens: int) -> list[tuple[str, int, float]]:
        """Name, launches and mean microseconds of the kernels of one call that take most, by torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        self.together(None)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.generate(prompts, tokens)
        self.together(None)
        found = [
            (each.key, each.count, each.self_device_time_total / each.count)
            for each in profiler.key_averages()
            if each.self_device_time_total
        ]
        return sorted(found, key=lambda each: -each[1] * each[2])[:NUM_KERNELS]

    def bare_layer_us(self, num_tokens: int) -> float:
        """Median of our layer alone, called on one layer of the model after another; the slowest rank."""
        import torch

        from megakernel.vllm_method import runtime

        rank = runtime()
        assert rank is not None
        shape, device = rank.shapes[0], f"cuda:{torch.cuda.current_device()}"
        hidden = torch.randn(num_tokens, shape.hidden_size, device=device, dtype=torch.bfloat16)
        logits = torch.randn(num_tokens, shape.num_experts, device=device, dtype=torch.bfloat16)
        rank.begin_step(num_tokens)
        self.together(None)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * len(rank.layers) + 1)]
        events[0].record()
        for number, event in enumerate(events[1:]):
            rank.run(number % len(rank.layers), hidden, logits, num_tokens, num_tokens)
            event.record()
        torch.cuda.synchronize()
        rank.begin_step(0)
        took = [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(events)]
        return max(self.together(float(np.median(took[len(rank.layers) :]))))


def _logprobs(answer) -> list[float]:
    pairs = zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True)
    return [step[token].logprob for token, step in pairs if step is not None]


def be_rank(options: argparse.Namespace) -> None:
    """One rank, from start to end."""
    if options.gate:
        importlib.import_module("vllm.v1.engine.core")
        say("waits at the gate")
        while not options.gate.exists():
            time.sleep(0.1)
    faulthandler.dump_traceback_later(options.limit, exit=True)
    rank, found = Rank(options), {}
    np.savez(options.output / f"answers-{options.rank}.npz", **rank.answers())
    say("answers are written")
    path = options.output / f"times-{options.rank}.json"
    if not options.answers_only:
        found |= rank.times()
        path.write_text(json.dumps(found))
        say(str(found))
    if not options.on_cpu and not options.answers_only:
        if options.implementation != "off":
            for tokens in BARE_TOKENS:
                found[f"bare_layer_us_{tokens}"] = rank.bare_layer_us(min(tokens, options.batch))
            path.write_text(json.dumps(found))
            say(str({name: round(value, 1) for name, value in found.items() if name.startswith("bare")}))
        step = options.batch // options.length
        found["prefill_kernels"] = rank.kernels(rank.prompts(step, options.length, seed=4), 1)
        found["decode_kernels"] = rank.kernels(rank.prompts(options.prompts, 32, seed=5), 9)
    path.write_text(json.dumps(found))
    rank.group.close()
    if options.implementation != "off":
        from megakernel.vllm_method import runtime

        own = runtime()
        if own is not None:
            own.close()
    say("done")


def compare(ours: Path, stock: Path) -> None:
    """Print how far the answers of two runs are apart, and how far those of one run with itself in other batches."""
    for path in sorted(ours.glob("answers-*.npz")):
        if not (stock / path.name).exists():
            continue
        a, b, rank = np.load(path), np.load(stock / path.name), path.stem.rpartition("-")[2]
        apart = np.abs(a["logprobs"] - b["logprobs"])
        itself = np.abs(b["logprobs"] - b["logprobs_alone"])
        same = a["tokens"] == b["tokens"]
        print(
            f"rank {rank}: log-probabilities of {apart.size} tokens differ by {apart.mean():.4f} (most {apart.max():.3f}), "
            f"vLLM alone with itself in other batches by {itself.mean():.4f} ({itself.max():.3f}); "
            f"spread {b['logprobs'].std():.3f}; first greedy token equal in {same[:, 0].mean():.0%} of prompts, "
            f"all {same.shape[1]} in {same.all(1).mean():.0%}"
        )


def show(folder: Path) -> None:
    """Print the times of rank 0."""
    for name, value in json.loads((folder / "times-0.json").read_text()).items():
        if isinstance(value, list):
            print(f"{name}:")
            for kernel, count, mean in value:
                print(f"    {count:5d} x {mean:9.1f} us = {count * mean / 1e3:8.2f} ms  {kernel[:100]}")
        else:
            print(f"{name:32s} {value:12,.2f}")


def start(options: argparse.Namespace, base: dict[str, str]) -> int:
    """All ranks, and the switches if there are some. Returns the first exit status that is not 0."""
    (options.output / "model").mkdir(parents=True, exist_ok=True)
    (options.output / "model" / "config.json").write_text(json.dumps(CONFIG | json.loads(options.config)))
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "INC_VLLM": options.implementation}
    port = 20_000 + 8 * (os.getpid() % 1000)  # below those that the kernel gives away while this run waits at a gate
    ours |= {"INC_JOB_ID": f"measure-{os.getpid()}", "MEASURE_PORT": str(port + 7)}
    spread = {"VLLM_DP_SIZE": str(options.ranks), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    parts = []
    for role in ("dispatch", "combine") if needs_switches(options) else ():
        command = [sys.executable, "-m", "inc_runtime", "switch", "--role", role, "--ranks", str(options.ranks)]
        with open(options.output / f"{role}.log", "w", encoding="utf-8") as log:
            parts.append(subprocess.Popen(command, env=base | ours, stdout=log, stderr=subprocess.STDOUT))
    ranks = []
    for rank in range(options.ranks):
        own = {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)} | spread if options.ranks > 1 else {}
        command = [sys.executable, "-m", "results.measure_vllm", *sys.argv[1:], "--rank", str(rank)]
        with open(options.output / f"rank-{rank}.log", "w", encoding="utf-8") as log:
            ranks.append(subprocess.Popen(command, env=base | ours | own, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + options.limit
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > deadline:
                return 124
            time.sleep(0.2)
        time.sleep(2.0)  # a rank that failed has peers that say why
        return next((rank.returncode for rank in ranks if rank.poll()), 0)
    finally:
        for part in [*ranks, *parts]:
            part.kill()
            part.wait()


def needs_switches(options: argparse.Namespace) -> bool:
    """Whether the implementation has switches: those of GPUs' plain all-to-all and the Baseline do not."""
    direct = options.implementation == "megakernel" and not options.on_cpu
    return options.implementation not in ("off", "baseline") and not direct


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementation", default="off", help="off: vLLM's own MoE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--against", type=Path, help="a folder of another run to compare with")
    parser.add_argument("--gate", type=Path, help="import vLLM, then wait until this file is there: for runs one after another")
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor CUDA graphs")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8192, help="vLLM's max_num_batched_tokens")
    parser.add_argument("--kv-gib", type=int, default=24)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds")
    parser.add_argument("--config", default="{}", help="JSON over the model's configuration")
    parser.add_argument("--dtype", default="bfloat16", help="float32: the answers that bfloat16 is measured against")
    parser.add_argument("--shares", type=int, default=1, help="with one rank: of how many ranks it holds the experts")
    parser.add_argument("--answers-only", action="store_true")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--rank", type=int, help="be this rank")
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options)
        sys.stdout.flush()
        os._exit(0)
    shares_gpus = needs_switches(options) and not options.on_cpu
    with private_daemon() if shares_gpus else contextlib.nullcontext(dict(os.environ)) as environment:
        status = start(options, environment)
    if status:
        for path in sorted(options.output.glob("*.log")):
            print(f"== {path}", *path.read_text(errors="replace").splitlines()[-40:], sep="\n")
        return status
    show(options.output)
    if options.against:
        compare(options.output, options.against)
    return 0


if __name__ == "__main__":
    sys.exit(main())
