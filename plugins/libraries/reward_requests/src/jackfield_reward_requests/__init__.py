"""Requests of rewards to services behind HTTP: templates, secrets and failures."""

from __future__ import annotations

from jackfield_reward_requests.client import AiohttpClient
from jackfield_reward_requests.loopback import loopback_server
from jackfield_reward_requests.service import (
    RequestFailed,
    Service,
    failed,
    finite,
    idempotency,
    read_json,
    secret_headers,
    shown_url,
)
from jackfield_reward_requests.templates import check_template, field_of, fill, fill_text, find, names

__all__ = [
    "AiohttpClient",
    "RequestFailed",
    "Service",
    "check_template",
    "failed",
    "field_of",
    "fill",
    "fill_text",
    "find",
    "finite",
    "idempotency",
    "loopback_server",
    "names",
    "read_json",
    "secret_headers",
    "shown_url",
]
