"""Files and functions are short enough to be read at once, and what other people call says what it does."""

from __future__ import annotations

import ast
import io
import tokenize

from tests.repository.files import PACKAGES, files, read, tree_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
CODE = (".py", ".cu", ".cuh", ".h", ".sh")
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(path: str) -> set[int]:
    """Numbers of the lines that hold code: no blanks, no comments."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(read(path)).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code


def length(node: ast.FunctionDef | ast.AsyncFunctionDef, code: set[int]) -> int:
    """Lines of code of a function, its docstring apart."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    first = body[0].lineno if body else node.lineno
    return 1 + len(code & set(range(first, (node.end_lineno or first) + 1)))


def test_no_file_is_longer_than_400_lines():
    texts = {path: read(path) for path in files(*CODE)}
    lengths = {path: len(text.splitlines()) for path, text in texts.items() if not text.startswith("// Generated ")}
    long = {path: num_lines for path, num_lines in lengths.items() if num_lines > MAX_FILE_LINES}
    assert not long, f"split each at its second idea: {long}"


def test_no_function_has_more_than_80_lines_of_code():
    long = [
        f"{path}:{node.lineno} {node.name}: {num_lines}"
        for path in files(".py")
        for code in [lines_of_code(path)]
        for node in ast.walk(tree_of(path))
        if isinstance(node, FUNCTION) and (num_lines := length(node, code)) > MAX_FUNCTION_LINES
    ]
    assert not long, f"too long: {long}"


def test_public_functions_and_classes_have_docstrings():
    bare = [
        f"{path}:{node.lineno} {node.name}"
        for path in files(".py", under=PACKAGES)
        for node in tree_of(path).body
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not bare, f"no docstring: {bare}"


def test_modules_have_docstrings():
    bare = [path for path in files(".py", under=PACKAGES) if tree_of(path).body and not ast.get_docstring(tree_of(path))]
    assert not bare, f"these do not say what they are: {bare}"
