"""``python -m jackfield_conformance``: pytest on one plugin, without the configuration of the current folder.

``jackfield plugins check`` starts it in the interpreter where the plugin runs. It takes arguments of pytest, such as
``--plugin KIND:NAME``. Exit codes: 0 certified, 1 not certified, 2 could not run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_INI = Path(__file__).with_name("pytest.ini")


def main(arguments: Sequence[str]) -> int:
    """Check a plugin, and return the exit code."""
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = ["-c", str(_INI), "--rootdir", os.getcwd(), "--noconftest", "-v", "--tb=short"]
    for plugin in ("no:cacheprovider", "jackfield_conformance.pytest_plugin", "pytest_timeout"):
        command += ["-p", plugin]
    code = pytest.main([*command, *arguments, "--pyargs", "jackfield_conformance"])
    return int(code) if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
