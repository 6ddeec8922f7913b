"""The command `inc simulate`: one scenario, a sweep, or a calibration. `inc_runtime/cli.py` mounts it and brings the programs."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from inc_runtime.errors import ConfigurationError
from inc_runtime.op_trace import write_perfetto
from inc_runtime.simulator.calibration import load_calibration, save_calibration
from inc_runtime.simulator.event_mode import LayerResult, RolePrograms, simulate_layer
from inc_runtime.simulator.fast_mode import simulate_fast
from inc_runtime.simulator.fit import calibrate
from inc_runtime.simulator.models import PUBLIC_MODELS
from inc_runtime.simulator.output import result_rows, write_rows
from inc_runtime.simulator.plan import LayerPlan
from inc_runtime.simulator.scenario_file import EXAMPLE, load_scenario, parse_scenario, tomllib

DESCRIPTION = """\
Simulate one MoE layer on a network that you describe: real in-network-computing switches, emulated ones, one level or two,
any link, up to 1,024 ranks. The event mode executes the project's own role programs on a virtual clock; the fast mode solves
the same recurrences in milliseconds. Every number is simulated, and names the calibration that it rests on.

  inc simulate --example > layer.toml                          a commented scenario file
  inc simulate layer.toml                                      layer time, busy units, counters
  inc simulate layer.toml --set ranks.num_ranks=64             change a value without editing
  inc simulate layer.toml --sweep network.port_gbps=25,50,100 --sweep implementation.name=megakernel,megakernel_inc
  inc simulate layer.toml --trace layer.json                   a timeline for ui.perfetto.dev
  inc simulate --calibrate results/data/*.csv --output mine.json --name mine
  inc simulate layer.toml --calibration mine.json

A fit to layers also leaves out each implementation, and each placement, in turn: the table says how well the others predict
it. `make calibrate` fits to all that the project has measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `inc simulate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    parser.add_argument("scenario", nargs="?", type=Path, help="a scenario file (TOML); without one, the example's values")
    parser.add_argument("--example", action="store_true", help="print a commented scenario file and stop")
    parser.add_argument("--models", action="store_true", help="print the shapes of public models and stop")
    parser.add_argument("--mode", choices=["event", "fast"], default="event", help="event executes the programs (default)")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="a value that wins over the file")
    parser.add_argument("--sweep", action="append", default=[], metavar="TABLE.KEY=V1,V2", help="all combinations of such lists")
    parser.add_argument("--calibration", type=Path, metavar="NAME", help="a file, or published_h200 (default) or two_h200")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="event mode: write a Perfetto timeline of a single scenario")
    parser.add_argument("--output", type=Path, metavar="FILE", help="results as CSV; with --calibrate, the calibration as JSON")
    group = parser.add_argument_group("calibration")
    group.add_argument("--calibrate", nargs="+", type=Path, metavar="DATA", help="fit to data files of measurements")
    group.add_argument("--name", default="fitted", help="name of the calibration (default fitted)")
    group.add_argument("--unseen-implementation", metavar="NAME", help="keep its points out of the fit, and predict them")
    group.add_argument("--unseen-placement", metavar="NAME", help="keep its points out of the fit, and predict them")
    group.add_argument("--table", type=Path, metavar="FILE", help="write predicted against measured as Markdown")


def run(options: argparse.Namespace, programs: RolePrograms) -> int:
    """Run `inc simulate`. Returns the exit status. Raises IncError, which the caller prints."""
    if options.example:
        print(EXAMPLE, end="")
        return 0
    if options.models:
        print(models_table(), end="")
        return 0
    for path in filter(None, (options.output, options.trace, options.table)):
        if not path.parent.is_dir():
            raise ConfigurationError(f"{path}: there is no folder {path.parent}. Create it, or name another.")
    if options.calibrate:
        return _calibrate(options)
    if options.table or options.unseen_implementation or options.unseen_placement:
        raise ConfigurationError("--table and --unseen-... belong to --calibrate DATA. Add it, or drop them.")
    fixed = dict(_value_of(text) for text in options.set)
    axes = [_values_of(text) for text in options.sweep]
    calibration = load_calibration(options.calibration)
    plans = []
    for combination in itertools.product(*[[(key, value) for value in values] for key, values in axes]):
        values = fixed | dict(combination)
        file = options.scenario
        scenario = load_scenario(file, values) if file else parse_scenario(EXAMPLE, "example", overrides=values)
        plans.append(LayerPlan(scenario, calibration))
    if options.trace and (len(plans) > 1 or options.mode != "event"):
        raise ConfigurationError("--trace needs a single scenario in event mode. Drop --sweep and --mode fast.")
    bar = tqdm(plans, "scenarios", delay=3, disable=len(plans) < 2, file=sys.stderr)
    results = [_run_one(plan, options, programs) for plan in bar]
    print(results_table(results, [key for key, _ in axes]), end="")
    if options.output:
        rows = [row for result in results for row in result_rows(result)]
        write_rows(options.output, rows, f"inc simulate {shlex.join(sys.argv[2:])}")
    if options.trace:
        write_perfetto(options.trace, results[0].events, results[0].plan.scenario.world)
        print(f"wrote {options.trace}: open it in ui.perfetto.dev", file=sys.stderr)
    return 0


def _run_one(plan: LayerPlan, options: argparse.Namespace, programs: RolePrograms) -> LayerResult:
    if options.mode == "fast":
        return simulate_fast(plan)
    with tqdm(total=plan.num_microbatches, desc="microbatches", delay=3, leave=False, file=sys.stderr) as bar:
        return simulate_layer(plan, programs, traced=bool(options.trace), progress=bar.update)


def _value_of(text: str) -> tuple[str, Any]:
    key, values = _values_of(text)
    return key, values[0]


def _values_of(text: str) -> tuple[str, list[Any]]:
    """`table.key=1,2` to the key and its values, each read as TOML, or as a word."""
    key, equals, values = text.partition("=")
    if not equals or not values or not key.strip():
        raise ConfigurationError(f"{text!r}: it must be TABLE.KEY=VALUE, such as ranks.num_ranks=64.")
    return key.strip(), [_toml_value(value) for value in values.split(",")]


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def results_table(results: list[LayerResult], keys: list[str]) -> str:
    """One line per result; for a single one, also what is busy and the counters."""
    first = results[0].plan
    lines = [f"source: simulated, calibration: {first.machine.name} ({first.machine.source})"]
    if error := max(result.tested_error for result in results):
        lines.append(f"fast mode and aggregated flows: within {error:.1%} of event mode, packet by packet, where both were run")
    lines += [f"{'scenario':28}{'implementation':24}{'W':>6}{'N':>8}{'m_b':>7}{'GB/s':>8}{'mode':>18}{'layer us':>12}  busiest"]
    for result in results:
        scenario = result.plan.scenario
        text = f"{scenario.name[:27]:28}{scenario.implementation.value:24}{scenario.num_ranks:6}{scenario.tokens_per_rank:8}"
        text += f"{scenario.pipeline.microbatch_tokens:7}{result.plan.share.port_gbps:8.0f}"
        text += f"{result.mode:>18}{result.layer_time_us:12.1f}"
        lines.append(f"{text}  {result.busiest} {result.busy[result.busiest]:.0%}")
    if len(results) == 1:
        lines += ["", "busy share of the busiest of each kind:"]
        lines += [f"  {unit:18}{share:7.1%}" for unit, share in results[0].busy.items()]
        memory = results[0].plan.scenario.switch_row_bytes() / 2**20
        lines.append(f"rows that a switch holds: {memory:.1f} MiB")
        if results[0].counters is not None:
            lines.append("counters of the layer (rows and bytes: of the rank with most):")
            lines += [f"  {name:26}{value:>16,}" for name, value in vars(results[0].counters).items()]
    return "\n".join(lines) + "\n"


def models_table() -> str:
    """The shapes of the public models, a line each."""
    lines = [f"{'name':18}{'E':>5}{'k':>4}{'H':>7}{'I':>7}{'MoE layers':>12}{'shared':>8}  configuration"]
    for model in PUBLIC_MODELS.values():
        shape = model.shape
        sizes = f"{shape.num_experts:5}{shape.top_k:4}{shape.hidden_size:7}{shape.intermediate_size:7}"
        lines.append(f"{model.name:18}{sizes}{model.num_moe_layers:12}{model.num_shared_experts:8}  {model.configuration}")
    return "\n".join(lines) + "\n"


def _calibrate(options: argparse.Namespace) -> int:
    start = load_calibration(options.calibration)
    with tqdm(desc="evaluations of the model", delay=3, file=sys.stderr) as bar:
        fit = calibrate(
            options.calibrate,
            options.name,
            dataclasses.replace(start, fit={}, data_files=()),
            unseen_implementation=options.unseen_implementation,
            unseen_placement=options.unseen_placement,
            progress=bar.update,
        )
    print(fit.table, end="")
    for name, value in fit.calibration.fit.items():
        print(f"{name}: {value:.4g}")
    if options.table:
        options.table.write_text(fit.table, encoding="utf-8")
    if options.output:
        save_calibration(fit.calibration, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0
