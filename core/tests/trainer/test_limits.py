"""How many devices a run uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.config import make_config
from jackfield.trainer.limits import Limits


@pytest.mark.parametrize(
    ("shares", "devices"), [(True, 8), (False, 12)], ids=["shared devices count once", "own devices"]
)
def test_device_seconds_count_every_device_of_a_replica(shares: bool, devices: int) -> None:
    workers = SimpleNamespace(
        ranks={"actor": [None] * 4, "reference": [None] * 4}, replicas=2, replica_devices=4, shares_devices=shares
    )
    role: Any = SimpleNamespace(config=make_config({"model": {"path": "none"}}), workers=workers)
    limits = Limits(role=role)
    limits.count(1, [{"response_tokens": 5}], 2.0)
    assert 2.0 * devices == limits.used["device_seconds"]
