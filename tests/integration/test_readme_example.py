"""The script in the README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    proof = "assert output.shape == (20, 64) and output.isfinite().all(); print('output is finite')"
    script.write_text(f"{block}        {proof}\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("output is finite") == 2
