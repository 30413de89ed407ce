"""The memory backend agrees with a plain dict over random histories."""

from __future__ import annotations

import pytest

from jackfield.queue.values import MemoryBackend, MemoryConfig

pytest.importorskip("torch")


def test_the_memory_backend_is_a_dict() -> None:
    from jackfield_queue_model import check_against_model

    check_against_model(lambda context: MemoryBackend(MemoryConfig(), context))
