"""Generate greedily from a list of prompts with vLLM's offline engine in one process, and write tokens as JSON.

    python -m tests.serving.generate MODEL PROMPTS OUTPUT [vLLM engine arguments as JSON]

With `prompt_logprobs` among those, answers also have the log-probability of each token of the prompt but the first.

The environment says everything else: INC_VLLM and the job for our runtime, VLLM_DP_RANK and its companions for data parallel.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path


def main(model: str, prompts: str, output: str, more: str = "{}") -> None:
    """Run one rank's share: with data parallel, every DP_SIZE-th prompt."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    from vllm import LLM, SamplingParams

    # vLLM 0.27's own MoE refuses float32 on a processor with AMX, in favour of a kernel for bfloat16.
    torch.cpu._is_amx_tile_supported = lambda: False

    rank, size = int(os.environ.get("VLLM_DP_RANK", 0)), int(os.environ.get("VLLM_DP_SIZE", 1))
    own = json.loads(Path(prompts).read_text())[rank::size]
    arguments = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 8, "seed": 0}
    arguments |= json.loads(more)
    prompt_logprobs = arguments.pop("prompt_logprobs", None)
    engine = LLM(model, **arguments)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1, prompt_logprobs=prompt_logprobs
    )
    results = engine.generate(own, sampling, use_tqdm=False)
    if not arguments.get("disable_log_stats", True):
        preempted = sum(each.value for each in engine.get_metrics() if each.name == "vllm:num_preemptions")
        print(f"preempted requests: {preempted}")
    answers = [
        {
            "tokens": chosen,
            "logprob": float(result.outputs[0].cumulative_logprob),
            "logprobs": [step[token].logprob for token, step in zip(chosen, result.outputs[0].logprobs, strict=True)],
            "prompt_logprobs": [
                step[token].logprob
                for token, step in zip(result.prompt_token_ids, result.prompt_logprobs or [], strict=False)
                if step is not None
            ],
        }
        for result in results
        for chosen in [list(result.outputs[0].token_ids)]
    ]
    Path(output).write_text(json.dumps(answers))


def leave(status: list[int]) -> None:
    """End at once: the interpreter would take apart all that vLLM imported, which takes as long as the answers did."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status[0])


if __name__ == "__main__":
    exit_status = [1]
    atexit.register(leave, exit_status)  # the first to register, the last to run
    main(*sys.argv[1:])
    exit_status[0] = 0
