"""Processes of a queue are killed at random for a while: nothing is lost, and nothing is used twice.

``JACKFIELD_FAULT_SECONDS=180 pytest -s tests/faults`` does it for longer; ``JACKFIELD_FAULT_SEED`` chooses the seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = float(os.environ.get("JACKFIELD_FAULT_SECONDS", "7"))
SEED = os.environ.get("JACKFIELD_FAULT_SEED", "6")
CASES = [("zmq", "restored"), ("sql", "recovered")]


@pytest.mark.parametrize(("backend", "how"), CASES)
@pytest.mark.timeout(SECONDS + 110)
def test_nothing_is_lost_or_doubled_though_processes_are_killed(tmp_path: Path, backend: str, how: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("queue_faults.py")), backend, str(tmp_path / "run")]
    done = subprocess.run(
        [*command, str(SECONDS), SEED], capture_output=True, text=True, timeout=SECONDS + 100, check=False
    )
    assert 0 == done.returncode, done.stderr[-6000:]
    counted = json.loads(done.stdout.splitlines()[-1])
    print(backend, json.dumps(counted))
    assert (0, 0) == (counted["rows_lost"], counted["rows_doubled"])
    assert counted["steps"] > 0
    ((rows, stored),) = counted["left_in_queue"]
    assert rows == stored, "the store holds what the queue knows, and nothing else"
    assert counted["killed"]["controller"] == counted[how] > 0
