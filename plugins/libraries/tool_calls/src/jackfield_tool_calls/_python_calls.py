"""Parsers of calls that are written as Python expressions."""

from __future__ import annotations

import ast
import re

from jackfield_tool_calls._found import Found, Schemas

_START = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_TAGS = re.compile(r"<\|python_(?:tag|start|end)\|>")


def pythonic(text: str, schemas: Schemas) -> Found:
    """Parse ``[name(key=value), …]`` (Llama 3.2 and 4)."""
    found, text = Found(), _TAGS.sub("", text)
    start = _START.search(text)
    if start is None:
        found.content = text
        return found
    found.content = text[: start.start()]
    add_python(found, text[start.start() :])
    return found


def add_python(found: Found, text: str) -> None:
    """Note the calls of a Python expression: one call, or a list of them."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        for node in nodes:
            _add(found, node, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = str(error.msg if isinstance(error, SyntaxError) else error)
        cut = "never closed" in why or "unterminated" in why
        found.refuse("it is not finished" if cut else f"it is no call in Python ({why})", text)


def _add(found: Found, node: ast.expr, text: str) -> None:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        found.refuse("a call is name(key=value)", text)
        return
    name = ast.unparse(node.func).removesuffix(".call")
    found.add(name, {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}, text)
