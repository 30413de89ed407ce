"""The table of settings is what the code says, and the code says what each setting is for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs

from jackfield.plugins import discover

TOOL = Path(__file__).parents[2] / "tools" / "config_reference.py"


def test_the_table_of_settings_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, timeout=50, check=False
    )
    assert 0 == done.returncode, done.stderr


def test_every_setting_of_an_installed_plugin_says_what_it_is_for() -> None:
    registry = discover()
    silent = [
        f"{record.label}: {field.name}"
        for record in registry.records()
        for field in attrs.fields(registry.settings_class(record.kind, record.name))
        if not field.metadata.get("help")
    ]
    assert [] == silent
