"""The installed plugin is found and fits its contract."""

from __future__ import annotations

import pytest

from jackfield.errors import ConfigError
from jackfield.plugins import discover
from jackfield.sdk import structure


def test_the_plugin_is_found_and_passes_its_gates() -> None:
    """Its settings have one kind of program."""
    loaded = discover().load("agent", "gateway")
    assert "jackfield_agent_gateway.agent.GatewayAgent" == f"{loaded.cls.__module__}.{loaded.cls.__name__}"
    assert structure(loaded.settings_class, {"program": {"external": True}}, "agent").external
    for program in ({}, {"external": True, "call": "a:b"}, {"command": []}):
        with pytest.raises(ConfigError) as found:
            structure(loaded.settings_class, {"program": program}, "agent")
        assert "config.invalid-value" == found.value.code
