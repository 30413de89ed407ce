"""Turns the files of GSM8K into demonstrations and problems.

A small model learns nothing from problems that it never solves, so those with few calculations are used. A calculation
is a note in angle brackets, ``<<48/2=24>>``, which GSM8K has for a calculator; demonstrations are without them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

HELD_OUT = 128  #: problems of the test set that an evaluation answers
NOTES = re.compile(r"<<.*?>>")


def make_task(data: Path, folder: Path, calculations: int) -> None:
    """Write ``train.jsonl`` and ``held_out.jsonl``: question, demonstration, answer (what follows ``####``)."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, target, size in (("train", "train", None), ("test", "held_out", HELD_OUT)):
        file = data / f"{source}.jsonl"
        if not file.is_file():
            message = f"GSM8K is not in {data}: {file.name} is missing\nfix: give --data a folder with train.jsonl and"
            raise click.ClickException(f"{message} test.jsonl of https://github.com/openai/grade-school-math")
        problems = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        chosen = [make_record(each) for each in problems if 1 <= len(NOTES.findall(each["answer"])) <= calculations]
        text = "".join(json.dumps(record) + "\n" for record in chosen[:size])
        (folder / f"{target}.jsonl").write_text(text, encoding="utf-8")


def make_record(problem: dict[str, str]) -> dict[str, str]:
    """Return a record whose demonstration reads as people would write it."""
    demonstration = NOTES.sub("", problem["answer"])
    answer = demonstration.rpartition("####")[2].strip()
    return {"question": problem["question"], "demonstration": demonstration, "answer": answer}
