"""The queue over the embedded backend agrees with a model of it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


@pytest.mark.timeout(240)
def test_the_queue_does_what_its_model_does() -> None:
    from jackfield_queue_machine import check_queue_against_model

    check_queue_against_model(examples=40, steps=50)
