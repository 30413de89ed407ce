"""The core's own plugins keep their contracts, like everybody's."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify


@pytest.mark.timeout(180)
@pytest.mark.parametrize("plugin", ["reward:function"])
def test_the_plugin_is_certified(plugin: str) -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify(plugin).level
