"""What each test costs, as the last run of CI has measured it.

    python3 tools/costs.py              # the twenty costliest tests and files
    python3 tools/costs.py --count 50
    python3 tools/costs.py --write      # expected_seconds.json, from which a clean checkout orders its test files

``seconds`` is wall-clock time with fixtures, which depends on what else the machine did; ``processor`` is the processor
time of the test's process and of the processes that it waited for. A test of more than 30 s of processor time has a
reason in ``[tool.jackfield.costs]`` of pyproject.toml, or the list says that it has none.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections import defaultdict
from pathlib import Path

from packages import ROOT

COSTS = ROOT / "build" / "tests" / "costs.json"
EXPECTED = ROOT / "tools" / "expected_seconds.json"  #: by test file
DEAR = 30.0  #: seconds of processor time from which a test needs a reason

_TIMEOUT = re.compile(r"mark\.timeout\((\d+)")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="rows of each list")
    parser.add_argument("--write", action="store_true", help="write the seconds of each file for clean checkouts")
    arguments = parser.parse_args()
    count, known = arguments.count, _read()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["jackfield"]
    reasons: dict[str, str] = settings.get("costs", {})
    files: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "processor_seconds": 0.0})
    for name, cost in known.items():
        for key, value in cost.items():
            files[name.partition("::")[0]][key] += value
    if arguments.write:
        rounded = {name: max(round(cost["seconds"]), 1) for name, cost in sorted(files.items())}
        EXPECTED.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    _show("test", known, count)
    _show("file", files, count)
    dear = [name for name, cost in known.items() if cost.get("processor_seconds", 0.0) > DEAR]
    for name in sorted(set(dear) - set(reasons)):
        print(f"more than {DEAR:g} s of processor time, and no reason in pyproject.toml: {name}")


def expected_seconds(files: list[Path]) -> dict[Path, float]:
    """The seconds that test files took last time, here or where ``--write`` was given, or a guess for new files."""
    measured: dict[str, float] = defaultdict(float)
    known: dict[str, float] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    for name, cost in _read().items():
        measured[name.partition("::")[0]] += cost["seconds"]
    names = {file: str(file.relative_to(ROOT)) for file in files}
    return {file: measured.get(name) or known.get(name) or _guess(file) for file, name in names.items()}


def _guess(file: Path) -> float:
    text = file.read_text(encoding="utf-8")
    deadlines = [float(found) for found in _TIMEOUT.findall(text)]
    return len(text) / 2000 + max(deadlines, default=0.0) / 4


def _read() -> dict[str, dict[str, float]]:
    if not COSTS.exists():
        return {}
    known: dict[str, dict[str, float]] = json.loads(COSTS.read_text(encoding="utf-8"))
    return known


def _show(kind: str, known: dict[str, dict[str, float]], count: int) -> None:
    print(f"{'seconds':>9}  {'processor':>9}  {kind}")
    for name, cost in sorted(known.items(), key=lambda entry: -entry[1]["seconds"])[:count]:
        print(f"{cost['seconds']:9.1f}  {cost.get('processor_seconds', 0.0):9.1f}  {name}")
    print(f"{sum(cost['seconds'] for cost in known.values()):9.1f}  {'':9}  sum of {len(known)}")


if __name__ == "__main__":
    main()
