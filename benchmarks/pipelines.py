"""How fast rows pass a pipeline: short tasks through five cheap operators, beside a plain loop over the same rows.

    python benchmarks/pipelines.py [--rows 100000] [--profile] [--quick] [--json]

The plain loop reads and writes each row once with msgspec, which is the least that each stage does. ``ratio`` is the
pipeline's processor time per stage over that loop's. With ``--profile`` the most expensive functions are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import random
import tempfile
import time
from pathlib import Path

import msgspec

from jackfield.plugins.registry import installed
from jackfield_pipelines.pipeline import FilePipeline
from jackfield_pipelines.tasks import steps_of

_WORDS = ("has", "toys", "cards", "loses", "finds", "two", "seven", "now", "many", "how", "Ida", "Dan", "left", "eggs")
OPERATORS = (
    {"name": "length", "minimum": 10, "maximum": 4000},
    {"name": "words", "words": ["forbidden", "secret"]},
    {"name": "exact_duplicates"},
    {"name": "difficulty_rules"},
    {"name": "priority", "weights": {"difficulty": -1.0}},
)


def write_rows(file: Path, count: int) -> None:
    """Write short problems, all different."""
    drawn, encode = random.Random(1), msgspec.json.Encoder().encode
    text = ""
    with file.open("wb") as lines:
        for number in range(count):
            text = " ".join(drawn.choices(_WORDS, k=drawn.randint(8, 30))) + f" {number}?"
            lines.write(encode({"prompt": text, "answer": f"#### {drawn.randint(0, 99)}"}) + b"\n")


def plain(file: Path, out: Path) -> float:
    """Return the processor seconds of reading and writing every row once."""
    encode, decode, began = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode, time.process_time()
    with file.open("rb") as lines, out.open("wb") as written:
        for line in lines:
            written.write(encode(decode(line)) + b"\n")
    return time.process_time() - began


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--profile", action="store_true", help="print the most expensive functions")
    parser.add_argument("--quick", action="store_true", help="2,000 rows")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    count = 2_000 if arguments.quick else arguments.rows
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_rows(folder / "rows.jsonl", count)
        base = min(plain(folder / "rows.jsonl", folder / "copy.jsonl") for _ in range(3))
        steps = steps_of(OPERATORS, installed(), "pipeline")
        pipeline, profile = FilePipeline(folder=folder / "data", steps=steps), cProfile.Profile()
        began, used = time.perf_counter(), time.process_time()
        with (folder / "rows.jsonl").open("rb") as source:
            if arguments.profile:
                profile.enable()
            sets = asyncio.run(pipeline.run(source, "rows.jsonl", "rows"))
            profile.disable()
        seconds, processor = time.perf_counter() - began, time.process_time() - used
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        found = {
            "rows": count,
            "seconds": seconds,
            "processor_seconds": processor,
            "rows_per_second": count / seconds,
            "plain": base,
        }
        found |= {"stages": len(sets), "ratio": processor / len(sets) / base, "left": len(sets[-1])}
    print("  ".join(f"{name} {value:.3f}" for name, value in found.items()))
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
