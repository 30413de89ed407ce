"""Rollouts for other programs: conversations as ShareGPT JSON, and OpenTelemetry spans as OTLP JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from jackfield import __version__
from jackfield_trace.chat import Message, messages_of, prompt_and_answers
from jackfield_trace.rollouts import Event, Rollout, Score, generations, number, shown_event, tool_name
from jackfield_trace.texts import plain_json

_FROM = {"user": "human", "assistant": "gpt", "tool": "observation"}
_INTERNAL, _CLIENT, _ERROR = 1, 3, 2  #: kinds of spans, and a status, of OTLP
_PROVIDER = "jackfield"


def sharegpt(rollouts: Sequence[Rollout]) -> str:
    """Return a JSON array with one conversation per sequence: ``conversations`` of ``from`` and ``value``."""
    found = []
    for rollout in rollouts:
        for one in rollout.sequences:
            said = [{"from": _FROM.get(each.role, each.role), "value": each.content} for each in messages_of(one)]
            about: dict[str, Any] = {"task": rollout.task, "step": rollout.step, "reward": one.reward}
            found.append({"id": one.key, "conversations": said, **about})
    return _json(found, indent=2)


def otlp(rollouts: Sequence[Rollout]) -> str:
    """Return the export request of OTLP as JSON, with one trace per rollout.

    A rollout is a span ``invoke_agent``, its generations are spans ``chat``, and its tool calls ``execute_tool``, with
    the attributes of the semantic conventions for generative AI. Scores are events ``gen_ai.evaluation.result``.
    """
    resource = {"attributes": _attributes({"service.name": "jackfield", "service.version": __version__})}
    spans = [span for rollout in rollouts for span in _spans(rollout)]
    scope = {"scope": {"name": "jackfield_trace", "version": __version__}, "spans": spans}
    return _json({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})


def _spans(rollout: Rollout) -> list[dict[str, Any]]:
    place = f"{rollout.source}/{rollout.step}/{rollout.key}"
    began = (rollout.time or 0.0) - rollout.seconds
    trace, root = xxhash.xxh3_128_hexdigest(place.encode()), xxhash.xxh3_64_hexdigest(place.encode())
    made = [_root(rollout, began)]
    answers = iter(_answers(rollout))
    for each in map(shown_event, rollout.events):
        if each.name == "generate":
            made.append(_chat(rollout, each, began, next(answers, None)))
        elif each.name == "tool":
            made.append(_tool(each, began))
        else:
            fields = {f"jackfield.event.{name}": value for name, value in each.fields.items()}
            made[0]["events"].append(_event(each.name, began + each.end, fields))
    for at, span in enumerate(made):
        own = {"spanId": xxhash.xxh3_64_hexdigest(f"{place}/{at}".encode()), "parentSpanId": root}
        span |= {"traceId": trace, **(own if at else {"spanId": root})}
    return made


def _root(rollout: Rollout, began: float) -> dict[str, Any]:
    parents = [-1 if one.parent is None else one.parent for one in rollout.sequences]
    name = rollout.sequences[0].name or "rollout"
    before, _ = prompt_and_answers(messages_of(rollout.sequences[0]))
    values: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.agent.name": name,
        "gen_ai.conversation.id": rollout.key,
        "gen_ai.request.model": rollout.model or None,
        "gen_ai.response.finish_reasons": [one.finish_reason for one in rollout.sequences if one.finish_reason] or None,
        "gen_ai.input.messages": _messages(before),
        "jackfield.task": rollout.task or None,
        "jackfield.step": rollout.step,
        "jackfield.turns": rollout.turns,
        "jackfield.end_reason": rollout.end_reason or None,
        "jackfield.rewards": rollout.rewards or None,
        "jackfield.sequences": [one.key for one in rollout.sequences],
        "jackfield.sequence.parents": parents,
        "jackfield.sequence.relations": [one.relation for one in rollout.sequences],
        "jackfield.start_is_estimated": True,
        **{f"jackfield.metric.{name}": number(value) for name, value in (rollout.told.get("metrics") or {}).items()},
    }
    scores = [
        _event("gen_ai.evaluation.result", began + rollout.seconds, _evaluation(score, one.key))
        for one in rollout.sequences
        for score in one.scores
    ]
    return {**_span(f"invoke_agent {name}", _INTERNAL, began, began + rollout.seconds, values), "events": scores}


def _chat(rollout: Rollout, event: Event, began: float, answer: str | None) -> dict[str, Any]:
    fields, reason = event.fields, event.fields.get("finish_reason")
    said = {"role": "assistant", "parts": [{"type": "text", "content": answer}], "finish_reason": reason or "stop"}
    values: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": rollout.model or None,
        "gen_ai.usage.output_tokens": fields.get("tokens"),
        "gen_ai.response.finish_reasons": [str(reason)] if reason else None,
        "gen_ai.output.messages": None if answer is None else _json([said]),
        "jackfield.weight_version": fields.get("weight_version"),
    }
    name = f"chat {rollout.model}".rstrip()
    return _span(name, _CLIENT, began + event.start, began + event.end, values)


def _tool(event: Event, began: float) -> dict[str, Any]:
    fields, name = event.fields, tool_name(event.fields) or "tool"
    values: dict[str, Any] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": fields.get("id"),
        "gen_ai.tool.call.arguments": _given(fields.get("arguments")),
        "gen_ai.tool.call.result": _given(fields.get("result") or fields.get("text")),
        "error.type": str(fields.get("error") or "tool_error") if event.failed else None,
    }
    span = _span(f"execute_tool {name}", _INTERNAL, began + event.start, began + event.end, values)
    return {**span, "status": {"code": _ERROR}} if event.failed else span


def _evaluation(score: Score, key: str) -> dict[str, Any]:
    return {
        "gen_ai.evaluation.name": score.name or "reward",
        "gen_ai.evaluation.score.value": score.score if score.status == "ok" else None,
        "gen_ai.evaluation.explanation": score.explanation or None,
        "error.type": score.status if score.status != "ok" else None,
        "jackfield.sequence": key,
    }


def _answers(rollout: Rollout) -> list[str]:
    """Return the texts of the turns, if it is known which generation made which."""
    if generations(rollout) is None:
        return []
    return [piece.text for piece in rollout.sequences[0].pieces if piece.turn is not None]


def _span(name: str, kind: int, start: float, end: float, values: Mapping[str, Any]) -> dict[str, Any]:
    times = {"startTimeUnixNano": _nanos(start), "endTimeUnixNano": _nanos(max(start, end))}
    return {"name": name, "kind": kind, **times, "attributes": _attributes(values)}


def _event(name: str, time: float, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "timeUnixNano": _nanos(time), "attributes": _attributes(values)}


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _any(value)} for name, value in values.items() if value is not None]


def _any(value: Any) -> dict[str, Any]:
    """Return a value of OTLP; objects are JSON texts."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)} if abs(value) < 2**63 else {"stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value} if number(value) is not None else {"stringValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_any(each) for each in value]}}
    return {"stringValue": value if isinstance(value, str) else _json(value)}


def _messages(messages: Sequence[Message]) -> str:
    return _json([{"role": each.role, "parts": [{"type": "text", "content": each.content}]} for each in messages])


def _given(value: Any) -> str | None:
    return value if isinstance(value, str) or value is None else _json(value)


def _nanos(time: float) -> str:
    return str(max(0, round(time * 1e9)))


def _json(value: Any, indent: int | None = None) -> str:
    """Return JSON that a terminal, too, can show."""
    return plain_json(json.dumps(value, ensure_ascii=False, indent=indent, default=str))
