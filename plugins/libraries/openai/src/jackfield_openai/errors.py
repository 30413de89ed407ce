"""What a client did wrong, as the endpoint says it."""

from __future__ import annotations

from typing import Any

_INVALID = "invalid_value"  #: OpenAI's code


class ClientError(Exception):
    """What a client did wrong, in OpenAI's words.

    Args:
        message: for people.
        code: OpenAI's (``invalid_value``).
        param: the field of the body.
        status: of HTTP.
    """

    def __init__(self, message: str, code: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.code, self.param, self.status = message, code, param, status


def refused(name: str, expected: str, found: Any, code: str = _INVALID) -> ClientError:
    """A bad field of a body."""
    return ClientError(f"{name} cannot be served: expected {expected}; found {repr(found)[:200]}", code, name)
