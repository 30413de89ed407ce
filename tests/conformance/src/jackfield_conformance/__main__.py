"""``python -m jackfield_conformance``: pytest on one plugin, with none of the configuration of the current folder.

This is what ``jackfield plugins check`` starts, in the interpreter where the plugin runs. Exit codes: 0 certified,
1 not certified, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from jackfield_conformance.registry import TIERS
from jackfield_conformance.runner import level_table

_INI = Path(__file__).with_name("pytest.ini")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a plugin, or with ``--table`` show certificates that are there."""
    options = _parser().parse_args(arguments)
    if options.table:
        found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(options.table).glob("*.json"))]
        print("\n".join(level_table(found)))
        return 0 if found else 1
    if not options.plugin:
        print("could not run: say which plugin is to be checked: --plugin KIND:NAME", file=sys.stderr)
        return 2
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryDirectory(prefix="jackfield-check-") as folder:
        certificate = Path(options.certificate or Path(folder, "certificate.json")).absolute()
        certificate.unlink(missing_ok=True)
        command = ["-c", str(_INI), "--rootdir", os.getcwd(), "--noconftest", "-v", "--tb=short"]
        command += ["-p", "no:cacheprovider"]
        command += ["-p", "jackfield_conformance.pytest_plugin", "-p", "pytest_timeout"]
        command += [*(f"--tier={tier}" for tier in options.tier), "--certificate", str(certificate)]
        command += ["--plugin", options.plugin, "--pyargs", "jackfield_conformance"]
        with contextlib.redirect_stdout(sys.stderr) if options.quiet_stdout else contextlib.nullcontext():
            code = pytest.main(command)
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not certificate.exists():
            return 2
        return 0 if json.loads(certificate.read_text(encoding="utf-8"))["level"] != "none" else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jackfield_conformance", description=__doc__)
    parser.add_argument("--plugin", metavar="KIND:NAME", help="the installed plugin to check")
    parser.add_argument("--tier", action="append", default=[], choices=TIERS, help="run this tier, too; repeatable")
    parser.add_argument("--certificate", metavar="FILE", help="write the JSON certificate here")
    parser.add_argument("--quiet-stdout", action="store_true", help="write the report to stderr")
    parser.add_argument("--table", metavar="FOLDER", help="print the table plugin × level of a folder's certificates")
    return parser


if __name__ == "__main__":
    sys.exit(main())
