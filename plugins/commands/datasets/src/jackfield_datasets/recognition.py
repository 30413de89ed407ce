"""Recognises what the records of a set are, from the names and kinds of their columns.

The layouts are those of TRL (dataset formats), verl (its Parquet files), LLaMA-Factory (ShareGPT, Alpaca) and GSM8K.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.data.formats import AUTO, KEYS, Task, TaskFormat, refusal
from jackfield.errors import DataError

#: the roles of OpenAI by those of ShareGPT
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ROLES |= {"observation": "tool", "tool": "tool", "function_call": "assistant"}
_TRUTHS = ("ground_truth", "answer", "solution")  #: fields with a ground truth, the first that is there
_NAMES = {"prompt_key": "prompt", "messages_key": "messages", "response_key": "answer", "answer_key": "ground truth"}
_NAMES |= {"rejected_key": "rejected answer", "input_key": "input", "system_key": "system message"}
_NAMES |= {"history_key": "history", "tools_key": "tools"}
_NONE: dict[str, str | None] = {**dict.fromkeys(KEYS), "tools_key": None}


@attrs.frozen(kw_only=True)
class Layout(TaskFormat):
    """A format that was recognised. Its further keys are those of Alpaca and ShareGPT."""

    name: str = ""  #: of the layout
    input_key: str | None = None  #: a text that follows the problem on a line of its own
    system_key: str | None = None  #: the record's own system message
    history_key: str | None = None  #: earlier turns, pairs of a question and an answer

    def task(self, record: Any, default_id: str, default_source: str) -> Task:
        """Convert a record to a task, whose fields are the record as it is."""
        if not isinstance(record, dict):
            return super().task(record, default_id, default_source)
        made = {name: _openai(value) for name, value in record.items()}
        asked = made.get(self.prompt_key or "")
        if isinstance(asked, str) and (more := _text(made, self.input_key)):
            made[str(self.prompt_key)] = f"{asked}\n{more}"
        task = super().task(made, default_id, default_source)
        turns = _history(made, self.history_key)
        system = _text(made, self.system_key)
        head = [{"role": "system", "content": system}] if system else []
        messages = [each for each in task.messages if not (head and each["role"] == "system")]
        at = sum(each["role"] == "system" for each in messages)
        return attrs.evolve(task, messages=(*head, *messages[:at], *turns, *messages[at:]), fields=record)

    def described(self) -> str:
        """Return what the keys mean, in words."""
        told = [f"{what}: {key}" for name, what in _NAMES.items() if (key := getattr(self, name)) not in (None, AUTO)]
        return f"{self.name} ({', '.join(told)})"


def recognise(records: Sequence[Any], form: TaskFormat) -> TaskFormat:
    """Return the layout of records of which these are the first, or raise ``data.format``.

    Other settings than keys are those of ``form``, which is returned if its keys say what records are.
    """
    rows = [record for record in records if isinstance(record, dict)]
    if form.is_given or not rows or {"answers", "prompt_ids"} <= rows[0].keys():  # the last: tasks of an archive
        return form
    values = ((name, next((row[name] for row in rows if row.get(name) is not None), None)) for name in rows[0])
    first = dict(values)  # columns of the first record, and the first value of each
    columns = {name for name, value in first.items() if value is not None}
    found = _layouts(columns, first)
    if len(found) != 1:
        raise _unknown(first, found)
    ((name, given),) = found
    keys = {**_NONE, **given}
    if keys["answer_key"] is None:
        keys["answer_key"] = next((each for each in _TRUTHS if each in columns - set(keys.values())), None)
    if first.get("tools") and form.tools_key is None and isinstance(first["tools"], list | str):
        keys["tools_key"] = "tools"
    own = {field.name: getattr(form, field.name) for field in attrs.fields(TaskFormat)}
    kept = {} if form.tools_key is None else {"tools_key": form.tools_key}
    return Layout(**{**own, **keys, **kept, "name": name})


def _layouts(columns: set[str], first: Mapping[str, Any]) -> list[tuple[str, dict[str, str | None]]]:
    """Return name and keys of each layout that fits; several where the records are ambiguous."""
    found = list[tuple[str, dict[str, str | None]]]()
    pair = {"response_key": "chosen", "rejected_key": "rejected"} if {"chosen", "rejected"} <= columns else {}
    if {"completion", "label"} <= columns:  # TRL's unpaired preference: no algorithm learns from it
        return []
    reward = first.get("reward_model")
    if "prompt" in columns and isinstance(reward, dict) and "ground_truth" in reward:
        found.append(("verl's prompts", {"prompt_key": "prompt", "answer_key": "reward_model.ground_truth"}))
    elif "prompt" in columns:
        completion = {"response_key": "completion"} if "completion" in columns else {}
        ways = {"TRL's preferences": pair, "TRL's prompts and completions": completion}
        answers = [(name, each) for name, each in ways.items() if each] or [("TRL's prompts", {})]
        found += [(name, {"prompt_key": "prompt", **each}) for name, each in answers]
    elif pair and not columns & {"conversations", "instruction"}:
        found.append(("TRL's preferences with the prompt in both answers", {"prompt_key": None, **pair}))
    system = {"system_key": "system"} if isinstance(first.get("system"), str) else {}
    if "messages" in columns:
        found.append(("conversations", {"messages_key": "messages"}))
    if "conversations" in columns:
        key = "prompt_key" if pair else "messages_key"
        found.append(("ShareGPT's conversations", {key: "conversations", **pair, **system}))
    if "instruction" in columns:
        more = {"input_key": ("input", "context"), "response_key": ("output", "response"), "history_key": ("history",)}
        there = {key: next((name for name in names if name in first), None) for key, names in more.items()}
        found.append(("Alpaca's instructions", {"prompt_key": "instruction", **there, **pair, **system}))
    asked = [name for name in ("question", "problem") if name in columns]
    return found or [("questions", {"prompt_key": name}) for name in asked]


def _unknown(first: Mapping[str, Any], found: Sequence[tuple[str, Mapping[str, str | None]]]) -> DataError:
    columns = ", ".join(f"{name} ({type(value).__name__})" for name, value in first.items()) or "none"
    what, fix = "the layout of the records is not known", "say in data.format what the columns are, for example "
    fix += "{prompt_key: …, answer_key: …}"
    if found:
        what = f"the records can be read in several ways: {', '.join(name for name, _ in found)}"
        keys = [{**dict.fromkeys(("answer_key",)), **each} for _, each in found]
        shown = [", ".join(f"{key}: {name or 'null'}" for key, name in each.items()) for each in keys]
        fix = "set data.format: " + " or ".join(f"{{{each}}}" for each in shown)
    elif "label" in first:
        fix = "no algorithm learns from single labelled answers: make pairs of them (prompt, chosen, rejected), or "
        fix += (
            "train on the good ones with data.format: {prompt_key: prompt, response_key: completion, answer_key: null}"
        )
    elif "text" in first:
        fix = (
            "a text does not say what is the prompt and what the answer: split it into prompt and completion, or into "
        )
        fix += "messages; or give it a prompt of its own, with data.format: {prompt_key: …, response_key: text}"
    expected = "prompt (with completion, or chosen and rejected), messages, conversations, instruction, question or "
    expected += "problem; or verl's prompt and reward_model"
    return DataError(what, code="data.format", expected=expected, found=f"the columns {columns}", fix=fix)


def _text(record: Mapping[str, Any], key: str | None) -> str:
    text = record.get(key or "") or ""
    if not isinstance(text, str):
        raise refusal(f"field {key!r} is not a text", "a text", repr(text)[:200])
    return text


def _history(record: Mapping[str, Any], key: str | None) -> list[dict[str, Any]]:
    """Return earlier turns as messages."""
    turns = record.get(key or "") or []
    if not isinstance(turns, list) or not all(isinstance(each, list) and len(each) == 2 for each in turns):
        raise refusal(f"field {key!r} is no history", "pairs of a question and an answer", repr(turns)[:200])
    return [
        {"role": role, "content": str(text)}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _openai(value: Any) -> Any:
    """Return a value; if it is a message of ShareGPT (from, value), or a list of such, in the form of OpenAI."""
    if isinstance(value, dict) and "from" in value and "role" not in value:
        return [_said(value)]
    is_list = isinstance(value, list) and any(isinstance(each, dict) and "from" in each for each in value)
    return [_said(each) if isinstance(each, dict) and "from" in each else each for each in value] if is_list else value


def _said(message: dict[str, Any]) -> dict[str, Any]:
    role, value = ROLES.get(message["from"]), message.get("value")
    if role is None or not isinstance(value, str):
        expected = f"from: one of {', '.join(ROLES)}; value: a text"
        raise refusal("a message has an unknown author or no text", expected, repr(message)[:200])
    if message["from"] != "function_call":
        return {"role": role, "content": value}
    try:
        call = json.loads(value)
        function = {"name": call["name"], "arguments": call.get("arguments") or {}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise refusal("a function_call is no call", 'JSON: {"name": …, "arguments": …}', value[:200]) from error
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": function}]}
