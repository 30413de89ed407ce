"""Parsers of formats whose calls are JSON objects with a name and arguments."""

from __future__ import annotations

import json
import re

from jackfield_tool_calls._found import Found, Schemas, read_json
from jackfield_tool_calls._marked_calls import xml
from jackfield_tool_calls._python_calls import add_python

_HERMES = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
_BUILT_IN = re.compile(r"\s*\w+\.call\(")
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?")
_PHI = re.compile(r"<\|tool_calls?\|>|functools(?=\s*\[)")
_PHI_END = re.compile(r"<\|/tool_calls?\|>")


def hermes(text: str, schemas: Schemas) -> Found:
    """Parse ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, with text between the calls."""
    found, (opening, closing) = Found(), _HERMES
    found.content, pieces = _pieces(text, opening, closing)
    for inside, after, closed in pieces:
        read = read_json(inside)
        if isinstance(read, str):
            found.refuse(read if closed else "it is not finished", inside)
        else:
            found.add_object(read[0], inside)
            if inside[read[1] :].strip():
                found.refuse("one call is between two marks", inside[read[1] :])
        found.content += after
    return found


def _pieces(text: str, opening: str, closing: str) -> tuple[str, list[tuple[str, str, bool]]]:
    """Split a text at its calls: the text before them, then each call, the text after it and whether it is closed.

    A closing mark inside of a call's JSON strings does not end it.
    """
    place = text.find(opening)
    if place < 0:
        return text, []
    before, pieces = text[:place], list[tuple[str, str, bool]]()
    while place >= 0:
        begin = place + len(opening)
        read = read_json(text, begin)
        end = text.find(closing, begin if isinstance(read, str) else read[1])
        place = text.find(opening, begin if isinstance(read, str) else read[1])
        closed = end >= 0 and (place < 0 or end < place)
        if closed:
            pieces.append((text[begin:end], text[end + len(closing) : None if place < 0 else place], True))
        elif isinstance(read, str):
            pieces.append((text[begin : None if place < 0 else place], "", False))
        else:
            pieces.append((text[begin : read[1]], text[read[1] : None if place < 0 else place], True))
    return before, pieces


def llama3(text: str, schemas: Schemas) -> Found:
    """Parse ``{"name": …, "parameters": {…}}`` after ``<|python_tag|>``, or where an answer has nothing else.

    Several calls are separated by semicolons or white space. Python code after the tag is a call of
    ``code_interpreter``, and ``name.call(key=value)`` one of a built-in tool. ``<function=name>`` is read, too.
    """
    if "<function=" in text:
        return xml(text, schemas)
    found = Found()
    before, tag, rest = text.partition(_PYTHON)
    body = rest if tag else text
    if not tag and not re.match(r"\s*\{", text):
        found.content = text
        return found
    values, problem = _objects(body)
    named = [value for value in values if isinstance(value, dict) and isinstance(value.get("name"), str)]
    if not tag and (not named or len(named) < len(values)):  # JSON that is an answer, or text that begins like it
        if problem and re.match(r'\s*\{\s*"(name|type|function)"', text):
            found.refuse(problem, text)
        else:
            found.content = text
        return found
    found.content = before if tag else ""
    for value in values:
        found.add_object(value, json.dumps(value))
    if problem and tag and not values and not re.match(r"\s*\{", body):
        if _BUILT_IN.match(body):
            add_python(found, body)
        else:
            found.add("code_interpreter", {"code": body.strip()}, body)
    elif problem:
        found.refuse(problem, body)
    return found


def _objects(text: str) -> tuple[list[object], str]:
    """Return JSON objects that follow each other, and what is wrong after them."""
    values: list[object] = []
    place = 0
    while rest := text[place:].lstrip("; \n\r\t,"):
        place = len(text) - len(rest)
        read = read_json(text, place)
        if isinstance(read, str):
            return values, read
        values.append(read[0])
        place = read[1]
    return values, ""


def mistral(text: str, schemas: Schemas) -> Found:
    """Parse ``[TOOL_CALLS][{…}, …]`` and, of newer models, ``[TOOL_CALLS]name[ARGS]{…}``, also without ``[ARGS]``."""
    found = Found()
    found.content, *pieces = text.split(_MISTRAL)
    for piece in pieces:
        if head := _NAMED.match(piece):
            name, number = head[1], head[2] or ""
            read = read_json(piece, head.end())
            if isinstance(read, str):
                found.refuse(read, piece)
            else:
                found.add(name, read[0], piece, number.strip())
            continue
        _add_list(found, piece)
    return found


def _add_list(found: Found, text: str) -> None:
    """Note the calls of a list of objects; the complete ones of a list that is not finished."""
    read = read_json(text)
    if not isinstance(read, str):
        for value in read[0] if isinstance(read[0], list) else [read[0]]:
            found.add_object(value, text)
        return
    place = text.find("[") + 1
    while place and (inner := text.find("{", place)) >= 0:
        one = read_json(text, inner)
        if isinstance(one, str):
            break
        found.add_object(one[0], text)
        place = one[1]
    found.refuse(read, text[place:] or text)


def phi(text: str, schemas: Schemas) -> Found:
    """Parse ``<|tool_call|>[{…}]<|/tool_call|>`` and ``functools[{…}]``."""
    found = Found()
    begin = _PHI.search(text)
    if begin is None:
        found.content = text
        return found
    found.content = text[: begin.start()]
    for piece in _PHI.split(text[begin.end() :]):
        inside, *after = _PHI_END.split(piece, maxsplit=1)
        _add_list(found, inside)
        found.content += after[0] if after else ""
    return found
