"""The certificate run of ``jackfield plugins check sglang``, where there is a GPU and SGLang: it has not run yet."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify


@pytest.mark.needs("cuda", "module:sglang")
@pytest.mark.timeout(1800)
def test_the_plugin_is_certified() -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify("rollout:sglang").level
