"""Operators with a user's function, which runs in processes of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import ConfigError, RunError

CODE = """
import asyncio
import os
from helper import SUFFIX


def mapped(row, factor=1):
    if row["n"] == 13:
        raise ValueError("unlucky")  # line 9
    return {"n": row["n"] * factor, "text": str(row["n"]) + SUFFIX}


async def later(row):
    await asyncio.sleep(0)
    return row["n"] % 2 == 0


def split(row):
    if row["n"] == 0:
        return None
    if row["n"] == 1:
        return {"n": 100}
    return [{"n": row["n"], "part": part} for part in range(row["n"])]


def odd(row):
    return {1: None, 2: {}, 3: 7, 4: {"n": float("nan")}, 5: {"other": 1}, 6: object(), 7: {"n": row["n"]}}[row["n"]]


def ends(row):
    if row["n"] == 1:
        os._exit(3)
    return {"n": -row["n"]}


def hangs(row):
    while row["n"] == 1:
        pass
    return {"n": -row["n"]}


def process(row):
    return {"process": os.getpid()}


def size(row):
    return {2: None, 3: "text", 4: float("inf")}.get(row["n"], row["n"])
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code_of_a_user.py").write_text(CODE.lstrip("\n"))
    (tmp_path / "helper.py").write_text("SUFFIX = '!'\n")
    return tmp_path / "code_of_a_user.py"


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"n": number, "kept": True} for number in numbers]


def test_a_mapper_changes_columns(apply: Any, code: Path) -> None:
    got = apply("function_mapper", rows(1, 2, 3), 2, path=f"{code}:mapped", keywords={"factor": 10})
    assert {at: {"n": n * 10, "text": f"{n}!"} for at, n in enumerate((1, 2, 3))} == got.updates


def test_what_did_not_change_is_no_update(apply: Any, code: Path) -> None:
    got = apply("function_mapper", rows(1, 2), path=f"{code}:mapped")
    assert {0: {"text": "1!"}, 1: {"text": "2!"}} == got.updates


def test_a_row_with_an_error_is_set_aside_with_the_line(apply: Any, code: Path) -> None:
    got = apply("function_mapper", rows(1, 13, 3), path=f"{code}:mapped")
    assert {0, 2} == got.updates.keys()
    assert {1} == got.set_aside.keys()
    line = next(at for at, text in enumerate(code.read_text().splitlines(), 1) if "unlucky" in text)
    assert f"ValueError: unlucky ({code}:{line})" in got.set_aside[1]


def test_results_of_another_form_are_set_aside(apply: Any, code: Path) -> None:
    got = apply("function_mapper", rows(1, 2, 3, 4, 5, 6, 7), path=f"{code}:odd", writes=["n"])
    assert {} == got.updates
    told = {2: "returned int", 3: "number that JSON does not have", 4: "['other']", 5: "not JSON"}
    assert told.keys() == got.set_aside.keys()
    for at, text in told.items():
        assert text in got.set_aside[at]


@pytest.mark.parametrize("function", ["ends", "hangs"])
def test_a_row_that_ends_its_process_does_not_cost_others(apply: Any, code: Path, function: str) -> None:
    got = apply("function_mapper", rows(0, 1, 2, 3), path=f"{code}:{function}", seconds=1.0, reads=["n"])
    assert {2: {"n": -2}, 3: {"n": -3}} == got.updates  # and 0 did not change
    assert {1} == got.set_aside.keys()


def test_it_runs_in_another_process(apply: Any, code: Path) -> None:
    got = apply("function_mapper", rows(1), path=f"{code}:process")
    assert os.getpid() != got.updates[0]["process"]


def test_a_function_gets_the_columns_that_it_reads(apply: Any, code: Path) -> None:
    code.write_text("def names(row):\n    return {'names': sorted(row)}\n")
    given = [{"n": 1, "a": 2, "b": 3}]
    assert ["a", "b", "n"] == apply("function_mapper", given, path=f"{code}:names").updates[0]["names"]
    got = apply("function_mapper", given, path=f"{code}:names", reads=["b", "absent"], writes=["names"])
    assert ["b"] == got.updates[0]["names"]


def test_a_filter_decides_by_the_number(apply: Any, code: Path) -> None:
    got = apply("function_filter", rows(1, 2, 3, 4), path=f"{code}:later")
    assert [0.0, 1.0, 0.0, 1.0] == [row["function"] for row in got.updates.values()]
    assert {0, 2} == got.removed.keys()


def test_a_filter_has_bounds_and_refuses_none(apply: Any, code: Path) -> None:
    got = apply("function_filter", rows(1, 2, 3, 4, 5, 9), path=f"{code}:size", minimum=2.0, maximum=6.0, writes="size")
    assert {0: "size is 1", 1: "size is null", 5: "size is 9"} == got.removed
    assert {2, 3} == got.set_aside.keys()


def test_a_synthesizer_makes_rows(apply: Any, code: Path) -> None:
    got = apply("function_synthesizer", rows(0, 1, 2), path=f"{code}:split")
    expected = [((1,), {"n": 100}), ((2,), {"n": 2, "part": 0}), ((2,), {"n": 2, "part": 1})]
    assert expected == got.made
    assert ({}, {}) == (got.removed, got.updates)


def test_the_version_is_of_the_file_and_what_it_imports(apply: Any, code: Path) -> None:
    def version() -> str:
        return str(apply("function_mapper", rows(1), path=f"{code}:mapped").operator.version)

    first = version()
    assert first == version()
    (code.parent / "helper.py").write_text("SUFFIX = '?'\n")
    second = version()
    code.write_text(code.read_text() + "\n")
    assert 3 == len({first, second, version()})


@pytest.mark.parametrize("path", ["code.py", "code:mapped", "code.py:", "code.py:a b", "missing.py:mapped"])
def test_paths_that_name_no_function_are_refused(apply: Any, path: str) -> None:
    with pytest.raises(ConfigError):
        apply("function_mapper", [], path=path)


def test_a_function_that_is_not_there_is_refused_at_the_start(apply: Any, code: Path) -> None:
    with pytest.raises(RunError) as caught:
        apply("function_mapper", rows(1), path=f"{code}:maped")
    assert "worker.start" == caught.value.code
    assert "has no 'maped'" in str(caught.value)
