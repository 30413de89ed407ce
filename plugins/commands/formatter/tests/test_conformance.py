"""The operators keep their contract: the certificate run of ``jackfield plugins check``."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["format", "split_text"])
def test_the_plugin_is_certified(name: str) -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify(f"operator:{name}").level
