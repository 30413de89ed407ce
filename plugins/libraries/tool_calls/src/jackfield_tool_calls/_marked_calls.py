"""Parsers of formats that mark the name and the arguments of a call with tokens or tags."""

# ruff: noqa: RUF001, RUF002 (the bars of DeepSeek's tokens)

from __future__ import annotations

import re

from jackfield_tool_calls._found import Found, Schemas, read_json, typed

_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_CALLS = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>")
_FENCE = re.compile(r"\A```(?:json)?\s*|\s*```\s*\Z")
_GLM, _GLM_END = "<tool_call>", "</tool_call>"
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]*)>")
_FUNCTION_END = "</function>"
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_WRAPPING = re.compile(r"</?(?:tool_calls?|function_calls)>")
_INVOKE = re.compile(r'<invoke name="([^"]+)">(.*?)(?:</invoke>|(?=<invoke )|\Z)', re.DOTALL)
_INVOKED = re.compile(r'<parameter name="([^"]+)"[^>]*>(.*?)(?:</parameter>|(?=<parameter )|\Z)', re.DOTALL)
_PART = re.compile(r"(?:<\|start\|>(?P<role>[^<]*)|\A(?P<to>\s*to=[^<]*))?<\|channel\|>(?P<channel>[^<]*)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_PART_END = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|start\|>|<\|channel\|>)|\Z")


def deepseek(text: str, schemas: Schemas) -> Found:
    """Parse calls between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``.

    V3 and R1 put a type before the name and JSON in a fence; V3.1 writes the name and JSON alone.
    """
    found = Found()
    found.content, *pieces = text.split(_CALL)
    for piece in pieces:
        inside, end, after = piece.partition(_CALL_END)
        head, separator, body = inside.partition(_SEPARATOR)
        found.content += after
        if not separator:
            found.refuse("it has no name" if end else "it is not finished", inside)
            continue
        name = head.strip()
        if name == "function" and not body.lstrip().startswith("{"):
            name, _, body = body.partition("\n")
        read = read_json(_FENCE.sub("", body.strip()))
        if isinstance(read, str):
            found.refuse(read if end else "it is not finished", inside)
        else:
            found.add(name, read[0], inside)
    found.content = _CALLS.sub("", found.content)
    return found


def glm(text: str, schemas: Schemas) -> Found:
    """Parse ``<tool_call>name``, pairs of ``<arg_key>`` and ``<arg_value>``, ``</tool_call>``."""
    found = Found()
    found.content, *pieces = text.split(_GLM)
    for piece in pieces:
        inside, end, after = piece.partition(_GLM_END)
        found.content += after
        if not end:
            found.refuse("it is not finished", inside)
            continue
        name = inside.partition("<arg_key>")[0].strip()
        known = schemas.get(name, {})
        arguments = {key.strip(): typed(value, known.get(key.strip())) for key, value in _GLM_ARGUMENT.findall(inside)}
        if len(arguments) < inside.count("<arg_key>"):
            found.refuse("an argument has no value", inside)
        else:
            found.add(name, arguments, inside)
    return found


def xml(text: str, schemas: Schemas) -> Found:
    """Parse ``<function=name>`` with ``<parameter=…>`` elements or a JSON object, with or without ``<tool_call>``.

    So is ``<invoke name="…">`` of other families.
    """
    if "<invoke name=" in text:
        return _invoked(text, schemas)
    found, place = Found(), 0
    for begin in _FUNCTION.finditer(text):
        if begin.start() < place:  # inside of an argument
            continue
        found.content += text[place : begin.start()]
        end = text.find(_FUNCTION_END, begin.end())
        inside = text[begin.end() : None if end < 0 else end]
        place = len(text) if end < 0 else end + len(_FUNCTION_END)
        name = begin[1].strip()
        if end < 0:
            found.refuse("it is not finished", text[begin.start() :])
        elif inside.lstrip().startswith("{"):
            read = read_json(inside)
            if isinstance(read, str):
                found.refuse(read, inside)
            else:
                found.add(name, read[0], inside)
        else:
            known, pairs = schemas.get(name, {}), _PARAMETER.findall(inside)
            given = {key.strip(): typed(_trimmed(value), known.get(key.strip())) for key, value in pairs}
            found.add(name, given, inside)
    found.content += text[place:]
    if not (found.calls or found.problems) and _GLM in text:
        found.refuse("a call is <function=name> with <parameter=key>value</parameter>", text[text.find(_GLM) :])
    found.content = _WRAPPING.sub("", found.content)
    return found


def _invoked(text: str, schemas: Schemas) -> Found:
    """Parse ``<invoke name="…">`` with ``<parameter name="…">`` elements."""
    found = Found(content=_WRAPPING.sub("", _INVOKE.sub("", text)))
    for name, inside in _INVOKE.findall(text):
        known, pairs = schemas.get(name, {}), _INVOKED.findall(inside)
        found.add(name, {key: typed(_trimmed(value), known.get(key)) for key, value in pairs}, inside)
    return found


def _trimmed(text: str) -> str:
    """Return a parameter without the line breaks beside its tags."""
    return text.removeprefix("\n").removesuffix("\n")


def gpt_oss(text: str, schemas: Schemas) -> Found:
    """Parse channels: ``analysis`` is reasoning, ``final`` is text, and a part ``to=functions.name`` is a call."""
    found, place = Found(), 0
    while (part := _PART.search(text, place)) is not None:
        found.content += text[place : part.start()]
        head, message, _ = text[part.end() :].partition("<|message|>")
        header = " ".join(filter(None, (part["role"], part["to"], part["channel"], head if message else "")))
        begin = part.end() + len(head) + len(message)
        end = _PART_END.search(text, begin)
        assert end is not None  # it matches the end of the text
        body, place = text[begin : end.start()], max(end.end(), begin)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            read = read_json(body)
            if isinstance(read, str):
                found.refuse(read, body)
            else:
                found.add(recipient[1], read[0], body)
        elif part["channel"].strip().startswith("analysis"):
            found.reasoning += ("\n" if found.reasoning else "") + body
        else:
            found.content += body
    rest = text[place:]
    found.content += re.sub(r"<\|(?:end|return|call|start|message)\|>(?:assistant)?", "", rest)
    return found
