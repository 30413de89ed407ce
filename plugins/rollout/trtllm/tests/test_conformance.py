"""The certificate run of ``jackfield plugins check trtllm``, where there are a GPU and TensorRT-LLM: not run yet."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify


@pytest.mark.needs("cuda", "module:tensorrt_llm")
@pytest.mark.timeout(1800)
def test_the_plugin_is_certified() -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify("rollout:trtllm").level
