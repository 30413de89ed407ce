"""Turns the files of GSM8K into demonstrations and problems.

A small model learns nothing from problems that it never solves, so those with few calculations are used. A calculation
is a note in angle brackets, ``<<48/2=24>>``, which GSM8K has for a calculator; demonstrations are without them.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.request
from pathlib import Path

import click

HELD_OUT = 128  #: problems of the test set that an evaluation answers
#: GSM8K (MIT), and the SHA-256 of its files.
SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
FILES = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
DOWNLOAD_SECONDS = 60.0
NOTES = re.compile(r"<<.*?>>")


def get_data(folder: Path) -> None:
    """Download GSM8K's files into a folder (5 MB), unless they are there; refuse files that are not the known ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in FILES.items():
        file, address = folder / name, f"{SOURCE}/{name}"
        if file.is_file():
            continue
        try:
            with urllib.request.urlopen(address, timeout=DOWNLOAD_SECONDS) as answer:
                content: bytes = answer.read()
        except OSError as error:
            raise click.ClickException(
                f"{address} cannot be read: {error}\nfix: give --data a folder with {name}"
            ) from error
        if (found := hashlib.sha256(content).hexdigest()) != digest:
            fix = f"fix: give --data a folder with the {name} that you trust"
            raise click.ClickException(f"{address} has changed: its SHA-256 is {found}, not {digest}\n{fix}")
        file.write_bytes(content)


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
