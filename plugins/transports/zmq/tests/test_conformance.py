"""The plugins keep their contracts: the certificate runs of ``jackfield plugins check``, against real processes."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield_conformance import certify
from jackfield_queue_machine import check_queue_against_model
from jackfield_queue_model import check_against_model
from jackfield_transport_zmq.backend import ZMQBackend
from jackfield_transport_zmq.config import QueueConfig


@pytest.mark.timeout(180)
def test_the_queue_is_certified() -> None:
    """Every check of the base tier, and of what the manifest declares, passes, with two units and shared memory."""
    assert "full" == certify("transfer_queue:zmq").level


@pytest.mark.timeout(180)
def test_the_engine_is_certified() -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify("checkpoint_engine:zmq").level


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"units": 2, "shared_from_bytes": 1}, id="shared_memory"),
        pytest.param({"shared_from_bytes": None, "encrypted": True}, id="encrypted_frames"),
    ],
)
def test_the_queue_is_a_dict(settings: dict[str, Any]) -> None:
    check_against_model(lambda context: ZMQBackend(QueueConfig(**settings), context), examples=5)


def test_a_queue_with_units_does_what_its_model_does() -> None:
    check_queue_against_model(lambda context: ZMQBackend(QueueConfig(units=2), context))
