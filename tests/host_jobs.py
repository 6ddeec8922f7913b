"""Jobs of several processes on the host backend, for the integration tests: `python -m tests.host_jobs JOB FOLDER ...`.

`launch` starts one PE per process without an agent, so that what each survivor of a crash does can be seen; `torchrun` starts
them as users do. A PE that is content leaves `FOLDER/ok-PE`.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from inc_runtime.backends.host import HostPe
from inc_runtime.config import CommunicationModel, LayerShape, Pipeline, Router, SumOrder
from inc_runtime.environment import Environment
from inc_runtime.protocol import World
from switch_emulator.run_switch import run_switch

ROOT = Path(__file__).parent.parent
SHAPE = LayerShape(5, 3, 16, 8)
OTHER_SHAPE = LayerShape(4, 2, 16, 24, Router.SIGMOID, renormalize=True)
PIPELINE = Pipeline(10, 2, 2, 2)
NUM_TOKENS = [10, 0, 7]
LIMIT_S = 3.0


@cache
def shared_memory() -> str:
    """A folder for the heaps of test jobs, apart from those of other jobs of this user. Only the launching process makes it."""
    folder = tempfile.mkdtemp(prefix="inc-tests-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def settings(**more: str) -> dict[str, str]:
    """The environment of a test job: one thread, a short limit, nothing inherited from an agent."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "INC_"))}
    fixed = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "INC_WAIT_LIMIT_S": str(LIMIT_S), "INC_START_LIMIT_S": "60"}
    return {**kept, **fixed, "PYTHONPATH": str(ROOT), "INC_SHARED_MEMORY_FOLDER": shared_memory(), **more}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(num_pes: int, arguments: Sequence[str], folder: Path, **more: str) -> list[subprocess.Popen]:
    """One process per PE; its stderr goes to `folder/stderr-PE`."""
    port = str(free_port())
    processes = []
    for pe in range(num_pes):
        world = {"RANK": str(pe), "WORLD_SIZE": str(num_pes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with open(folder / f"stderr-{pe}", "w") as stderr:
            command = [sys.executable, "-m", "tests.host_jobs", *arguments]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=settings(**world, **more), stderr=stderr))
    return processes


def torchrun(num_pes: int, arguments: Sequence[str], **more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_pes)]
    command += ["--master-port", str(free_port()), "-m", "tests.host_jobs", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=settings(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """Poll until true. Returns the seconds it took. Raises AssertionError with `what` at the limit."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"waited {limit_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - start


def shared_memory_left() -> list[str]:
    return [path.name for path in Path(shared_memory()).iterdir()]


# What the processes run -------------------------------------------------------------------------------------------------------


def layer_inputs(number: int, shape: LayerShape, num_tokens: Sequence[int]):
    """Call `number` of a job, the same in every process: one LayerInput per rank; odd calls bring router logits."""
    from megakernel.fused_layer import LayerInput
    from tests.routings import draw_call
    from tests.simulate import random_tokens

    rng = np.random.default_rng(number)
    if number % 2 == 0:
        return draw_call(rng, shape, num_tokens, "minus_one_anywhere", len(num_tokens))
    return [
        LayerInput(
            shape,
            random_tokens(rng, count, shape.hidden_size),
            logits=rng.standard_normal((count, shape.num_experts)).astype(np.float32),
            bias=np.linspace(-1, 1, shape.num_experts, dtype=np.float32) if shape.router is Router.SIGMOID else None,
        )
        for count in num_tokens
    ]


def make_layer(shape: LayerShape, pipeline: Pipeline, implementation, backend, rank: int, num_ranks: int, **more):
    from megakernel.checkpoint import ExpertWeights
    from megakernel.moe_layer import MoELayer
    from tests.routings import layer_of

    own = layer_of(shape).experts_of(rank, num_ranks)
    weights = ExpertWeights(shape.experts_of_rank(rank, num_ranks), own.gate_up.bfloat16(), own.down.bfloat16())
    return MoELayer(shape, pipeline, implementation, backend, weights, **more)


def call_layer(layer, given):
    """Call a MoELayer with one LayerInput; ids go in as int64, transposed twice, so that they are not contiguous."""
    import torch

    from megakernel.experts import bf16_from_numpy, bf16_to_numpy

    tokens = bf16_from_numpy(given.tokens)
    if given.logits is not None:
        return bf16_to_numpy(layer(tokens, torch.from_numpy(given.logits)))
    ids = torch.from_numpy(np.asfortranarray(given.expert_ids.astype(np.int64)))
    return bf16_to_numpy(layer(tokens, expert_ids=ids, weights=torch.from_numpy(given.weights)))


def check_layers(rank: int, num_ranks: int, make: Callable, where: str) -> list[np.ndarray]:
    """Four calls of two layers in turn on one backend, each against the reference, as this rank sees it."""
    from tests.expected import check_outputs
    from tests.routings import layer_of

    outputs = []
    shapes = (SHAPE, OTHER_SHAPE)
    bias = np.linspace(-1, 1, OTHER_SHAPE.num_experts, dtype=np.float32)
    layers = [make(SHAPE), make(OTHER_SHAPE, bias)]
    for number in range(4):
        turn = number // 2
        shape, layer = shapes[turn], layers[turn]
        given = layer_inputs(number, shape, NUM_TOKENS[:num_ranks])[rank]
        outputs.append(call_layer(layer, given))
        check_outputs(layer_of(shape), [given], [outputs[-1]], f"{where}, rank {rank}, call {number}")
    return outputs


def models_of(world: World) -> list[CommunicationModel]:
    """The models that a world can run: without switches only the plain ones."""
    return [m for m in CommunicationModel if world.num_pes > world.num_ranks or not (m.in_network or m.phased)]


def run_models(folder: Path, num_ranks: int, dispatch_switches: int, combine_switches: int) -> None:
    """Every model with delays over poisoned memory, then the Baseline over gloo with both of its models."""
    environment = Environment.read()
    rank = environment.rank
    world = {"num_dispatch_switches": dispatch_switches, "num_combine_switches": combine_switches}
    is_rank = rank < num_ranks
    pipeline = replace(PIPELINE, ranks_per_phase=min(2, num_ranks))
    for number, model in enumerate(models_of(World(num_ranks, dispatch_switches, combine_switches))):
        barrier = number % 2 == 0
        carried = replace(pipeline, barrier_after_dispatch=barrier, sum_order=SumOrder.RANK)
        widest = replace(SHAPE, top_k=max(SHAPE.top_k, OTHER_SHAPE.top_k))
        with HostPe.join(
            widest, carried, model, num_ranks=num_ranks, **world, poison=True, delay_us=500.0, seed=number, traced=True
        ) as pe:
            if not is_rank:
                run_switch(pe)
                continue
            if number == 0:
                refuse_bad_inputs(pe, carried, num_ranks)
            make = layer_maker(carried, pe, model, rank, num_ranks)
            outputs = check_layers(rank, num_ranks, make, model.value)
            np.savez(folder / f"{model.value}-{rank}.npz", *(output.view(np.uint16) for output in outputs))
            assert any(event.kind == "wait" for event in pe.trace.events)
    if is_rank:
        run_baseline_models(folder, environment, num_ranks, pipeline)


def layer_maker(pipeline: Pipeline, backend, model: CommunicationModel, rank: int, num_ranks: int, baseline: bool = False):
    import torch

    from inc_runtime.config import Implementation
    from megakernel.implementations import MODELS_OF

    kinds = [i for i in Implementation if model in MODELS_OF[i] and (i is Implementation.BASELINE) == baseline]

    def make(shape: LayerShape, bias: np.ndarray | None = None):
        more = {"model": model} if baseline else {}
        given_bias = None if bias is None else torch.from_numpy(bias)
        return make_layer(shape, pipeline, kinds[0], backend, rank, num_ranks, bias=given_bias, **more)

    return make


def run_baseline_models(folder: Path, environment: Environment, num_ranks: int, pipeline: Pipeline) -> None:
    import torch.distributed as dist

    from inc_runtime.launch import join_rank_group
    from inc_runtime.op_trace import count

    group = join_rank_group(environment, num_ranks)
    for model in (CommunicationModel.ALL_TO_ALL, CommunicationModel.ALL_GATHER_REDUCE_SCATTER):
        made = []
        make = layer_maker(pipeline, group, model, environment.rank, num_ranks, baseline=True)

        def keep(*arguments, make=make, made=made):
            made.append(make(*arguments))
            return made[-1]

        outputs = check_layers(environment.rank, num_ranks, keep, f"baseline {model.value}")
        np.savez(folder / f"baseline-{model.value}-{environment.rank}.npz", *(output.view(np.uint16) for output in outputs))
        seen = count([event for layer in made for event in layer.trace.events], World(num_ranks))
        assert seen.dispatch_packets == seen.combine_packets == 4 * 2 * num_ranks, "W messages in and out for each call"
    dist.destroy_process_group()


def refuse_bad_inputs(pe: HostPe, pipeline: Pipeline, num_ranks: int) -> None:
    """Inputs that cannot be right, on one rank alone: each is refused with its value and limit, and not a verb is issued."""
    import torch

    from inc_runtime.config import Implementation, Router
    from inc_runtime.errors import ConfigurationError
    from megakernel.checkpoint import ExpertWeights
    from megakernel.moe_layer import MoELayer

    plain = Implementation.MEGAKERNEL
    layer = make_layer(SHAPE, pipeline, plain, pe, pe.pe, num_ranks)
    hidden, logits = torch.randn(4, 16).bfloat16(), torch.randn(4, 5)
    ids, weights = torch.randint(0, 5, (4, 3)), torch.rand(4, 3)
    nan = logits.clone()
    nan[1, 2] = float("nan")
    out_of_range, too_low = ids.clone(), ids.clone()
    out_of_range[3, 1], too_low[0, 0] = 5, -2
    own = make_layer(SHAPE, pipeline, plain, pe, pe.pe, num_ranks)._experts
    own_range = SHAPE.experts_of_rank(pe.pe, num_ranks)
    short = ExpertWeights(own_range, own.gate_up[:, :-1], own.down)
    of_another = ExpertWeights(range(own_range.start + 1, own_range.stop + 1), own.gate_up, own.down)

    def chosen(expert_ids=ids, weights=weights, **more):
        return layer(hidden, expert_ids=expert_ids, weights=weights, **more)

    def made(shape=SHAPE, pipeline=pipeline, implementation=plain, backend=pe, **more):
        return make_layer(shape, pipeline, implementation, backend, pe.pe, num_ranks, **more)

    cases: list[tuple[str, Callable]] = [
        (r"router_logits\[1, 2\] = nan", lambda: layer(hidden, nan)),
        (r"expert_ids\[3, 1\] = 5, expected -1 to 4", lambda: chosen(out_of_range)),
        (r"expert_ids\[0, 0\] = -2, expected -1 to 4", lambda: chosen(too_low)),
        ("expert_ids has dtype float32", lambda: chosen(ids.float())),
        ("expert_ids has shape", lambda: chosen(ids[:3])),
        ("weights has shape", lambda: chosen(weights=weights[:, :2])),
        ("torch.float32, expected torch.bfloat16", lambda: layer(hidden.float(), logits)),
        (r"hidden_states has shape \(4, 8\)", lambda: layer(hidden[:, :8], logits)),
        ("hidden_states is on meta", lambda: layer(hidden.to("meta"), logits)),
        (r"router_logits has shape \(4, 4\)", lambda: layer(hidden, logits[:, :4])),
        ("router_logits has 3 rows, but hidden_states has 4 tokens", lambda: layer(hidden, logits[:3])),
        (
            "11 tokens, at most bound_tokens = 10",
            lambda: layer(torch.zeros(11, 16, dtype=torch.bfloat16), torch.zeros(11, 5)),
        ),
        ("not both", lambda: layer(hidden, logits, expert_ids=ids, weights=weights)),
        ("both expert_ids and weights", lambda: layer(hidden, expert_ids=ids)),
        ("out is", lambda: layer(hidden, logits, out=torch.empty(4, 16))),
        ("experts are", lambda: MoELayer(SHAPE, pipeline, plain, pe, of_another)),
        ("the heap's model", lambda: made(implementation=Implementation.BASELINE)),
        ("only the sigmoid router", lambda: made(bias=torch.zeros(5))),
        ("experts.gate_up has shape", lambda: MoELayer(SHAPE, pipeline, plain, pe, short)),
        ("hidden_size = 24: the heap was made for 16", lambda: made(replace(SHAPE, hidden_size=24))),
        ("top_k = 4: the heap was made for 3 at most", lambda: made(replace(SHAPE, top_k=4))),
        ("depth = 3: the heap was made for 2", lambda: made(pipeline=replace(pipeline, depth=3))),
        ("microbatch_tokens = 5", lambda: made(pipeline=replace(pipeline, microbatch_tokens=5))),
        ("its communication model must be inc_all_to_all", lambda: made(implementation=Implementation.MEGAKERNEL_INC)),
        ("needs a symmetric heap", lambda: made(backend=None)),
        ("bias must be 5 finite numbers", lambda: made(replace(SHAPE, router=Router.SIGMOID), bias=torch.zeros(4))),
    ]
    import re

    before = len(pe.trace.events)
    for message, attempt in cases:
        try:
            attempt()
        except ConfigurationError as refusal:
            assert re.search(message, str(refusal)), f"expected {message!r}, got: {refusal}"
        else:
            raise AssertionError(f"nothing refused what should give {message!r}")
    assert len(pe.trace.events) == before, "a refused input must send nothing"


def run_forever(folder: Path, model: CommunicationModel, num_ranks: int, fail_in_rank: int) -> None:
    """Call a layer again and again until something ends the job; a PE at work leaves `running-PE`.

    Everything is imported before the job begins: the first call may not take longer than the limit.
    """
    if Environment.read().rank < num_ranks:
        given = layer_inputs(0, SHAPE, NUM_TOKENS[:num_ranks])[Environment.read().rank]
        importlib.import_module("megakernel.moe_layer")
    with HostPe.join(SHAPE, PIPELINE, model, num_ranks=num_ranks) as pe:
        if pe.is_switch:
            (folder / f"running-{pe.pe}").touch()
            run_switch(pe)
            return
        make = layer_maker(PIPELINE, pe, model, pe.pe, num_ranks)
        layer = make(SHAPE)
        for number in range(10_000_000):
            call_layer(layer, given)
            if number == 3:
                (folder / f"running-{pe.pe}").touch()
            if number > 20 and pe.pe == fail_in_rank:
                raise ValueError("the user's own mistake")


def main() -> None:
    job, folder, *more = sys.argv[1:]
    if job == "models":
        run_models(Path(folder), *map(int, more))
    else:
        run_forever(Path(folder), CommunicationModel(more[0]), int(more[1]), int(more[2]) if len(more) > 2 else -1)
    (Path(folder) / f"ok-{Environment.read().rank}").touch()


if __name__ == "__main__":
    main()
