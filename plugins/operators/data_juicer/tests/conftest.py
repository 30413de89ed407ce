"""Data-Juicer's own interpreter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jackfield_testing import data_juicer_python

CONFORMANCE = Path(__file__).parents[4] / "tests" / "conformance" / "src"


@pytest.fixture
def there(tmp_path: Path) -> Callable[..., str]:
    """``there(arguments, seconds)``: run Data-Juicer's interpreter, which finds the conformance suite, in a folder."""

    def run(*arguments: str, seconds: float = 580.0) -> str:
        command = [str(data_juicer_python()), "-P", *arguments]
        variables = os.environ | {"PYTHONPATH": str(CONFORMANCE), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=seconds)
        assert 0 == done.returncode, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    return run
