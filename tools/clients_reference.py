"""Writes the table of clients and features in the guide, from what ``tests/integration/test_openai_clients.py`` found.

python tools/clients_reference.py          # note what the last run of the test found, and write the table
python tools/clients_reference.py --check  # fail if the table differs from the noted results
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "integration" / "openai_clients" / "results.json"
FOUND = ROOT / "build" / "openai_clients"
GUIDE = ROOT / "docs" / "guides" / "openai_clients.md"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"
FEATURES = ("chat", "streaming", "tools", "JSON schema", "log-probs", "completions", "responses", "errors")


def table(results: dict[str, Any]) -> str:
    """Return the table: ``yes`` where a feature works, nothing where the test asks for no such feature."""
    rows = [("client", *FEATURES), ("---",) * (1 + len(FEATURES))]
    for client, found in sorted(results.items()):
        unknown = set(found["features"]) - set(FEATURES)
        assert not unknown, f"{client} has features without a column: {unknown}"
        said = [found["features"].get(name, "") for name in FEATURES]
        rows.append((f"`{client}` {found['version']}", *("yes" if each == "works" else each for each in said)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written(text: str, results: dict[str, Any]) -> str:
    """Return the guide with the table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table(results) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = GUIDE.read_text(encoding="utf-8")
    if check:
        if text != written(text, results):
            sys.exit(f"{GUIDE.relative_to(ROOT)} is not what {Path(__file__).name} writes: run it")
        return
    results |= {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOUND.glob("*.json"))}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    GUIDE.write_text(written(text, results), encoding="utf-8")


if __name__ == "__main__":
    main()
