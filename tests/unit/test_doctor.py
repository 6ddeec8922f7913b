"""The doctor on machines that are not here: fake answers of nvidia-smi, nvcc and MPS, real judgement."""

from __future__ import annotations

import argparse
import json
import sys
import time

import pytest

from inc_runtime import machine as facts
from inc_runtime.config import OLMOE_1B_7B, CommunicationModel
from inc_runtime.doctor import DEMO_PIPELINE, Status, add_arguments, demo_heap_bytes, diagnose, examine, format_report, run
from inc_runtime.errors import ConfigurationError
from inc_runtime.heap_layout import Dims, HeapLayout
from inc_runtime.machine import Output, run_command
from inc_runtime.protocol import World

GPU_PACKAGES = {
    "torch": "2.11.0+cu130",
    "transformers": "5.17.0",
    "tokenizers": "0.22.0",
    "safetensors": "0.7.0",
    "nvidia-nvshmem-cu13": "3.4.5",
    "nvshmem4py-cu13": "0.4.1",
    "cuda-core": "1.2.0",
}
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_HOME", "INC_SHARED_MEMORY_FOLDER", "INC_WAIT_LIMIT_S")
WORLD = World(4)


class FakeMachine:
    """Answers the doctor's commands. `uuids` are GPU-<letter>."""

    def __init__(
        self, num_gpus: int, *, linked: bool = True, mps_daemon: bool = False, capability: str = "9.0", mig: str = "Disabled"
    ):
        self.num_gpus, self.linked, self.mps_daemon = num_gpus, linked, mps_daemon
        self.capability, self.mig = capability, mig

    def __call__(self, arguments, *, stdin: str = "", limit_s: float = 10.0) -> Output:
        program = arguments[0].rpartition("/")[2]
        if arguments[0] == sys.executable:
            return Output(0, 'a warning\n["2.11.0+cu130", "13.0", true]\n')
        if program == "nvidia-smi":
            if self.num_gpus == 0:
                return Output(9, "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.\n")
            return Output(0, self.topology() if "topo" in arguments else self.list_gpus())
        if program == "nvidia-cuda-mps-control":
            assert stdin == "get_server_list\n"
            return Output(0, "") if self.mps_daemon else Output(1, "Cannot find MPS control daemon process\n")
        if program == "nvcc":
            return Output(0, "Cuda compilation tools, release 13.0, V13.0.88\n")
        return Output(-1, f"{program}: No such file or directory")

    def list_gpus(self) -> str:
        lines = (
            f"{i}, GPU-{chr(97 + i)}, NVIDIA H200, {self.capability}, 143771, Default, {self.mig}" for i in range(self.num_gpus)
        )
        return "\n".join(lines) + "\n"

    def topology(self) -> str:
        link = "NV18" if self.linked else "SYS"
        names = [f"GPU{i}" for i in range(self.num_gpus)]
        lines = ["\t\x1b[4m" + "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
        for row in range(self.num_gpus):
            cells = [" X " if row == column else link for column in range(self.num_gpus)]
            lines.append("\t".join([f"GPU{row}", *cells, "SYS", "0-31", "0"]))
        lines += ["NIC0\tSYS\tSYS\t X", "", "Legend:", "  NV#  = Connection traversing a bonded set of # NVLinks"]
        return "\n".join(lines)


@pytest.fixture
def install(monkeypatch):
    """Makes the machine have these packages and programs, whatever it really has."""

    def prepare(packages=GPU_PACKAGES, programs=("nvcc", "nvidia-cuda-mps-control"), gpu_backend=True) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(facts, "find_packages", lambda: dict(packages))
        monkeypatch.setattr(facts.shutil, "which", lambda name, path=None: f"/usr/bin/{name}" if name in programs else None)
        monkeypatch.setattr(facts.importlib.util, "find_spec", lambda name: object() if gpu_backend else None)
        monkeypatch.setattr(facts.platform, "machine", lambda: "x86_64")

    return prepare


def finding(report, name):
    (found,) = (f for f in report.findings if f.name == name)
    return found


def placement(report, name):
    (found,) = (p for p in report.placements if p.placement == name)
    return found


def possible(report):
    return [p.placement for p in report.placements if p.possible]


def test_eight_linked_gpus_run_every_placement_and_native_is_best(install):
    install()
    report = diagnose(WORLD, FakeMachine(8))
    assert possible(report) == ["native", "scale_model", "shared", "one_gpu", "host"]
    assert report.best and report.best.placement == "native"
    assert placement(report, "native").places[4:] == ("GPU 4: dispatch switch 0", "GPU 5: combine switch 0")
    assert finding(report, "NVLink").status is Status.OK and "28 pairs" in finding(report, "NVLink").seen
    assert "143771" not in finding(report, "GPUs").seen and "140 GiB" in finding(report, "GPUs").seen


def test_two_gpus_run_four_ranks_as_a_scale_model(install):
    install()
    report = diagnose(WORLD, FakeMachine(2))
    assert possible(report) == ["scale_model", "one_gpu", "host"]
    assert "needs 6 GPUs, one for each PE; there are 2" in placement(report, "native").reasons[0]
    assert "needs 4 GPUs, one for each rank" in placement(report, "shared").reasons[0]
    assert placement(report, "scale_model").places == (
        "GPU 0: rank 0, rank 1, rank 2, rank 3",
        "GPU 1: dispatch switch 0, combine switch 0",
    )
    assert "does not run" in finding(report, "MPS").seen
    assert "answers" in finding(diagnose(WORLD, FakeMachine(2, mps_daemon=True)), "MPS").seen


def test_two_gpus_run_two_ranks_with_their_switches_beside_them(install):
    install()
    report = diagnose(World(2), FakeMachine(2))
    assert placement(report, "shared").possible
    assert placement(report, "shared").places == ("GPU 0: rank 0, dispatch switch 0", "GPU 1: rank 1, combine switch 0")


def test_without_mps_no_placement_shares_a_gpu(install):
    install(programs=("nvcc",))
    report = diagnose(WORLD, FakeMachine(2))
    assert possible(report) == ["host"]
    for name in ("scale_model", "shared", "one_gpu"):
        assert any("need MPS" in reason for reason in placement(report, name).reasons)
    assert finding(report, "MPS").status is Status.MISSING and finding(report, "MPS").remedy
    assert possible(diagnose(WORLD, FakeMachine(6))) == ["native", "host"]


def test_one_gpu_runs_all_pes_without_links(install):
    install()
    report = diagnose(WORLD, FakeMachine(1))
    assert possible(report) == ["one_gpu", "host"]
    assert "no link is crossed" in " ".join(placement(report, "one_gpu").notes)


def test_without_gpus_the_host_placement_is_best_and_the_driver_is_quoted(install):
    install(packages={"torch": "2.13.0+cpu"}, programs=())
    report = diagnose(WORLD, FakeMachine(0))
    assert possible(report) == ["host"]
    assert "could not communicate with the NVIDIA driver" in finding(report, "GPUs").seen
    assert finding(report, "NVSHMEM").status is Status.MISSING
    assert placement(report, "one_gpu").reasons == ("It needs 1 GPU, for all PEs; there are none.",)


def test_gpus_without_nvlink_are_named(install):
    install()
    report = diagnose(WORLD, FakeMachine(2, linked=False))
    assert finding(report, "NVLink").status is Status.LIMITED and "0 and 1" in finding(report, "NVLink").seen
    assert "not linked" in " ".join(placement(report, "scale_model").notes)
    assert "not linked" not in " ".join(placement(report, "one_gpu").notes)


@pytest.mark.parametrize(("change", "word"), [({"capability": "8.0"}, "sm_90a"), ({"mig": "Enabled"}, "MIG")])
def test_gpus_that_cannot_run_the_kernels_are_refused(install, change, word):
    install()
    report = diagnose(WORLD, FakeMachine(8, **change))
    assert possible(report) == ["host"]
    assert word in finding(report, "GPUs").meaning and word in " ".join(placement(report, "native").reasons)


@pytest.mark.parametrize(
    ("absent", "word"),
    [("nvidia-nvshmem-cu13", "NVSHMEM wheel"), ("nvshmem4py-cu13", "nvshmem4py"), ("cuda-core", "cuda-core or CuPy")],
)
def test_a_missing_package_stands_between_a_gpu_and_its_placements(install, absent, word):
    install(packages={name: version for name, version in GPU_PACKAGES.items() if name != absent})
    report = diagnose(WORLD, FakeMachine(8))
    assert possible(report) == ["host"] and word in " ".join(placement(report, "native").reasons)


def test_a_version_without_gpu_backend_says_so(install):
    install(gpu_backend=False)
    assert "no GPU backend" in " ".join(placement(diagnose(WORLD, FakeMachine(8)), "native").reasons)


@pytest.mark.parametrize(("visible", "indices"), [("1,3", [1, 3]), ("GPU-c", [2]), ("", [])])
def test_hidden_gpus_are_not_counted(install, monkeypatch, visible, indices):
    install()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, problem = facts.find_gpus(FakeMachine(4))
    assert [gpu.index for gpu in gpus] == indices
    assert indices or "CUDA_VISIBLE_DEVICES" in problem


def test_a_full_shared_memory_folder_is_found_before_the_demo_runs(install, monkeypatch):
    install()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(facts.os, "posix_fallocate", full)
    report = diagnose(WORLD, FakeMachine(0))
    found = finding(report, "shared memory")
    assert found.status is Status.MISSING and "No space left" in found.meaning and "INC_SHARED_MEMORY_FOLDER" in found.remedy
    assert not placement(report, "host").possible and report.best is None


def test_an_arm_processor_is_sent_to_the_simulated_backend(install, monkeypatch):
    install()
    monkeypatch.setattr(facts.platform, "machine", lambda: "aarch64")
    report = diagnose(WORLD, FakeMachine(0))
    assert finding(report, "processor").status is Status.LIMITED and "simulated" in finding(report, "processor").remedy
    assert not placement(report, "host").possible


@pytest.mark.parametrize(
    "answer", [Output(0, ""), Output(0, "\x00 garbage, , ,\nGPU0 GPU1\nGPU0\n"), Output(-1, "x did not answer within 10 s")]
)
def test_no_answer_of_a_command_raises(install, answer):
    install()
    report = diagnose(WORLD, lambda *_, **__: answer)
    assert report.findings and "native" not in possible(report)
    assert json.dumps(report.as_dict()) and format_report(report, 80)


def test_a_wrong_environment_variable_is_a_finding(install, monkeypatch):
    install()
    monkeypatch.setenv("INC_WAIT_LIMIT_S", "soon")
    found = finding(diagnose(WORLD, FakeMachine(0)), "environment")
    assert found.status is Status.MISSING and "soon" in found.seen


def test_a_command_that_hangs_is_given_up():
    begin = time.monotonic()
    output = run_command(["sleep", "60"], limit_s=0.2)
    assert time.monotonic() - begin < 5 and output.status == -1 and "did not answer" in output.text
    assert run_command(["/nonexistent/program"]).status == -1


def test_the_heaps_of_the_demo_are_those_of_its_largest_model():
    per_pe = [HeapLayout(Dims.of(m, WORLD, OLMOE_1B_7B, DEMO_PIPELINE)).heap_bytes for m in CommunicationModel]
    assert demo_heap_bytes(WORLD) == 6 * max(per_pe)


def test_the_demo_runs_what_the_doctor_reckons_with():
    from inc_runtime.cli import build_parser

    options = build_parser().parse_args(["demo"])
    assert (int(options.tokens), options.microbatch) == (DEMO_PIPELINE.bound_tokens, DEMO_PIPELINE.microbatch_tokens)
    assert (options.depth, options.group) == (DEMO_PIPELINE.depth, DEMO_PIPELINE.ranks_per_phase)


def test_the_table_fits_its_width_and_gives_each_remedy(install):
    install(programs=())
    report = diagnose(WORLD, FakeMachine(2))
    text = format_report(report, 100)
    assert all(len(line) <= 100 for line in text.splitlines())
    flat = " ".join(text.split())
    assert all(f.remedy in flat for f in report.findings if f.status is not Status.OK)


def test_this_machine_can_be_examined_and_written_as_json(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    status = run(parser.parse_args(["--json", str(tmp_path / "report.json")]))
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == (0 if report["best"] else 1)
    assert "Placements" in capsys.readouterr().out
    assert {f["name"] for f in report["findings"]} >= {f.name for f in examine(run=FakeMachine(0)) if f.name != "look"}
    with pytest.raises(ConfigurationError, match="at least 1"):
        run(parser.parse_args(["--ranks", "0"]))
