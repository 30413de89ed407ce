"""Settings of the agent ``workflow``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import gt

from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield.sdk.sequences import OnOverflow, OnTemplateChange
from jackfield_environments import EnvironmentConfig


@attrs.frozen(kw_only=True)
class Config:
    """Which class is the agent, and what it gets."""

    workflow: str = option(
        help="The agent's class, a subclass of `jackfield_agent_workflow.Workflow`: `file.py:Class` or `module:Class`."
    )
    settings: Mapping[str, Any] = option(help="Keyword arguments of the class.", factory=dict)
    environment: EnvironmentConfig | None = option(None, "The environment, a pool in each worker; null: none.")
    turn_tokens: int | None = option(
        None, "Most tokens of one answer; null: what is left of sampling.max_new_tokens.", gt(0)
    )
    on_template_change: OnTemplateChange = option(
        "refuse",
        "What to do if the chat template would render earlier turns otherwise than the model saw them: `refuse`, "
        "`fork` (go on in another sequence) or `keep` (go on with what the model saw).",
    )
    on_overflow: OnOverflow = option(
        "truncate", "What to do with a message for which the context has no room: `truncate` it, or `end` the rollout."
    )
    threads: int = option(256, "Most threads of each worker in which a `run` that is not a coroutine runs.", gt(0))

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot name a class."""
        place, colon, name = self.workflow.rpartition(":")
        details: Any = {"where": "agent.workflow", "expected": "file.py:Class or module:Class", "found": self.workflow}
        if not (colon and place and name.isidentifier()):
            raise ConfigError("the workflow is not the name of a class", **details, fix="correct it")
        if place.endswith(".py") and not Path(place).expanduser().is_file():
            raise ConfigError(f"there is no file {place}", **details, fix="correct the path")
