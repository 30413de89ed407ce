"""Engines in an interpreter of their own beside the reference of ``jackfield parity``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jackfield_testing import veomni_python

MEASURES = {"weights", "log_probs", "log_probs (training)", "loss", "grad_norm", "gradients", "parameters"}


@pytest.mark.needs("veomni")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "sizes"), [("tiny", "sequence_parallel=2"), ("tiny-moe", "expert_parallel=2")])
def test_veomni_equals_the_reference(model: str, sizes: str) -> None:
    """Two ranks, which share each row or the experts."""
    engine = f"veomni:{sizes},env.python={veomni_python()}@2"
    command = [
        str(Path(sys.executable).with_name("jackfield")),
        "parity",
        engine,
        "--model",
        model,
        "--no-trl",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {} == found["errors"]
    assert MEASURES == {line["measure"] for line in found["comparisons"]}
    assert all(line["ok"] for line in found["comparisons"])
