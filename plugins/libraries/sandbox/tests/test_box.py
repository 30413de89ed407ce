"""A box runs code with the standard library alone, and says how it ended."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys, tempfile
from jackfield_sandbox.box import Box, probe
assert "jackfield" not in sys.modules
limits = {"seconds": 10, "memory_bytes": 2**30, "disk_bytes": 2**26, "processes": 16, "output_bytes": 2**20}
limits |= {"readable": [], "command": None, "python": None, "program": "main.py"}
found = []
for code in ("print(input() * 2)", "raise SystemExit(3)", "while True: pass"):
    with tempfile.TemporaryDirectory() as folder:
        box = Box("none", limits, folder)
        seconds = 0.2 if "while" in code else 10.0
        reply = box.ask({"do": "stdin", "code": code, "stdin": "ab", "seconds": seconds})
        box.close()
    found.append([reply["end"], reply["status"], reply["out"]])
print(json.dumps(found))
"""


def test_code_runs_and_its_end_is_told() -> None:
    """In a process of its own, since a box kills every descendant of its process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False)
    assert [["exit", 0, "abab\n"], ["exit", 3, ""], ["time", 0, ""]] == json.loads(done.stdout or "null"), done.stderr


def test_a_box_that_cannot_start_says_why() -> None:
    program = (
        PROGRAM.partition("found = []")[0]
        + """
from jackfield_sandbox.box import Lost
with tempfile.TemporaryDirectory() as folder:
    try:
        Box("none", {**limits, "python": "/bin/false"}, folder)
    except Lost as error:
        print(error)
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert "it ended\n" == done.stdout, done.stderr
