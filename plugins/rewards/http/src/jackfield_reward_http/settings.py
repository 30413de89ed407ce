"""Settings of the reward ``http``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.validators import gt

from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_reward_requests import check_template, secret_headers
from jackfield_reward_requests.service import RETRYABLE, SUCCESS, statuses

_BODY_FIELDS = ("data_source", "prompt_str", "solution_str", "ground_truth", "extra_info")


def _template(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    check_template(value, attribute.name)


def _group_template(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    check_template(value, f"group.{attribute.name}", more=("samples",))


def _address(_: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"{value!r} is not an address: it begins with http:// or https://")


@attrs.frozen(kw_only=True)
class AnswerConfig:
    """Where the parts of an answer are: paths such as ``result.score`` or ``items.0.score``.

    An empty path is the whole answer.
    """

    score: str = option("score", "Path of the score, a number or a truth value.")
    dimensions: Mapping[str, str] = option(factory=dict, help="Paths of named parts of the score, by their names.")
    explanation: str | None = option(None, "Path of the explanation; null: there is none.")
    raw: str | None = option(None, "Path of the text that is kept as the raw answer; null: all of it.")
    tokens: str | None = option(None, "Path of the number of tokens that the score has cost; null: none.")
    error: str | None = option(
        None, "Path of the reason why there is no score: if there is anything but null, false or an empty text."
    )


@attrs.frozen(kw_only=True)
class GroupConfig:
    """A single request for a whole group."""

    body: Any = option(
        attrs.Factory(lambda: {"samples": "{samples}"}),
        "Template of the request; {samples} is the list of the bodies of the group's samples, other placeholders are "
        "fields of the first sample.",
        _group_template,
    )
    answers: str = option("results", "Path of the list of answers, one per sample in the same order.")


@attrs.frozen(kw_only=True)
class HttpRewardConfig:
    """Settings of a service that scores."""

    url: str = option(help="Address of the service.", validator=_address)
    method: Literal["POST", "PUT", "PATCH", "GET"] = option("POST", "HTTP method; GET sends no body.")
    headers: Mapping[str, str] = option(
        factory=dict,
        help="Further headers; ${NAME} in a value is an environment variable, and the only way to give a key.",
        validator=secret_headers,
    )
    body: Any = option(
        attrs.Factory(lambda: {name: f"{{{name}}}" for name in _BODY_FIELDS}),
        "Template of the request's JSON: its texts may have placeholders of a request's fields, such as {solution_str} "
        "or {extra_info.name}; a text of exactly one placeholder becomes the value with its type.",
        _template,
    )
    query: Mapping[str, str] = option(factory=dict, help="Templates of the address's parameters.", validator=_template)
    answer: AnswerConfig = option(factory=AnswerConfig, help="Where score, explanation and cost are in the answer.")
    group: GroupConfig | None = option(None, "Ask once for each whole group; null: once for each sample.")
    success: tuple[int | str, ...] = option(SUCCESS, "Statuses of an answer with a score.", statuses)
    retryable: tuple[int | str, ...] = option(
        RETRYABLE, "Statuses after which a sample is scored again; any other ends its scoring.", statuses
    )
    idempotency_header: str | None = option(
        "Idempotency-Key", "Header with a key that is the same for all retries of a sample; null: none."
    )
    health: str | None = option(None, "Address that must answer before the first score; null: none.", _address)
    start_seconds: float = option(30.0, "How long `health` may take to answer with success.", gt(0.0))
    answer_bytes: int = option(16 * 2**20, "Longest answer.", gt(0))
    version: str | None = option(
        None, "Version of the service, with which scores are cached and kept; null: they are never cached."
    )

    def __attrs_post_init__(self) -> None:
        unused = None
        if self.method == "GET" and self.body != _default("body"):
            unused = ("body", "with method GET, which sends no body; use query")
        if self.method == "GET" and self.group is not None:
            unused = ("group", "with method GET, which sends no body")
        if self.group is not None and self.query:
            unused = ("query", "with group, where one request is for several samples")
        if self.health is None and self.start_seconds != 30.0:
            unused = ("start_seconds", "without health")
        if unused:
            name, why = unused
            raise ConfigError(f"{name} has no effect {why}", where=name, fix=f"remove {name}")


def _default(name: str) -> Any:
    default = getattr(attrs.fields(HttpRewardConfig), name).default
    return default.factory()
