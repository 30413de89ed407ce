"""Templates whose texts have placeholders for the fields of a :class:`~jackfield.abc.reward.ScoreRequest`.

``{solution_str}`` is a field and ``{extra_info.name}`` a value inside it. ``{{solution_str}}`` stands for the text
``{solution_str}``; all other braces are themselves, such as those of JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from jackfield.abc.reward import ScoreRequest
from jackfield.errors import ConfigError, RewardError, did_you_mean, some

_NAME = r"[A-Za-z_]\w*(?:\.[\w-]+)*"
_PLACEHOLDER = re.compile(rf"\{{(?P<literal>\{{{_NAME}\}})\}}|\{{(?P<name>{_NAME})\}}")

#: The names that a template may begin with: fields and texts of a request.
FIELDS = frozenset({field.name for field in attrs.fields(ScoreRequest)} | {"model_text", "tool_text"})


def names(template: Any) -> set[str]:
    """Return the names of all placeholders in a template."""
    if isinstance(template, str):
        return {found["name"] for found in _PLACEHOLDER.finditer(template) if found["name"]}
    if isinstance(template, Mapping):
        template = template.values()
    elif not isinstance(template, Sequence):
        return set()
    return {name for inner in template for name in names(inner)}


def check_template(template: Any, where: str, more: Iterable[str] = ()) -> None:
    """Refuse a template with a placeholder that no request has (``config.invalid-value``); ``more`` names others."""
    known = FIELDS.union(more)
    for name in sorted(names(template)):
        if (root := name.partition(".")[0]) not in known:
            raise ConfigError(
                f"a template has the unknown placeholder {{{name}}}{did_you_mean(root, known)}",
                where=where,
                expected="one of " + ", ".join(sorted(known)),
                found=name,
                fix=f"correct it, or write {{{{{name}}}}} for the text {{{name}}}",
            )


def fill(template: Any, read: Callable[[str], Any]) -> Any:
    """Fill in the placeholders of all texts of a template. ``read`` returns the value of a name.

    A text that is exactly one placeholder becomes the value with its own type.
    """
    if isinstance(template, str):
        whole = _PLACEHOLDER.fullmatch(template)
        return read(whole["name"]) if whole and whole["name"] else fill_text(template, read)
    if isinstance(template, Mapping):
        return {key: fill(inner, read) for key, inner in template.items()}
    if isinstance(template, Sequence):
        return [fill(inner, read) for inner in template]
    return template


def fill_text(template: str, read: Callable[[str], Any]) -> str:
    """Fill in the placeholders of a text. A conversation becomes a transcript, other values that are no text JSON."""
    return _PLACEHOLDER.sub(lambda found: found["literal"] or text_of(read(found["name"])), template)


def text_of(value: Any) -> str:
    """Return a value as it is written into a text."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(one, Mapping) and "role" in one for one in value):
        return "\n\n".join(f"{one['role']}: {_content(one.get('content') or '')}" for one in value)
    return msgspec.json.encode(value).decode()


def _content(content: Any) -> str:
    """Return the text of a message's content, whose other parts are named only."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = (part if isinstance(part, Mapping) else {"text": str(part)} for part in content)
        return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in parts)
    return text_of(content)


def field_of(request: ScoreRequest, name: str) -> Any:
    """Return a field of a request, or a value inside it; ``reward.template`` if the task does not have it."""
    root, _, path = name.partition(".")
    try:
        return find(getattr(request, root), path)
    except LookupError as error:
        raise RewardError(
            f"a task does not have the value {name} that a template of the reward names",
            code="reward.template",
            where=request.idempotency_key or None,
            expected=name,
            found=error.args[0],
            fix="add it to the task, or remove it from the template",
        ) from None


def find(value: Any, path: str) -> Any:
    """Return the value at a path such as ``choices.0.text``; an empty path is the whole value.

    A ``LookupError`` says what was found instead.
    """
    for key in path.split(".") if path else ():
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, Sequence) and not isinstance(value, str) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise LookupError(f"no {key} in {described(value)}")
    return value


def described(value: Any) -> str:
    """Describe a value of JSON in a few words."""
    if isinstance(value, Mapping):
        return f"an object with {some(sorted(map(str, value)))}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 200 else text[:200] + '…'}"
