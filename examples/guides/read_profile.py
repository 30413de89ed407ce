"""Where the time of a profiled step went: ``python read_profile.py runs/mine/profile/step-5``."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path


def times(trace: Path) -> tuple[Counter[str], Counter[str]]:
    """Seconds of each labelled pass, and seconds of each operator without the operators that it calls."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    passes, operators, open_operators = Counter[str](), Counter[str](), dict[int, list[dict]]()
    for event in sorted((each for each in events if each["ph"] == "X"), key=lambda each: (each["ts"], -each["dur"])):
        if event["cat"] == "user_annotation":
            passes[event["name"]] += event["dur"] / 1e6
        if event["cat"] != "cpu_op":
            continue
        outer = open_operators.setdefault(event["tid"], [])
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= event["ts"]:
            outer.pop()
        if outer:
            operators[outer[-1]["name"]] -= event["dur"] / 1e6
        operators[event["name"]] += event["dur"] / 1e6
        outer.append(event)
    return passes, operators


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).glob("*.json.gz")):
        for title, found in zip(("passes", "operators"), times(file), strict=True):
            print(f"{file.name}, {title}")
            for name, seconds in found.most_common(10):
                print(f"  {seconds:8.3f} s  {name}")
