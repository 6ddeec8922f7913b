"""Requests to a server with the OpenAI API, by the standard library alone."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def complete(address: str, model: str, prompt: str, *, max_tokens: int = 16, timeout: float = 300.0) -> dict:
    """One greedy completion: its tokens, as vLLM writes token ids, and the sum of their log-probabilities.

    Raises: urllib.error.HTTPError for an answer that is an error, OSError for none.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        logprobs = json.load(answer)["choices"][0]["logprobs"]
    tokens = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
    return {"tokens": tokens, "logprob": sum(logprobs["token_logprobs"])}


def complete_all(address: str, model: str, prompts: list[str], at_once: int = 8) -> list[dict]:
    """All prompts, several at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: complete(address, model, prompt), prompts))
