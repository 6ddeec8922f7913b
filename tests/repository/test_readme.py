"""Every path, command, option and variable that a README names exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from fnmatch import fnmatch
from functools import cache

import pytest

from tests.repository.files import PACKAGES, ROOT, all_files, read

READMES = sorted({"README.md", *(path for path in all_files() if path.split("/")[-1] == "README.md")})
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SUFFIXES = tuple(".py .md .toml .txt .cu .cuh .h .csv .json .png .svg .sh .c .cpp .yml .yaml".split())  # noqa: SIM905
WRITTEN_BY_RUNS = ("out/", "build/", ".venv/")
"""What commands write; git ignores it."""

SHELLS = ("", "sh", "bash", "shell", "console")


def code_of(text: str) -> tuple[list[str], list[str]]:
    """Command lines of the fenced shell blocks, and inline code, of a README."""
    lines: list[str] = []
    for language, block in FENCE.findall(text):
        if language in SHELLS:
            joined = re.sub(r"\\\n\s*", " ", block)
            lines += [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    return lines, INLINE.findall(FENCE.sub("", text))


def words_of(line: str) -> list[str]:
    """A command line as words, without its comment and its leading assignments of variables."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


@cache
def help_of(command: str) -> str | None:
    """Help text of `inc COMMAND`, or None if there is no such command."""
    from inc_runtime.cli import build_parser

    parsers: dict = {}
    for action in build_parser()._actions:
        parsers |= action.choices if isinstance(action.choices, dict) else {}
    return parsers[command].format_help() if command in parsers else None


def wrong_inc(words: list[str]) -> list[str]:
    """What is wrong with the words after `inc`."""
    if not words or words[0].startswith("-"):
        return []
    text = help_of(words[0])
    if text is None:
        return [f"inc {words[0]}"]
    options = [word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
    return [f"inc {words[0]} {option}" for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)]


def wrong_make(words: list[str]) -> list[str]:
    """Targets after `make` that the Makefile does not have."""
    targets = set(re.findall(r"^([a-z][\w-]*):", read("Makefile"), re.MULTILINE))
    return [f"make {word}" for word in words if re.fullmatch(r"[a-z][\w-]*", word) and word not in targets]


def wrong_module(words: list[str]) -> list[str]:
    """What is wrong with the words after `-m`: no such module, or no such command of inc."""
    name = words[0] if words else ""
    if name.split(".")[0] in (*PACKAGES, "results", "tests"):
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return [f"-m {name}"]
    return wrong_inc(words[1:]) if name == "inc_runtime" else []


def wrong_command(line: str) -> list[str]:
    """Everything in a command line that does not exist."""
    words = words_of(line)
    if not words:
        return []
    program = words[0].split("/")[-1]
    wrong = []
    paths = words
    if program == "inc":
        own = words[1:4] if words[1:2] == ["serve"] else words[1:]  # the rest of `inc serve` are options of vLLM
        wrong += wrong_inc(own)
        paths = []  # the user's own files
    elif program == "make":
        wrong += wrong_make(words[1:])
    elif "-m" in words and program in ("python", "python3", "torchrun"):
        wrong += wrong_module(words[words.index("-m") + 1 :])
    return wrong + [word for word in paths if is_path(word) and not path_exists(word)]


def is_path(word: str) -> bool:
    """True for what looks like a path of this repository; False for places elsewhere and for placeholders."""
    if re.search(r"[<>{}…\s=:()]|^[/~$-]|\.\.\.|://", word) or word.removeprefix("./").startswith(WRITTEN_BY_RUNS):
        return False
    top = {path.split("/")[0] for path in all_files()}
    return word.endswith(SUFFIXES) or (word.endswith("/") and len(word) > 1) or ("/" in word and word.split("/")[0] in top)


@cache
def sources() -> str:
    """Text of the code that users run: the packages and the Makefile."""
    code = (path for path in all_files() if path.endswith((".py", "Makefile")) and not path.startswith("tests/"))
    return "\n".join(read(path) for path in code)


def path_exists(word: str) -> bool:
    """True if a file or folder of the repository has this path, or ends in it (`*` is anything), or if a run writes it."""
    if re.fullmatch(r"[\w-]+\.(json|png|svg|csv)", word) and f'"{word}"' in sources():
        return True
    word = word.removeprefix("./").rstrip("/")
    candidates = set(all_files())
    for path in all_files():
        parts = path.split("/")
        candidates.update("/".join(parts[:i]) for i in range(1, len(parts)))
    return any(fnmatch(path, word) or fnmatch(path, f"*/{word}") for path in candidates)


@pytest.mark.parametrize("readme", READMES)
def test_every_path_command_and_variable_in_a_readme_exists(readme):
    text = read(readme)
    folder = readme.rpartition("/")[0]
    lines, inline = code_of(text)
    wrong = [problem for line in [*lines, *inline] for problem in wrong_command(line)]
    for target in LINK.findall(text):
        if "://" not in target and not target.startswith("mailto:") and not (ROOT / folder / target).exists():
            wrong.append(f"]({target})")
    wrong += [name for name in set(re.findall(r"\bINC_[A-Z_]*[A-Z]\b", text)) if name not in sources()]
    assert not wrong, f"{readme} names what does not exist: {sorted(set(wrong))}"


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_readme_shows_how_to_run_and_to_test(target):
    assert f"make {target}" in read("README.md")


def test_the_check_finds_stale_names():
    stale = {
        "inc nonsense": ["inc nonsense"],
        "INC_TRACE=1 inc demo --no-such-option 3": ["inc demo --no-such-option"],
        "make demo nonsense ARGS=--small": ["make nonsense"],
        "torchrun --nproc-per-node 6 -m inc_runtime nonsense": ["inc nonsense"],
        "python -m inc_runtime.nonsense": ["-m inc_runtime.nonsense"],
        "nonsense.json": ["nonsense.json"],
        "inc_runtime/nonsense.py": ["inc_runtime/nonsense.py"],
        "megakernel/nonsense/": ["megakernel/nonsense/"],
    }
    for line, wrong in stale.items():
        assert wrong_command(line) == wrong, line
    for line in (
        "inc demo --small",
        "make test",
        "protocol.py",
        "inc_runtime/*.py",
        "/dev/shm",
        "out/demo/x.json",
        "allenai/OLMoE",
    ):
        assert wrong_command(line) == [], line
    lines, inline = code_of("a `b c`\n```bash\n$ inc run \\\n   --x 1\n```\n```python\nnot/a/shell.py\n```\n")
    assert (lines, inline) == (["inc run  --x 1"], ["b c"])
