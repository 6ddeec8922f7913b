"""Nothing in the repository depends on where it was written, and every picture can be drawn again."""

from __future__ import annotations

import re
from pathlib import PurePath

from tests.repository.files import all_files, files, read

BINARY = (".png", ".pdf", ".jpg", ".gz", ".safetensors", ".npz")
PRIVATE_PATH = re.compile(r"(?<![\w.$}])/(?:home|root|work|Users|mnt|media)/[\w.]")
OUTSIDE_DOCUMENT = re.compile(r"(?<![\w/])shared/[\w/]+\.\w+")
FIGURES = (".png", ".svg", ".pdf")
DATA = (".csv", ".json")


def test_no_file_names_a_place_outside_the_repository():
    found = [
        f"{path}:{number} {match[0]}"
        for path in all_files()
        if not path.endswith(BINARY)
        for number, line in enumerate(read(path).splitlines(), 1)
        for pattern in (PRIVATE_PATH, OUTSIDE_DOCUMENT)
        if (match := pattern.search(line))
    ]
    assert not found, f"another reader does not have these: {found}"


def test_the_patterns_find_what_they_look_for():
    for path in ("home/me/x", "work/main", "root/.cache"):
        assert PRIVATE_PATH.search(f"see /{path}")
    assert not PRIVATE_PATH.search("https://example.org/home/page") and not PRIVATE_PATH.search("$(BIN)/work")
    assert OUTSIDE_DOCUMENT.search("see shared" + "/notes.md") and not OUTSIDE_DOCUMENT.search("a shared/private pair")


def test_every_figure_has_the_data_that_it_shows():
    data = {PurePath(path).stem for path in files(*DATA) if path.startswith("results/data/")}
    for path in files(*FIGURES):
        if path.startswith("results/figures/"):
            stem = PurePath(path).stem
            assert any(stem == name or stem.startswith(f"{name}_") for name in data), (
                f"{path} has no data: results/data/ holds no file whose name is {stem} or the beginning of it."
            )
