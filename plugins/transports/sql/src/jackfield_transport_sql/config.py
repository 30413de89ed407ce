"""Settings of the backend, and fixtures for the checks; importable without SQLAlchemy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import gt, le

from jackfield.errors import ConfigError
from jackfield.sdk import option

#: Tags of the trainer's rows that are columns of the view, unless told otherwise.
TAG_COLUMNS = (
    "task",
    "rollout",
    "prompt_tokens",
    "response_tokens",
    "weight_version_min",
    "weight_version_max",
    "finish_reason",
)


@attrs.frozen(kw_only=True)
class Config:
    """Settings of the database's address, and of the columns that people read."""

    url: str | None = option(
        None,
        "postgresql://user@host/database, or sqlite:////absolute/path; null: SQLite, samples.sqlite in the "
        "queue's folder. A password comes best from PGPASSWORD or ~/.pgpass.",
    )
    queue: str | None = option(
        None, "Whose rows, where several queues share a database; null: a name kept in the queue's folder."
    )
    tokenizer: str | None = option(
        None, "Folder with tokenizer.json: prompts and responses become text columns, too (extra `text`)."
    )
    history: bool = option(
        True, "Keep texts, rewards and tags (not tensors) of samples that the queue has forgotten, for people."
    )
    tag_columns: tuple[str, ...] | None = option(
        None, "Tags that are columns of the view; null: as the view has them, at first those of the trainer."
    )
    synchronous: Literal["normal", "full"] = option(
        "normal", "SQLite: normal survives kill -9, full loss of power, too. PostgreSQL always waits for its log."
    )
    connections: int = option(4, "Connections of this process, and threads that use them.", [gt(0), le(4096)])
    seconds: float = option(30.0, "Longest time for one request, with attempts to connect again.", gt(0.0))
    checkpoint_seconds: float = option(3600.0, "Longest time for a checkpoint or its restoring.", gt(0.0))

    def __attrs_post_init__(self) -> None:
        if self.url is not None and not self.url.startswith(("postgresql://", "sqlite:///")):
            raise ConfigError(
                "the URL is of no database that this plugin knows",
                where="url",
                expected="postgresql://user@host/database or sqlite:////absolute/path",
                found=self.url.partition(":")[0] + ":…",
            )
        if self.url is not None and self.synchronous == "full" and self.url.startswith("postgresql"):
            raise ConfigError(
                "synchronous has no effect with PostgreSQL: its puts always wait for the log",
                where="synchronous",
                fix="remove synchronous",
            )
        for name in self.tag_columns or ():
            if not name or '"' in name or "\0" in name or len(name) > 60:
                raise ConfigError(
                    "not a name for a column", where="tag_columns", expected="1 to 60 characters, no quotes"
                )


URL_VARIABLE = "JACKFIELD_SQL_URL"


def database(folder: Path) -> dict[str, Any]:
    """Settings: the database of the environment variable ``JACKFIELD_SQL_URL``; without it, SQLite."""
    url = os.environ.get(URL_VARIABLE)
    return {"settings": {} if url is None else {"url": url}}
