"""The command `inc`: arguments in, jobs out. The one place that puts ranks, switches and layers together."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from inc_runtime import doctor
from inc_runtime.backends.host import check_processes, check_world
from inc_runtime.config import (
    OLMOE_1B_7B,
    CommunicationModel,
    Implementation,
    LayerShape,
    Pipeline,
    Router,
    SumOrder,
    check,
)
from inc_runtime.environment import Environment
from inc_runtime.errors import Aborted, ConfigurationError, IncError
from inc_runtime.job import JobPlan, run_pe, wait_for_all, wait_for_file
from inc_runtime.launch import join_rank_group, launch
from inc_runtime.one_sided import OneSided
from inc_runtime.protocol import World
from inc_runtime.simulator import command as simulator_command
from inc_runtime.simulator.event_mode import RolePrograms

if TYPE_CHECKING:
    from megakernel.workload import Workload

DEMO_CHECKPOINT = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "inc-moe"
SMALL = LayerShape(num_experts=16, top_k=4, hidden_size=256, intermediate_size=128)

DEMO_HELP = """\
Run the MoE layer of OLMoE-1B-7B on every implementation and communication model, check each against a float64 reference and
against transformers' own block, and print one table. Needs no GPU: four ranks and two switches run as six processes.
Without --checkpoint, a checkpoint of the same architecture with seeded random weights is written once and kept."""
RUN_HELP = """\
Run one implementation on one communication model, with the shape, the routing and the pipeline of your choice, on processes
(--backend host) or in the simulator's virtual time (--backend simulated). Example, ragged ranks, one of them empty:
  inc run --implementation megakernel_inc --ranks 3 --tokens 40,0,17 --microbatch 8 --experts 12 --top-k 3"""
REPRODUCE_HELP = """\
Run every part of the evaluation that this machine allows, with a bar, and write data, tables, figures and one page
(reproduction.html) into results/. Ctrl-C stops; the same command goes on at the step that was in progress. What this machine
cannot run is listed with the reason and the remedy."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `inc` and of `python -m inc_runtime`."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="inc",
        formatter_class=text,
        description="In-network-computing all-to-all for Mixture-of-Experts.\n"
        "demo and run also work directly under torchrun: torchrun --nproc-per-node 6 -m inc_runtime demo",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="the whole comparison on a laptop", description=DEMO_HELP, formatter_class=text)
    demo.add_argument("--small", action="store_true", help="a small model instead of OLMoE's real shape")
    demo.set_defaults(implementation=None, collective=None, backend="host")
    run = commands.add_parser("run", help="one implementation, any shape", description=RUN_HELP, formatter_class=text)
    _add_run_arguments(run)
    _add_job_arguments(demo, tokens="64", iterations=2)
    _add_job_arguments(run, tokens="32", iterations=5)
    make = commands.add_parser("make-checkpoint", help="write an OLMoE checkpoint with seeded random weights")
    make.add_argument("folder", type=Path, help="a folder that does not exist yet")
    make.add_argument("--layers", type=_count, default=2)
    make.add_argument("--seed", type=_seed, default=0)
    _add_shape_arguments(make, OLMOE_1B_7B)
    trace = commands.add_parser("trace", help="counters, picture and Perfetto file of a finished run")
    trace.add_argument("folder", type=Path, help="the folder of one case, such as out/demo/megakernel_inc-inc_all_to_all")
    simulate = commands.add_parser("simulate", help="what real switches would give, at any W and link speed")
    simulator_command.add_arguments(simulate)
    reproduce = commands.add_parser("reproduce", help="the whole evaluation", description=REPRODUCE_HELP, formatter_class=text)
    reproduce.add_argument("--list", action="store_true", help="show the steps, and which can run here, and stop")
    reproduce.add_argument("--only", nargs="*", metavar="STEP", help="these steps; without a name: only write the page anew")
    reproduce.add_argument("--again", action="store_true", help="also steps that are done; the page then compares both runs")
    reproduce.add_argument("--output", type=Path, metavar="FOLDER", help="default: results/ of the repository")
    doctor.add_arguments(commands.add_parser("doctor", help="what this machine can run, and what is missing"))
    _add_server_commands(commands, text)
    return parser


def _add_server_commands(commands, text: type[argparse.HelpFormatter]) -> None:
    from megakernel import serve
    from switch_emulator import switch_command

    switch = commands.add_parser(
        "switch", help="one switch of a server", description=switch_command.HELP, formatter_class=text
    )
    switch_command.add_arguments(switch)
    switch.set_defaults(serve=switch_command.run)
    served = commands.add_parser(
        "serve", help="serve a model through vLLM", description=serve.HELP, formatter_class=text, allow_abbrev=False
    )
    serve.add_arguments(served)
    served.set_defaults(serve=serve.run)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and {2**31 - 1}")
    return value


def _delay(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1,000,000 us")
    return value


def _add_shape_arguments(parser: argparse.ArgumentParser, shape: LayerShape) -> None:
    group = parser.add_argument_group("shape of the layer")
    group.add_argument("--experts", type=_count, default=shape.num_experts, help=f"E (default {shape.num_experts})")
    group.add_argument("--top-k", type=_count, default=shape.top_k, help=f"k (default {shape.top_k})")
    group.add_argument("--hidden", type=_count, default=shape.hidden_size, help=f"H (default {shape.hidden_size})")
    group.add_argument("--intermediate", type=_count, default=shape.intermediate_size, help="I")
    group.add_argument("--renormalize", action="store_true", help="scale the chosen weights of a token to sum to 1")
    group.add_argument("--router", choices=[r.value for r in Router], default=Router.SOFTMAX.value)


def _add_run_arguments(run: argparse.ArgumentParser) -> None:
    run.add_argument("--implementation", choices=[i.value for i in Implementation], default=Implementation.MEGAKERNEL_INC.value)
    run.add_argument("--collective", choices=[m.value for m in CommunicationModel], help="default: the implementation's own")
    run.add_argument("--backend", choices=["host", "simulated"], default="host")
    run.add_argument("--routing", choices=["uniform", "zipf", "hot-expert", "hot-rank"], default="uniform")
    run.add_argument("--seed", type=_seed, default=0)
    _add_shape_arguments(run, SMALL)


def _add_job_arguments(parser: argparse.ArgumentParser, *, tokens: str, iterations: int) -> None:
    group = parser.add_argument_group("job")
    group.add_argument("--checkpoint", type=Path, help="a Hugging Face OLMoE folder (safetensors, sharded or not)")
    group.add_argument("--layer", type=int, default=1, help="which MoE layer of the checkpoint (default 1)")
    group.add_argument("--ranks", type=_count, default=4, help="W, compute ranks (default 4)")
    group.add_argument("--dispatch-switches", type=_count, default=1, help="tokens are split between them (default 1)")
    group.add_argument("--combine-switches", type=_count, default=1, help="tokens are split between them (default 1)")
    group.add_argument("--tokens", default=tokens, help=f"of each rank, or one number per rank: 64,0,17,5 (default {tokens})")
    edge = "tokens of the first and last microbatch; sizes double from there to m_b (default: all m_b)"
    group.add_argument("--edge", type=_count, help=edge)
    group.add_argument("--microbatch", type=_count, default=16, help="m_b, tokens of a rank in a microbatch (default 16)")
    group.add_argument("--depth", type=_count, default=3, help="D, slot sets of the ring (default 3)")
    group.add_argument("--group", type=_count, default=1, help="G, ranks per phase of the phased forms (default 1)")
    group.add_argument("--no-barrier", action="store_true", help="no INC barrier after a phased dispatch")
    group.add_argument("--rank-order", action="store_true", help="switches add in rank order: sums do not depend on timing")
    group.add_argument("--row-groups", type=_count, metavar="N", help="the switch forwards groups of N tokens as they come")
    group.add_argument("--local-bypass", action="store_true", help="rows of a rank's own experts stay on it")
    group.add_argument("--iterations", type=_count, default=iterations, help=f"timed calls (default {iterations})")
    group.add_argument("--delay-us", type=_delay, default=0.0, help="random delays before each verb, to provoke races")
    group.add_argument("--output", type=Path, help="folder of results (default out/COMMAND)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the rows of the table there")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `inc`. Returns the exit status; errors of the runtime are one message, without a traceback."""
    parser = build_parser()
    options, others = parser.parse_known_args(arguments)
    options.vllm_options = others
    if options.vllm_options and options.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(options.vllm_options)}")
    try:
        if options.command in ("switch", "serve"):
            return options.serve(options)
        if options.command == "doctor":
            return doctor.run(options)
        if options.command == "simulate":
            return simulator_command.run(options, simulated_programs())
        if options.command == "reproduce":
            return run_reproduction(options)
        if options.command == "make-checkpoint":
            return make_checkpoint(options.folder, shape_of(options), options.layers, options.seed)
        if options.command == "trace":
            from inc_runtime.show_trace import show_trace

            return show_trace(options.folder)
        return run_job(options, sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("\ninc: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"inc: error: {error}. Give a place that can be read and written.", file=sys.stderr)
        return 2
    except IncError as error:
        line_break = "\n" if "RANK" in os.environ else ""  # under torchrun a progress bar may stand on the line
        kind = "" if isinstance(error, Aborted) else "error: "
        print(f"{line_break}inc: {kind}{error}", file=sys.stderr)
        return 3 if isinstance(error, Aborted) else 2


def run_reproduction(options: argparse.Namespace) -> int:
    """`inc reproduce`, whose measurements lie in the repository and not in an installed package."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "results" / "reproduce").is_dir():
        raise ConfigurationError("inc reproduce needs a clone of the repository: run make install there, then .venv/bin/inc.")
    sys.path.insert(0, str(root))
    from results.reproduce import command

    return command.run(options)


def simulated_programs() -> RolePrograms:
    """The programs of ranks and switches for the discrete-event mode."""
    from megakernel.simulated_layer import rank_threads
    from switch_emulator.run_switch import run_switch

    return RolePrograms(rank_threads, run_switch)


def shape_of(options: argparse.Namespace) -> LayerShape:
    """The layer shape that the options describe."""
    return LayerShape(
        options.experts, options.top_k, options.hidden, options.intermediate, Router(options.router), options.renormalize
    )


def make_checkpoint(folder: Path, shape: LayerShape, num_layers: int, seed: int = 0) -> int:
    """Write a checkpoint folder; with as many attention heads as the hidden size allows."""
    from megakernel.make_checkpoint import write_checkpoint

    heads = 16 if shape.hidden_size % 32 == 0 else 1
    write_checkpoint(folder, shape, num_layers=num_layers, num_attention_heads=heads, seed=seed)
    print(f"wrote {folder}", file=sys.stderr)
    return 0


def run_job(options: argparse.Namespace, arguments: list[str]) -> int:
    """demo and run: check, then start the processes, or be one of them."""
    options.output = options.output or Path("out") / options.command
    environment = Environment.read()
    if options.command == "demo" and not options.checkpoint:
        options.checkpoint = DEMO_CHECKPOINT / ("olmoe-small" if options.small else "olmoe-1b-7b-two-layers")
        if not options.checkpoint.exists() and environment.rank == 0:
            print(f"writing a checkpoint with random weights, once, to {options.checkpoint}", file=sys.stderr)
            try:
                make_checkpoint(options.checkpoint, SMALL if options.small else OLMOE_1B_7B, 2)
            except OSError:
                if not options.checkpoint.exists():  # else another demo was faster
                    raise
        wait_for_file(options.checkpoint, "rank 0", environment.start_limit_s)
    check_places(options)
    plan = plan_of(options, environment)
    if options.backend == "simulated":
        if environment.under_torchrun:
            raise ConfigurationError("backend = simulated runs all PEs in one process: start it without torchrun.")
        from megakernel.comparison_report import conclude_simulated

        return conclude_simulated(plan, workload_of(options, plan), options.json, switch_program(), options.seed)
    if environment.under_torchrun:
        check_processes(plan.world, environment)
        return be_a_pe(options, plan)
    status = launch(arguments, plan.world)
    if status:
        for unfinished in options.output.glob("job-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
    return status


def check_places(options: argparse.Namespace) -> None:
    """Refuse results that cannot be written, before anything runs. Raises ConfigurationError or OSError."""
    options.output.mkdir(parents=True, exist_ok=True)
    for folder in (options.output, *([options.json.parent] if options.json else [])):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ConfigurationError(f"{folder} cannot be written. Choose another folder.")
    if options.json and options.json.is_dir():
        raise ConfigurationError(f"json = {options.json} is a folder. Give the name of a file.")


def plan_of(options: argparse.Namespace, environment: Environment) -> JobPlan:
    """Everything that the PEs must agree on. Raises ConfigurationError before any process starts."""
    from megakernel.implementations import ALL_CASES, case_of

    try:
        counts = tuple(int(text) for text in options.tokens.split(","))
    except ValueError:
        raise ConfigurationError(f"tokens = {options.tokens!r}: it must be a number, or one per rank: 64,0,17,5.") from None
    counts = counts * options.ranks if len(counts) == 1 else counts
    if len(counts) != options.ranks or min(counts) < 0:
        raise ConfigurationError(
            f"tokens = {options.tokens!r}: give one number for all, or {options.ranks} (one per rank), none below 0."
        )
    pipeline = Pipeline(
        max(*counts, 1),
        options.microbatch,
        options.depth,
        options.group,
        not options.no_barrier,
        SumOrder.RANK if options.rank_order else SumOrder.ARRIVAL,
        edge_tokens=options.edge,
        local_bypass=options.local_bypass,
        row_group_tokens=options.row_groups,
    )
    if options.checkpoint:
        from megakernel.checkpoint import CheckpointReader, read_layer_shape

        shape = read_layer_shape(options.checkpoint)
        with CheckpointReader(options.checkpoint) as reader:
            reader.require_layer(options.layer)
            reader.require_experts(options.layer, shape.num_experts)
    else:
        shape = shape_of(options)
    world = World(options.ranks, options.dispatch_switches, options.combine_switches)
    check_world(world)
    check(shape, pipeline, world.num_ranks)
    everything = [case for case in ALL_CASES if case.model.selective or not options.local_bypass]
    cases = everything if options.implementation is None else [case_of(options.implementation, options.collective)]
    named = tuple((case.name, case.model, case.needs_heap) for case in cases)
    return JobPlan(shape, pipeline, world, counts, named, options.output, options.delay_us)


def workload_of(options: argparse.Namespace, plan: JobPlan) -> Workload:
    """Tokens and experts of the job: from a checkpoint and text, or random."""
    from megakernel.workload import RandomWorkload, Routing, TextWorkload

    if options.checkpoint:
        return TextWorkload(options.checkpoint, options.layer)
    return RandomWorkload(plan.shape, Routing(options.routing), options.seed)


def switch_program() -> Callable[[OneSided], None]:
    """What a switch PE of the job runs."""
    from switch_emulator.run_switch import run_switch

    return run_switch


def be_a_pe(options: argparse.Namespace, plan: JobPlan) -> int:
    """One process of the torchrun job: a rank runs every case, a switch serves every case that needs a heap."""
    environment = Environment.read()
    rank = environment.rank
    if rank >= plan.world.num_ranks:
        run_pe(
            plan,
            prepare=lambda path: None,
            run_rank_case=lambda name, pe, folder: None,
            run_switch_case=switch_program(),
            on_case=lambda name: None,
        )
        return 0
    from tqdm import tqdm

    from megakernel.comparison import rank_runner
    from megakernel.comparison_report import conclude

    join_rank_group(environment, plan.world.num_ranks)
    bar = tqdm(total=len(plan.cases) + 1, disable=rank != 0, desc="preparing tokens and references", leave=False)
    run_case = rank_runner(plan, workload_of(options, plan), rank, options.iterations)

    def on_case(name: str) -> None:
        bar.update()
        bar.set_description(name)

    folder = run_pe(
        plan,
        prepare=lambda path: workload_of(options, plan).prepare(path, sum(plan.tokens_of_rank), plan.world.num_ranks),
        run_rank_case=run_case,
        run_switch_case=lambda pe: None,
        on_case=on_case,
    )
    if rank == 0:
        wait_for_all(plan, folder)
        bar.close()
        conclude(plan, folder, options.json, switch_program())
    return 0
