"""The installed plugin is found and fits its contract, and wrong settings are refused early."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.plugins import discover
from jackfield.settings import structure
from jackfield_agent_workflow.settings import Config
from jackfield_testing import refused


def test_the_plugin_is_found_and_passes_its_gates() -> None:
    loaded = discover().load("agent", "workflow")
    assert "jackfield_agent_workflow.agent.WorkflowAgent" == f"{loaded.cls.__module__}.{loaded.cls.__name__}"
    assert loaded.settings_class is Config


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"workflow": "nothing"}, "agent.workflow"),
        ({"workflow": "nowhere.py:Class"}, "agent.workflow"),
        ({"workflow": "module:Class", "turn_tokens": 0}, "agent.turn_tokens"),
        ({"workflow": "module:Class", "environment": {"name": "nothing"}}, "environment.name"),
        ({"workflow": "module:Class", "environment": {"name": "household", "size": 0}}, "agent.environment.size"),
        ({"workflow": "module:Class", "environment": {"nam": "household"}}, "agent.environment.nam"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], where: str) -> None:
    with refused(("config.invalid-value", "config.unknown-key", "config.missing-key"), where):
        structure(Config, settings, "agent")
