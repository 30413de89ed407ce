"""The blocks of the guide on experience shaping can be used as they are, and its functions do what it says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, Row
from jackfield.abc.reward import GeneratedText
from jackfield.plugins.registry import installed

GUIDE = (Path(__file__).parents[2] / "docs/guides/experience_shaping.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.timeout(120)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def listed() -> list[dict[str, Any]]:
    """Return the operators of all blocks, with their settings."""
    loaded = (yaml.safe_load(block) for block in blocks("yaml"))
    return [dict(each) for one in loaded if "data" in one for each in one["data"]["pipeline"]["experiences"]]


@pytest.fixture(autouse=True)
def beside_the_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay the file of the guide where its settings look for it."""
    (code,) = blocks("python")
    (tmp_path / "truth.py").write_text(code)
    monkeypatch.chdir(tmp_path)


def made(settings: Mapping[str, Any], context: OperatorContext | None = None) -> Operator:
    own = dict(settings)
    name = own.pop("name")
    operator: Operator = installed().load("operator", name).build(own, context or OperatorContext(), name)
    return operator


def processed(operator: Operator, *rows: Mapping[str, Any]) -> OperatorResult:
    async def run() -> OperatorResult:
        await operator.start()
        try:
            named = tuple(Row(key=f"r{number}", values=row) for number, row in enumerate(rows))
            return await operator.process(OperatorRequest(rows=named))
        finally:
            await operator.close()

    return asyncio.run(run())


def test_each_operator_of_the_guide_can_be_made() -> None:
    names = [settings["name"] for settings in listed()]
    assert {"quality_llm", "salience", "repair", "counterfactual"} == {*names}
    assert 7 == len([made(settings) for settings in listed()])


def test_the_functions_of_the_guide_say_what_is_true() -> None:
    """The first counterfactual passes by the run's reward and the truth, the second one by the verifier."""
    asked = list[str]()

    async def generate(model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        asked.append(messages[-1]["content"])
        numbers = map(int, re.findall(r"\d+", asked[-1]))
        return GeneratedText(text=f"It is {sum(numbers)}", tokens=5)

    async def score(values: Mapping[str, Any], response: str) -> float:
        return float(response == f"It is {values['ground_truth']}")

    context = OperatorContext(generate=generate, score=score)
    row = {"prompt": "2 more than 3?", "response": "It is 5", "reward": 1.0, "ground_truth": "5"}
    numbers, words, turn = [settings for settings in listed() if settings["name"] == "counterfactual"]
    assert 2 == len(processed(made(numbers, context), row).made)
    assert 2 == len(asked)
    (new,) = processed(made(words, context), row).made
    assert "2 less than 3?" == new.values["prompt"]
    assert () == processed(made(turn, context), row).made


def test_the_template_of_the_guide_is_a_judge() -> None:
    asked = list[str]()

    async def generate(model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        asked.append(messages[-1]["content"])
        return GeneratedText(text='{"quality": 10}', tokens=5)

    (settings,) = [each for each in listed() if each["name"] == "quality_llm"]
    settings["asked"] = {}
    row = {"prompt": "2 and 3?", "response": "It is 5", "reward": 1.0, "ground_truth": "5"}
    found = processed(made(settings, OperatorContext(generate=generate)), row)
    assert 1.25 == found.updates["r0"]["reward"]
    fence = asked[0].splitlines()[4]
    assert f"{fence}\nIt is 5\n{fence}\n" in asked[0]
    assert "Reference: 5" in asked[0]
