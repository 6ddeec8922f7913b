"""The import rule: inc_runtime imports neither of the other packages, and those import only inc_runtime."""

from __future__ import annotations

import ast

from tests.repository.files import PACKAGES, files, tree_of

COMPOSING = ("inc_runtime/cli.py", "inc_runtime/__main__.py")
"""The entry points that put the packages together."""

MAY_IMPORT = {
    "inc_runtime": {"inc_runtime"},
    "switch_emulator": {"switch_emulator", "inc_runtime"},
    "megakernel": {"megakernel", "inc_runtime"},
}
OURS = {*PACKAGES, "tests", "results"}


def imported_names(path: str, tree: ast.Module) -> list[tuple[int, str]]:
    """Line and full name of every module that a file imports, inside functions too, and by name through importlib."""
    package = path.removesuffix(".py").removesuffix("/__init__").split("/")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found.append((node.lineno, ".".join([*base, node.module or ""])))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                found.append((node.lineno, str(node.args[0].value)))
    return found


def test_a_package_imports_only_what_it_may():
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files(".py", under=PACKAGES)
        if path not in COMPOSING
        for line, name in imported_names(path, tree_of(path))
        if name.split(".")[0] in OURS - MAY_IMPORT[path.split("/")[0]]
    ]
    assert not wrong, f"{wrong}: of the project's packages, each may import only {MAY_IMPORT}."


def test_the_rule_sees_every_form_of_import():
    source = (
        "import megakernel.stages\nfrom megakernel import stages\nfrom ..megakernel import x\n"
        "def f():\n  import importlib\n  importlib.import_module('megakernel.stages')\n"
    )
    names = [name for _, name in imported_names("inc_runtime/backends/host.py", ast.parse(source))]
    assert names == ["megakernel.stages", "megakernel", "inc_runtime.megakernel", "importlib", "megakernel.stages"]
