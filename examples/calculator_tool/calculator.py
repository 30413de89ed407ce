"""The tool: a calculator for one line of arithmetic."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_OPERATIONS: dict[type[Any], Callable[[Any, Any], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 200  #: characters of an expression


def calculate(expression: str) -> str:
    """Calculate an arithmetic expression with + - * / and parentheses.

    Args:
        expression: such as 48/2 or 0.2*(50-8)
    """
    if len(expression) > _LONGEST:
        raise ValueError("the expression is too long")
    try:
        value = _value(ast.parse(expression.strip().replace(",", ""), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{expression!r} cannot be calculated: {error}") from None
    return f"{round(value, 6):.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number: float = node.value
        return number
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    raise ValueError("only numbers, + - * / and parentheses are allowed")
