"""Runs Python functions of the protocol on symbols, to obtain their formulas as C++ text.

The functions do arithmetic on integers, compare them, and branch. Arithmetic on an `Expression` yields an expression; a
comparison is recorded, and `formula` runs the function once for each outcome, so that branches, `max` and `if` become
conditional expressions. `ceil_div` and `larger` are functions of the header. Nothing is parsed and no formula is typed a
second time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any

from inc_runtime.heap_layout import Dims
from inc_runtime.protocol import World


class Expression:
    """C++ text of an integer expression. `text` is safe to place next to any operator."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def _binary(self, symbol: str, other: object) -> Expression:
        return Expression(f"({self} {symbol} {literal(other)})")

    def _reflected(self, symbol: str, other: object) -> Expression:
        return Expression(f"({literal(other)} {symbol} {self})")

    def __add__(self, other: object) -> Expression:
        return self._binary("+", other)

    def __radd__(self, other: object) -> Expression:
        return self._reflected("+", other)

    def __sub__(self, other: object) -> Expression:
        return self if isinstance(other, int) and other == 0 else self._binary("-", other)

    def __rsub__(self, other: object) -> Expression:
        return self._reflected("-", other)

    def __mul__(self, other: object) -> Expression:
        return self._binary("*", other)

    def __rmul__(self, other: object) -> Expression:
        return self._reflected("*", other)

    def __mod__(self, other: object) -> Expression:
        return self._binary("%", other)

    def __lshift__(self, other: object) -> Expression:
        return self._binary("<<", other)

    def __rshift__(self, other: object) -> Expression:
        return self._binary(">>", other)

    def __and__(self, other: object) -> Expression:
        return self._binary("&", other)

    def __or__(self, other: object) -> Expression:
        return self._binary("|", other)

    def __neg__(self) -> Expression:
        return Negative(self)

    def __floordiv__(self, other: object) -> Expression:
        return Quotient(self, literal(other))

    def __rfloordiv__(self, other: object) -> Expression:
        return Quotient(Expression(literal(other)), str(self))

    def __lt__(self, other: object) -> Any:
        return self._binary("<", other)

    def __le__(self, other: object) -> Any:
        return self._binary("<=", other)

    def __gt__(self, other: object) -> Any:
        return self._binary(">", other)

    def __ge__(self, other: object) -> Any:
        return self._binary(">=", other)

    def __eq__(self, other: object) -> Any:
        return self._binary("==", other)

    def __ne__(self, other: object) -> Any:
        return self._binary("!=", other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return _path.decide(self.text)


class Negative(Expression):
    """`-value`, kept apart so that Python's idiom `-(-a // b)` is recognised as a division that rounds up."""

    def __init__(self, value: Expression) -> None:
        super().__init__(f"(-{value})")
        self.value = value


class Quotient(Expression):
    """`a // b`. All sizes are at least 0, where C++ and Python agree; a negative `a` occurs only in `-(-a // b)`."""

    def __init__(self, dividend: Expression, divisor: str) -> None:
        super().__init__(f"({dividend} / {divisor})")
        self.dividend, self.divisor = dividend, divisor

    def __neg__(self) -> Expression:
        if isinstance(self.dividend, Negative):
            return Expression(f"ceil_div({plain(self.dividend.value)}, {plain(self.divisor)})")
        return super().__neg__()


class _Path:
    """The outcomes of the comparisons on one way through a function."""

    def __init__(self) -> None:
        self.outcomes: dict[str, bool] = {}
        self.undecided: str | None = None

    def decide(self, condition: str) -> bool:
        if condition not in self.outcomes:
            self.undecided = self.undecided or condition
            self.outcomes[condition] = True
        return self.outcomes[condition]


_path = _Path()


def formula(function: Callable[[], object], outcomes: dict[str, bool] | None = None) -> str:
    """C++ text of what `function` returns, over all outcomes of the comparisons of symbols that it makes."""
    known = outcomes or {}
    _path.outcomes, _path.undecided = dict(known), None
    value = function()
    condition = _path.undecided
    if condition is None:
        return literal(value)
    then = formula(function, {**known, condition: True})
    otherwise = formula(function, {**known, condition: False})
    if (then, otherwise) == ("true", "false"):
        return f"({condition} != 0)"
    if condition == f"({then} > {otherwise})":
        return f"larger({plain(then)}, {plain(otherwise)})"
    return f"({condition} ? {plain(then)} : {plain(otherwise)})"


def literal(value: object) -> str:
    """C++ text of an operand or result."""
    if isinstance(value, Expression):
        return value.text
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}::{value.name}"
    if isinstance(value, int):
        return str(value)
    raise TypeError(f"{value!r} has no C++ text: formulas of the protocol are integers, truth values or enums.")


def plain(text: object) -> str:
    """`text` without parentheses around the whole of it."""
    text = str(text)
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and index < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text


class SymbolicModel:
    """Stands for a communication model: its properties are calls of the predicates of the header."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Expression:
        return Expression(f"{name}({self._text})")


class SymbolicWorld:
    """Stands for a `World`: fields and properties are symbols, methods are those of `World` itself."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        member = getattr(World, name, None)
        if isinstance(member, property):
            return Expression(f"{self._prefix}{name}()")
        if callable(member):
            return partial(member, self)
        if name not in World.__dataclass_fields__:
            raise AttributeError(name)
        return Expression(self._prefix + name)


class SymbolicDims:
    """Stands for `Dims`: fields are symbols, properties are calls of the methods of the same name in the header."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            return SymbolicModel(f"{self._prefix}model")
        if name == "world":
            return SymbolicWorld(f"{self._prefix}world.")
        if name in Dims.__dataclass_fields__:
            return Expression(self._prefix + name)
        if isinstance(getattr(Dims, name, None), property):
            return Expression(f"{self._prefix}{name}()")
        raise AttributeError(name)
