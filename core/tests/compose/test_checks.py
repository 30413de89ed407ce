"""Tests that a configuration is refused if its plugins do not declare the capabilities that it needs."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.compose.checks import check_capabilities
from jackfield.config import make_config
from jackfield.errors import ConfigError
from jackfield.plugins import Manifest
from jackfield_testing import refused

EVERYTHING = {"rollout": {"weights_delta": "full", "weights_float8": "partial"}, "checkpoint_engine": {"delta": "full"}}


class FakeRegistry:
    """A registry that finds plugins of any name."""

    def __init__(self, **capabilities: Any) -> None:
        self._capabilities = capabilities

    def find(self, kind: str, name: str) -> Manifest:
        declared = self._capabilities.get(kind, {})
        return Manifest(name=name, kind=kind, abi="1.0", object="a:B", config="a:C", capabilities=declared)  # type: ignore[arg-type]


def check(*overrides: str, **capabilities: Any) -> None:
    config = make_config({"model": {"path": "somewhere"}}, overrides)
    check_capabilities(config, FakeRegistry(**capabilities))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "kind", "capability"),
    [
        ("weights.kind=delta", "rollout", "weights_delta"),
        ("weights.kind=delta", "checkpoint_engine", "delta"),
        ("weights.dtype=float8_e4m3fn", "rollout", "weights_float8"),
    ],
)
def test_weights_are_sent_to_those_who_can_load_them(override: str, kind: str, capability: str) -> None:
    """Formats that every server loads need no declaration."""
    check()
    check("weights.dtype=bfloat16")
    check(override, **EVERYTHING)
    declared = {**EVERYTHING, kind: {**EVERYTHING[kind], capability: "unsupported"}}
    with refused("plugin.capability", capability) as caught:
        check(override, **declared)
    assert "plugin.capability" == caught.value.code


@pytest.mark.parametrize("override", ["weights.kind=delta", "weights.dtype=float8_e4m3fn"])
def test_an_adapter_is_sent_as_it_is(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(override, "model.lora={rank: 2}", **EVERYTHING)
    assert override.partition("=")[0] == caught.value.where
