"""What the checks hold to be left behind by a plugin."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from jackfield_conformance.support import processes

_LOOK = """
from jackfield_conformance.support.processes import shared_memory, shared_memory_since
before = shared_memory()
print("ready", flush=True)
input()
print(shared_memory_since(before))
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"jackfield-test-{uuid.uuid4().hex}"
    if not path.parent.exists():
        pytest.skip("no /dev/shm on this machine")
    yield path
    path.unlink()


def test_shared_memory_that_another_process_holds_is_not_the_plugin_s(segment: Path) -> None:
    """Tests that run beside each other leave each other alone."""
    with subprocess.Popen(
        [sys.executable, "-c", _LOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as looks:
        assert looks.stdin is not None
        assert looks.stdout is not None
        assert looks.stdout.readline() == "ready\n"
        before = processes.shared_memory()
        held = torch.from_file(str(segment), shared=True, size=1)
        theirs, _ = looks.communicate("\n", timeout=60)
    assert segment.name not in theirs
    assert segment.name in processes.shared_memory_since(before)
    del held
    assert segment.name in processes.shared_memory_since(before)  # no process holds it: it was leaked
