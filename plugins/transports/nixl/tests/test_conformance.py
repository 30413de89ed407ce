"""The plugins keep their contracts: the certificate runs of ``jackfield plugins check``, over UCX in host memory."""

from __future__ import annotations

import pytest

from jackfield_conformance import certify
from jackfield_queue_machine import check_queue_against_model
from jackfield_queue_model import check_against_model
from jackfield_transport_nixl.backend import NIXLBackend
from jackfield_transport_nixl.config import QueueConfig


@pytest.mark.timeout(180)
def test_the_engine_is_certified() -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify("checkpoint_engine:nixl").level


@pytest.mark.timeout(180)
def test_the_queue_is_certified() -> None:
    """Every check of the base tier, and of what the manifest declares, passes, with transfers of even small values."""
    assert "full" == certify("transfer_queue:nixl").level


@pytest.mark.timeout(120)
def test_the_queue_is_a_dict() -> None:
    settings = QueueConfig(inline_bytes=24, region_bytes=1 << 16)
    check_against_model(lambda context: NIXLBackend(settings, context), examples=5)


@pytest.mark.timeout(120)
def test_a_queue_with_nixl_does_what_its_model_does() -> None:
    """The store is in this process: one of its own imports torch and NIXL, and each crash of a history starts one."""
    settings = QueueConfig(inline=True, inline_bytes=4)
    check_queue_against_model(lambda context: NIXLBackend(settings, context), examples=2)
