"""The files of the repository: those that git tracks, and new ones that it does not ignore."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("inc_runtime", "switch_emulator", "megakernel")


@cache
def all_files() -> tuple[str, ...]:
    """Paths relative to the root, sorted. Outside of git: all files except hidden ones and what builds leave."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        paths = [path for path in listing.stdout.split("\0") if path]
    else:
        left = ("build", "dist", "out", "__pycache__")
        paths = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
        paths = [p for p in paths if not any(part in left or part[0] == "." for part in Path(p).parts)]
    return tuple(sorted(path for path in set(paths) if (ROOT / path).is_file()))


def files(*suffixes: str, under: tuple[str, ...] = ()) -> list[str]:
    """Paths with one of the suffixes, in one of the folders (all, if none is named)."""
    return [p for p in all_files() if p.endswith(suffixes) and (not under or p.split("/")[0] in under)]


def read(path: str) -> str:
    """Text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def tree_of(path: str) -> ast.Module:
    """Syntax tree of a Python file."""
    return ast.parse(read(path), path)
