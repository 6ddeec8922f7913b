"""`inc reproduce` with small steps: interrupted and resumed, failing, hanging, on machines that lack what a step needs."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shlex
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from inc_runtime.cli import build_parser
from inc_runtime.doctor import Report, judge
from inc_runtime.errors import ConfigurationError
from inc_runtime.machine import Gpu, Machine, Mps, Nvcc, SharedMemory, Torch
from inc_runtime.placement import plan_placements
from inc_runtime.protocol import World
from results.data_files import NAME, SIMULATED_NAME
from results.reproduce import command, processes, runner
from results.reproduce.runner import Places, final_name
from results.reproduce.state import INTERRUPTED, Key, State
from results.reproduce.steps import STEPS, Need, Step

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors"), "1")
GPU_PACKAGES = PACKAGES | dict.fromkeys(("nvidia-nvshmem-cu13", "nvshmem4py-cu13", "cuda-core"), "1")
SHARED = SharedMemory(free_bytes=1 << 40)
LAPTOP = Machine("3.12", "Linux", "x86_64", 8, 1 << 40, SHARED, PACKAGES, Torch("2.11", "", True), gpu_problem="no nvidia-smi")
H200 = Gpu(0, "NVIDIA H200", (9, 0), 1 << 37)
TWO_GPUS = replace(
    LAPTOP,
    torch=Torch("2.11", "13.0", True),
    packages=GPU_PACKAGES,
    gpus=(H200, replace(H200, index=1)),
    nvlinks=frozenset({(0, 1)}),
    mps=Mps("/usr/bin/nvidia-cuda-mps-control"),
    nvcc=Nvcc("/usr/bin/nvcc", "13.0", True),
    gpu_backend=True,
)
WRITE = """\
import pathlib, sys, time
folder, name, commit, log, *more = sys.argv[1:]
with open(log, "a") as file:
    file.write(name + "\\n")
if "fails" in more:
    sys.exit("the switch is on fire")
if "hangs" in more and not pathlib.Path(log + ".hung").exists():
    pathlib.Path(log + ".hung").touch()
    time.sleep(60)
path = pathlib.Path(folder, f"moe_layer_host_{commit}_{name}.csv")
path.write_text(f'''# date: 2026-11-29
# device: a test; placement: host
# commit: {commit}
# command: write {folder}/x
measurement,source,placement,implementation,num_ranks,num_tokens,microbatch_tokens,metric,value,unit,collective
{"collectives" if "foreign" in more else "moe_layer"},measured_host,host,megakernel,4,64,16,packets,64,packets,all_to_all
moe_layer,measured_host,host,megakernel,4,64,16,layer_time,{len(open(log).readlines())},us,all_to_all
''')
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A place for small steps: `step(name, *how)` makes one, `run(steps, ...)` runs, `log()` says which programs ran."""
    (tmp_path / "write.py").write_text(WRITE)
    log = tmp_path / "log"

    def step(name: str, *how: str, need: Need = Need.NOTHING) -> Step:
        words = ["{python}", str(tmp_path / "write.py"), "{folder}", name, "{commit}", str(log), *how]
        return Step(name, f"the part {name}", need, 1.0, (shlex.join(words),), (f"moe_layer_host_{{commit}}_{name}.csv",))

    def run(steps, *arguments: str, machine: Machine = LAPTOP) -> int:
        world = World(4)
        report = Report(world, judge(machine, world), plan_placements(machine, world), len(machine.gpus))
        monkeypatch.setattr(command, "examine", lambda: (machine, report))
        options = build_parser().parse_args(["reproduce", "--output", str(tmp_path / "out"), *arguments])
        return command.run(options, steps)

    bench = argparse.Namespace(step=step, run=run, out=tmp_path / "out", hung=tmp_path / "log.hung")
    bench.log = lambda: log.read_text().split()
    bench.state = lambda: json.loads(next(bench.out.glob("run/state_*.json")).read_text())["steps"]
    bench.page = lambda: (bench.out / "reproduction.html").read_text(encoding="utf-8")
    return bench


def interrupt_when(marker: Path, number: int) -> None:
    def wait() -> None:
        while not marker.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_at_the_step_in_progress(bench, capfd, number):
    steps = [bench.step("first"), bench.step("second", "hangs"), bench.step("third")]
    interrupt_when(bench.hung, number)
    assert bench.run(steps) == 130
    assert "stopped after 1 of 3 steps" in capfd.readouterr().err
    assert bench.state()["second"]["status"] == INTERRUPTED and not (bench.out / "reproduction.html").exists()
    assert not list(bench.out.rglob("*second.csv")), "an unfinished step leaves nothing in the results"
    assert bench.run(steps) == 0
    assert bench.log() == ["first", "second", "second", "third"]
    assert {path.stem.rpartition("_")[2] for path in (bench.out / "data").iterdir()} == {"first", "second", "third"}
    assert bench.run(steps) == 0 and len(bench.log()) == 4, "a third run has nothing to do"


def test_a_command_that_goes_on_finds_what_it_had_left(bench, tmp_path):
    program = tmp_path / "counts.py"
    program.write_text(
        "import pathlib, sys, time\n"
        "path = pathlib.Path(sys.argv[1], 'points.md')\n"
        "path.write_text((path.read_text() if path.exists() else '') + 'point\\n')\n"
        f"if not pathlib.Path({str(bench.hung)!r}).exists():\n"
        f"    pathlib.Path({str(bench.hung)!r}).touch()\n"
        "    time.sleep(60)\n"
    )
    for goes_on in (True, False):
        bench.hung.unlink(missing_ok=True)
        line = f"{{python}} {program} {{folder}}"
        step = Step(f"goes on {goes_on}", "", Need.NOTHING, 1.0, (line,), ("points.md",), goes_on=goes_on)
        interrupt_when(bench.hung, signal.SIGINT)
        assert bench.run([step]) == 130 and bench.run([step]) == 0
        assert (bench.out / "tables" / "points.md").read_text() == "point\n" * (1 + goes_on)


def test_workers_in_sessions_of_their_own_are_ended_too(bench, tmp_path):
    program = tmp_path / "launcher.py"
    program.write_text(
        "import subprocess, sys, time, pathlib\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'worker')!r}).write_text(str(worker.pid))\n"
        f"pathlib.Path({str(bench.hung)!r}).touch()\n"
        "time.sleep(60)\n"
    )
    interrupt_when(bench.hung, signal.SIGINT)
    assert bench.run([Step("launcher", "", Need.NOTHING, 1.0, (f"{{python}} {program}",), ())]) == 130
    assert not processes.start_of(int((tmp_path / "worker").read_text()))


def test_a_step_that_fails_is_reported_and_does_not_stop_the_others(bench, capfd):
    steps = [bench.step("first", "fails"), bench.step("second", "foreign"), bench.step("third")]
    assert bench.run(steps) == 1
    err = capfd.readouterr().err
    assert "first failed: exit status 1. Last words:" in err and "the switch is on fire" in err
    assert "rows of collectives under the name of moe_layer" in err
    assert [path.name.rpartition("_")[2] for path in (bench.out / "data").iterdir()] == ["third.csv"]
    assert "the switch is on fire" in bench.page()
    assert bench.run(steps) == 1 and bench.log().count("third") == 1, "only what failed is tried again"


def test_a_step_that_hangs_is_stopped_after_its_limit(bench, monkeypatch, capfd):
    monkeypatch.setattr(runner, "limit_s", lambda step: 0.3)
    assert bench.run([bench.step("hanging", "hangs")]) == 1
    assert "it did not end in time" in capfd.readouterr().err


def test_without_gpus_gpu_steps_are_listed_with_reason_and_remedy_and_the_rest_completes(bench, capfd):
    needs = {"on gpus": Need.SCALE_MODEL, "kernels": Need.GPU, "here": Need.HOST}
    steps = [bench.step(name, need=need) for name, need in needs.items()]
    assert bench.run(steps) == 0
    err = " ".join(capfd.readouterr().err.split())
    assert "not run: on gpus: It needs 2 GPUs" in err and "Use a machine with NVIDIA GPUs" in err
    assert "not run: kernels: GPUs: no nvidia-smi" in err
    assert bench.log() == ["here"]
    assert "It needs 2 GPUs" in bench.page() and "on gpus: the part on gpus" in bench.page()


def test_the_list_says_what_each_machine_can_run(bench, capfd):
    bench.run(STEPS, "--list")
    laptop = capfd.readouterr().out
    assert "layer_on_host                     host                 2 min  to do" in laptop
    assert laptop.count("cannot run here") == sum(step.need not in (Need.HOST, Need.NOTHING) for step in STEPS)
    bench.run(STEPS, "--list", machine=TWO_GPUS)
    two = capfd.readouterr().out
    wanted = sum(step.need in (Need.NATIVE, Need.FOUR_GPUS, Need.MEASURED_DATA) for step in STEPS)
    assert two.count("cannot run here") == wanted, "what needs more GPUs, and the calibration, which has no data yet"
    assert "GPUs: 2 of 4" in two and "It needs 6 GPUs" in two
    bench.run(STEPS, "--list", machine=replace(TWO_GPUS, gpus=(H200,) * 8))
    assert capfd.readouterr().out.count("cannot run here") == 1, "the calibration"
    bench.run(STEPS, "--list", machine=replace(TWO_GPUS, nvcc=Nvcc(), gpus=(H200,)))
    one = capfd.readouterr().out
    assert "nvcc: not found" in one and "Install the CUDA toolkit" in " ".join(one.split())


def test_again_runs_what_is_done_and_keeps_the_run_before(bench):
    steps = [bench.step("first")]
    assert bench.run(steps) == 0 and bench.run(steps, "--again") == 0
    assert bench.log() == ["first", "first"]
    (before,), (now,) = (list(bench.out.glob(f"{folder}*.csv")) for folder in ("run/previous/data/", "data/"))
    assert ",layer_time,1,us" in before.read_text() and ",layer_time,2,us" in now.read_text()
    assert str(bench.out) not in now.read_text(), "the command in the header is one for every reader"


def test_an_interrupted_again_goes_on_without_it(bench):
    steps = [bench.step("first"), bench.step("second", "hangs")]
    bench.hung.touch()
    assert bench.run(steps) == 0
    bench.hung.unlink()
    interrupt_when(bench.hung, signal.SIGINT)
    assert bench.run(steps, "--again") == 130 and bench.run(steps) == 0
    assert bench.log() == ["first", "second", "first", "second", "second"]


def test_only_named_steps_run_and_unknown_names_are_refused(bench):
    steps = [bench.step("first"), bench.step("second")]
    assert bench.run(steps, "--only", "second") == 0 and bench.log() == ["second"]
    assert bench.run(steps, "--only") == 0 and bench.log() == ["second"]
    with pytest.raises(ConfigurationError, match=r"--only third: there is no such step. Steps: first, second."):
        bench.run(steps, "--only", "third")


def test_a_changed_file_makes_its_step_run_again(bench):
    steps = [bench.step("first")]
    bench.run(steps)
    next((bench.out / "data").iterdir()).write_text("damaged")
    assert bench.run(steps) == 0 and bench.log() == ["first", "first"]


def test_another_commit_or_kind_of_machine_begins_anew(tmp_path):
    key = Key("abcdef1", "", "2 x NVIDIA H200; 32 cores of x86_64")
    State.load(tmp_path, key).set("first", command.Progress("done"))
    assert State.load(tmp_path, key).is_done("first", tmp_path)
    for other in (replace(key, commit="1234567"), replace(key, changes="12345678"), replace(key, machine="no GPU")):
        assert not State.load(tmp_path, other).steps
    path = next(tmp_path.glob("state_*.json"))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ConfigurationError, match=rf"{path.name} cannot be used"):
        State.load(tmp_path, key)


def test_two_runs_never_write_to_the_same_folder(bench):
    with command.alone(Places(bench.out)), pytest.raises(ConfigurationError, match="another inc reproduce writes to"):
        bench.run([bench.step("first")])


def test_every_step_names_a_program_that_exists_and_files_that_are_data_files():
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        for line in step.commands:
            words = shlex.split(line)
            assert words[0] == "{python}"
            for flag, word in itertools.pairwise(words):
                assert flag != "-m" or importlib.util.find_spec(word), word
                assert not word.endswith(".py") or (ROOT / word).is_file(), word
        for name in (final_name(name, "abcdef1") for name in step.writes):
            assert not name.endswith(".csv") or NAME.fullmatch(name) or SIMULATED_NAME.fullmatch(name), name


def test_every_option_of_a_step_is_one_of_its_program():
    for line in (line for step in STEPS for line in step.commands):
        words = shlex.split(line)
        ours = [n for n, word in enumerate(words) if word.split(".")[0] in ("results", "tests") or word.startswith("results/")]
        ours = [n for n in ours if words[n - 1] == "-m" or words[n].endswith(".py")] or [words.index("simulate")]
        name = words[ours[0]].removesuffix(".py").replace(".", "/") if words[ours[0]] != "simulate" else ""
        path = ROOT / (f"{name}.py" if name else "inc_runtime/simulator/command.py")
        for option in (word for word in words[ours[0] + 1 :] if word.startswith("--")):
            assert f'"{option}"' in path.read_text(encoding="utf-8"), f"{path.name} has no {option}"


def test_every_simulated_question_is_a_step():
    from results.simulate_questions import QUESTIONS

    assert {f"simulated_{question}" for question in QUESTIONS} == {s.name for s in STEPS if s.name.startswith("simulated_")}
