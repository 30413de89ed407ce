"""Settings of the endpoint; importable without a web server."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt, le

from jackfield.sdk import option
from jackfield_tool_calls import Format


@attrs.frozen(kw_only=True)
class EndpointConfig:
    """An OpenAI-compatible address beside a replica."""

    port: int = option(0, "of the first replica, the next ones count on; 0: a free one", [ge(0), le(65535)])
    api_key: str | None = option(None, "what clients send as bearer token; needed where it does not listen on loopback")
    model_name: str | None = option(None, "under which clients ask for the model; null: any name will do")
    request_seconds: float = option(600.0, "the longest that one request may take", gt(0.0))
    max_body_bytes: int = option(16 * 2**20, "a longer request is refused", gt(0))
    max_choices: int = option(512, "answers of one request, prompts times n; more are refused", ge(1))
    max_connections: int = option(512, "at a time; further ones are answered with 503", ge(1))
    idle_seconds: float = option(
        30.0, "a connection is closed that has sent no whole header for so long, at first or after an answer", gt(0.0)
    )
    tool_format: Literal["auto"] | Format = option(
        "auto", "of tool calls in the model's answers, by the name of its family; auto: as its chat template shows them"
    )
    collect: str | None = option(None, "folder in which answers are kept as samples, with users' rewards; null: none")
    collect_lines: int = option(10_000, "lines that may wait for the disk; further ones are dropped and counted", ge(1))
    body_seconds: float = option(30.0, "the longest that a request's body may take to come", gt(0.0))
