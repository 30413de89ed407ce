"""Exports, read by the programs that they are for."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes

from .conftest import ANSWER, CALL, EVIL, KEY, RunFolder, Trace, record

SCORE = {"key": KEY, "score": 0.75, "status": "ok", "reward": "judge", "explanation": "right", "time": 1.8e9}


def spans_of(text: str) -> list[Span]:
    """Return the spans of an export, read with OpenTelemetry's own messages.

    OTLP has its ids in hexadecimal, JSON of Protocol Buffers in base64.
    """
    plain = json.loads(text)
    for span in (span for one in plain["resourceSpans"] for scope in one["scopeSpans"] for span in scope["spans"]):
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    request = json_format.ParseDict(plain, ExportTraceServiceRequest())
    return [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]


def attributes(values: Any) -> dict[str, Any]:
    """Return attributes as Python values."""

    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {each.key: value_of(each.value) for each in values}


@pytest.fixture
def spans(run_folder: RunFolder, trace: Trace) -> list[Span]:
    run_folder.table(1, record())
    run_folder.scores(SCORE)
    return spans_of(trace(run_folder.folder, KEY, "--export", "otel").output)


def test_a_rollout_is_one_trace_of_spans(spans: list[Span]) -> None:
    root, *others = spans
    names = [f"chat {root_model(root)}", "execute_tool add", f"chat {root_model(root)}"]
    assert ["invoke_agent rollout", *names] == [span.name for span in spans]
    assert 1 == len({span.trace_id for span in spans})
    assert (16, {8}) == (len(root.trace_id), {len(span.span_id) for span in spans})
    assert len(spans) == len({span.span_id for span in spans})
    assert b"" == root.parent_span_id
    assert {root.span_id} == {span.parent_span_id for span in others}


def root_model(root: Span) -> str:
    return str(attributes(root.attributes)["gen_ai.request.model"])


def test_spans_have_their_times(spans: list[Span]) -> None:
    """The beginning is estimated from the time of the score."""
    root, first, tool, last = spans
    began, end = 1_800_000_000_000_000_000 - 1_500_000_000, 1_800_000_000_000_000_000
    times = [(span.start_time_unix_nano - began, span.end_time_unix_nano - began) for span in (first, tool, last)]
    expected = [(0, 500_000_000), (550_000_000, 750_000_000), (800_000_000, 1_500_000_000)]
    for found, known in zip(times, expected, strict=True):
        assert pytest.approx(known, abs=1000) == found
    assert pytest.approx((began, end), abs=1000) == (root.start_time_unix_nano, root.end_time_unix_nano)


def test_spans_have_the_attributes_of_the_conventions(spans: list[Span]) -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.isupper() and isinstance(value, str)}
    found = {each.key for span in spans for each in span.attributes}
    found |= {each.key for span in spans for event in span.events for each in event.attributes}
    assert not {name for name in found if not name.startswith("jackfield.")} - known - {error_attributes.ERROR_TYPE}
    root, first, tool, _ = spans
    operations = [attributes(span.attributes)["gen_ai.operation.name"] for span in (root, first, tool)]
    assert ["invoke_agent", "chat", "execute_tool"] == operations
    assert [Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL] == [
        span.kind for span in (root, first, tool)
    ]
    chat = attributes(first.attributes)
    assert (9, ["stop"]) == (chat["gen_ai.usage.output_tokens"], chat["gen_ai.response.finish_reasons"])
    (said,) = json.loads(chat["gen_ai.output.messages"])
    assert CALL == said["parts"][0]["content"]
    call = attributes(tool.attributes)
    assert ("add", {"a": 2}) == (call["gen_ai.tool.name"], json.loads(call["gen_ai.tool.call.arguments"]))
    assert Status.STATUS_CODE_ERROR == tool.status.code
    assert "tool_error" == call["error.type"]


def test_scores_and_notes_are_events(spans: list[Span]) -> None:
    found = {event.name: attributes(event.attributes) for event in spans[0].events}
    assert {"gen_ai.evaluation.result", "note"} == found.keys()
    score = found["gen_ai.evaluation.result"]
    assert ("judge", 0.75, "right") == tuple(
        score[f"gen_ai.evaluation.{name}"] for name in ("name", "score.value", "explanation")
    )
    assert EVIL == found["note"]["jackfield.event.text"]


def test_all_rollouts_of_a_step_are_exported_together(run_folder: RunFolder, trace: Trace, tmp_path: Path) -> None:
    run_folder.table(1, record(), record("train/0/3/0/2/0"))
    run_folder.table(2, record("train/1/3/0/2/0"))
    file = tmp_path / "spans.json"
    assert 0 == trace(run_folder.folder, "--step", 1, "--export", "otel", "--out", file).exit_code
    assert 2 == len({span.trace_id for span in spans_of(file.read_text())})
    again = trace(run_folder.folder, "--step", 1, "--export", "otel").output
    assert {span.span_id for span in spans_of(file.read_text())} == {span.span_id for span in spans_of(again)}


def test_sharegpt_has_the_conversation(run_folder: RunFolder, trace: Trace) -> None:
    run_folder.table(1, record())
    (one,) = json.loads(trace(run_folder.folder, KEY, "--export", "sharegpt").output)
    end = "<|im_end|>"
    assert [
        {"from": "system", "value": "You add."},
        {"from": "human", "value": "2 + 2?"},
        {"from": "gpt", "value": CALL.removesuffix(end)},
        {"from": "observation", "value": EVIL},
        {"from": "gpt", "value": ANSWER.removesuffix(end)},
    ] == one["conversations"]
    assert (KEY, 0.75, "sum-3", 1) == (one["id"], one["reward"], one["task"], one["step"])
