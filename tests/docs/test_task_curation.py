"""The example of the guide on task curation leaves the rows that the guide says."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, Row
from jackfield.cli import main
from jackfield.plugins.registry import installed

REPOSITORY = Path(__file__).parents[2]

#: Lines of the raw file that are gone, each with the operator and a part of the reason.
GONE = {
    12: ("length", "not a text"),
    7: ("length", "3 words"),
    5: ("language", "is in de"),
    6: ("safety", "weapons: pipe bomb"),
    3: ("exact_duplicates", "raw_tasks:2"),
    10: ("near_duplicates", "raw_tasks:9"),
    13: ("per_category", "3 rows of its category"),
}


def test_the_example_leaves_six_tasks_the_easy_ones_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    folder = f"folder={tmp_path / 'run'}"
    result = CliRunner().invoke(main, ["data", "run", "examples/guides/curation.yaml", folder, "--json"])
    assert 0 == result.exit_code, result.output
    rows = [json.loads(line) for line in Path(json.loads(result.output)["rows"]).read_text().splitlines()]
    assert ["2", "1", "11", "9", "8", "4"] == [row["_row"].removeprefix("raw_tasks:") for row in rows]
    assert sorted(row["difficulty"] for row in rows) == [row["difficulty"] for row in rows]
    gone = {}
    for file in (*tmp_path.rglob("removed.jsonl"), *tmp_path.rglob("set_aside.jsonl")):
        for line in file.read_text().splitlines():
            told = json.loads(line)
            gone[int(told["_row"].removeprefix("raw_tasks:"))] = (told["operator"], told["why"])
    assert GONE.keys() == gone.keys()
    for line_number, (operator, part) in GONE.items():
        assert operator == gone[line_number][0]
        assert part in gone[line_number][1]


def test_settings_in_the_guide_are_those_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator of each block can be built with its settings."""
    monkeypatch.chdir(REPOSITORY)
    text = (REPOSITORY / "docs/guides/task_curation.md").read_text(encoding="utf-8")
    given = [
        dict(each)
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for each in yaml.safe_load(block)["data"]["pipeline"]["tasks"]
    ]
    built = [
        installed().load("operator", name).build(own, OperatorContext(), name)
        for own in given
        if (name := own.pop("name"))
    ]
    assert len(given) == len(built) == 9


def test_the_function_of_the_guide_keeps_what_teaches() -> None:
    settings = {"path": f"{os.path.join(REPOSITORY, 'examples/guides/curation.py')}:teaches", "reads": ["pass_rate"]}
    operator: Operator = installed().load("operator", "function_filter").build(settings, OperatorContext(), "own")

    async def decided() -> set[str]:
        await operator.start()
        try:
            rows = tuple(Row(key=str(rate), values={"pass_rate": rate}) for rate in (0.0, 0.25, 1.0))
            found = await operator.process(OperatorRequest(rows=rows))
        finally:
            await operator.close()
        return {*operator.decide([Row(key=key, values=values) for key, values in found.updates.items()])}

    assert {"0.0", "1.0"} == asyncio.run(decided())
