"""The plugin keeps its contract: the certificate run of ``jackfield plugins check ray``, in a real cluster."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify
from jackfield_queue_model import check_against_model
from jackfield_transport_ray.backend import RayBackend
from jackfield_transport_ray.config import Config


@pytest.mark.timeout(180)
def test_the_plugin_is_certified() -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify("transfer_queue:ray").level


@pytest.mark.timeout(120)
def test_the_queue_is_a_dict() -> None:
    check_against_model(lambda context: RayBackend(Config(), context), examples=5)
