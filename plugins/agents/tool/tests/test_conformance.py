"""Both plugins keep their contract: the certificate runs of ``jackfield plugins check``."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["tool", "tool_images"])
def test_the_plugin_is_certified(name: str) -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify(f"agent:{name}").level
