"""Settings of the backend, and fixtures for the checks; importable without redis."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import gt

from jackfield.errors import ConfigError, PluginError
from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """Settings of the server's address, and the durability required of it."""

    url: str = option("redis://127.0.0.1:6379/0", "redis://user@host:port/number, rediss:// with TLS, or unix:///path.")
    password_variable: str = option(
        "JACKFIELD_REDIS_PASSWORD", "Environment variable with the password, where the URL has none."
    )
    queue: str | None = option(
        None, "Whose rows, where several queues share a server; null: a name kept in the queue's folder."
    )
    durability: Literal["always", "everysec", "none"] = option(
        "everysec",
        "What the server's log has to promise, checked at the start. always: a put that returned is on disk; "
        "everysec: the server's death may cost what the last seconds put; none: rows live as long as the server.",
    )
    seconds: float = option(30.0, "Longest time for one request, with attempts to connect again.", gt(0.0))

    def __attrs_post_init__(self) -> None:
        if not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError(
                "the URL is not that of a Redis server",
                where="url",
                expected="redis://user@host:port/number, rediss://… or unix:///path",
                found=self.url.partition(":")[0] + ":…",
            )


URL_VARIABLE = "JACKFIELD_REDIS_URL"


def server(folder: Path) -> dict[str, Any]:
    """Settings: the server of ``JACKFIELD_REDIS_URL`` in the environment, which has to be set; its rows stay on it."""
    url = os.environ.get(URL_VARIABLE)
    if not url:
        raise PluginError(
            "the checks need a Redis server",
            code="plugin.check",
            where=URL_VARIABLE,
            fix=f"start one (redis-server --appendonly yes) and set {URL_VARIABLE}=redis://127.0.0.1:6379/0",
        )
    return {"settings": {"url": url}}
