"""The table of settings is what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "config_reference.py"


def test_the_table_of_settings_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, timeout=50, check=False
    )
    assert 0 == done.returncode, done.stderr
