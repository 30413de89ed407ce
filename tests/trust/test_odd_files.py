"""Data files and configurations that no parser likes: one coded error with the place, and no traceback."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jackfield_commands import CommandServer

GOOD = b'{"question": "How many?", "answer": "8"}\n'


def valued(value: bytes) -> bytes:
    return b'{"question": "How many?", "answer": "8", "more": ' + value + b"}\n"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param(GOOD + valued(b"[" * 100_000 + b"]" * 100_000), 2, id="nesting"),
        pytest.param(GOOD + valued(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), 2, id="nested objects"),
        pytest.param(GOOD + valued(rb'"\ud800"'), 2, id="surrogate"),
        pytest.param(GOOD + valued(rb'{"\uDFFF": 1}'), 2, id="surrogate in a key"),
        pytest.param((GOOD + GOOD).decode().encode("utf-16"), 1, id="UTF-16"),
        pytest.param(GOOD + valued(b"\xff"), 2, id="Latin-1"),
        pytest.param(GOOD + valued(b"NaN"), 2, id="NaN"),
        pytest.param(GOOD + valued(b"-Infinity"), 2, id="infinity"),
        pytest.param(GOOD + valued(b"1e999"), 2, id="a float that overflows"),
        pytest.param(GOOD + valued(b"9" * 5000), 2, id="5000 digits"),
        pytest.param(GOOD + valued(b"1" + b"0" * 30), 2, id="more than 64 bits"),
        pytest.param(GOOD + valued(b'"\x00"'), 2, id="NUL"),
        pytest.param(GOOD + valued(b'"' + b"x" * 60_000_000 + b'"'), 2, id="60 MB"),
    ],
)
def test_a_line_of_data(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path, content: bytes, line: int
) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_bytes(content)
    ended = jackfield("run", *quickstart_settings("odd", f"data.train={file}"))
    assert 1 == ended.code
    assert ended.error.startswith("[data.malformed] "), ended.error[:2000]
    assert f"{file}:{line}\n" in ended.error
    assert "Traceback" not in ended.error
    assert len(ended.error) < 2000
    assert not (tmp_path / "odd").exists()


def test_a_whole_surrogate_pair_and_a_mark_of_utf_8_are_read(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "fine.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD + valued(rb'"\ud83d\ude00"'))
    settings = [f"data.train={file}", "schedule.steps=1", "reward.ground_truth_pattern=null"]
    ended = jackfield("run", *quickstart_settings("fine", *settings))
    assert 0 == ended.code, ended.error


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"a: " + b"[" * 5000 + b"]" * 5000, "config.unreadable"),
        (b"a: \x00", "config.unreadable"),
        (b"\xff\xff", "config.unreadable"),
        (b"name: 2024-13-45", "config.unreadable"),
        (b"model: {path: x}\nschedule: {steps: 3, steps: 4}", "config.unreadable"),
    ],
)
def test_a_configuration(jackfield: CommandServer, tmp_path: Path, content: bytes, code: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_bytes(content)
    ended = jackfield("config", "validate", str(file))
    assert 1 == ended.code
    assert ended.error.startswith(f"[{code}] "), ended.error[:2000]
    assert "Traceback" not in ended.error


def test_an_override(jackfield: CommandServer, quickstart_settings: Callable[..., list[str]]) -> None:
    arguments = quickstart_settings("odd", "name=" + "[" * 5000)
    ended = jackfield("config", "validate", *arguments)
    assert 1 == ended.code
    assert ended.error.startswith("[config.override] "), ended.error[:2000]


def test_files_that_cannot_be_read_or_written(jackfield: CommandServer, tmp_path: Path) -> None:
    """They are coded errors of the command, not tracebacks, and what was there stays."""
    samples, queue, file = tmp_path / "samples.jsonl", tmp_path / "queue", tmp_path / "file"
    samples.write_text('{"columns": {"prompt_ids": [1], "response_ids": [2]}}\n')
    file.write_text("mine")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert 0 == jackfield("queue", "import", str(samples), str(queue)).code
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe[")
    for code, *arguments in (
        ("run.storage", "queue", "export", str(queue), str(file / "out.jsonl")),
        ("run.storage", "queue", "export", str(queue), str(queue)),
        ("run.storage", "queue", "export", str(queue), str(file)),
        ("run.storage", "queue", "export", str(queue), str(pipe)),
        ("queue.invalid", "queue", "import", str(tmp_path / "latin.jsonl"), str(tmp_path / "other")),
    ):
        done = jackfield(*arguments)
        assert (1, "Traceback" in done.error) == (done.code, False), done.error
        assert f"[{code}]" in done.error
    assert ("mine", True) == (file.read_text(), pipe.is_fifo())
    assert [] == [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
