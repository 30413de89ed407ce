"""Whatever a model answers, nothing that is not valid is executed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from jackfield.config import RunConfig
from jackfield.errors import DataError, JackfieldError
from jackfield.plugins.registry import PluginRecord, installed
from jackfield.settings import structure
from jackfield_data_plan import trying
from jackfield_data_plan.checking import NoPlan, read_answer
from jackfield_data_plan.planning import ModelOptions, Planning
from jackfield_data_plan.sources import open_source

pytestmark = pytest.mark.timeout(300)

EVIL = ("/etc/passwd", "os:system", "http://evil.example", "$HOME", "~/.ssh", "code.py", "a\\b", "{{x}}", "maths.jsonl")
NAMES = ("length", "words", "difficulty_rules", "priority", "near_duplicates", "lenght", "function_mapper", "")
KEYS = (
    "column",
    "unit",
    "minimum",
    "maximum",
    "words",
    "weights",
    "writes",
    "answer",
    "limit",
    "path",
    "name",
    "hashes",
)

texts = st.one_of(
    st.sampled_from(EVIL), st.sampled_from(["prompt", "answer", "words", "difficulty"]), st.text(max_size=9)
)
plain = st.one_of(st.none(), st.booleans(), st.integers(-2, 2**70), st.floats(), texts)
values = st.recursive(
    plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)), max_leaves=6
)
odd = st.dictionaries(st.sampled_from(KEYS), values, max_size=3).flatmap(
    lambda own: st.sampled_from(NAMES).map(lambda name: {**own, "name": name})
)
right = st.one_of(
    st.just({"name": "difficulty_rules"}),
    st.builds(lambda most: {"name": "length", "maximum": most}, st.integers(1, 900)),
    st.builds(lambda word: {"name": "words", "words": [word]}, texts),
    st.builds(lambda column: {"name": "exact_duplicates", "column": column}, texts),
)
answers = st.one_of(
    st.lists(st.one_of(right, odd), max_size=4).map(lambda tasks: json.dumps({"explanation": "x", "tasks": tasks})),
    st.lists(right, min_size=1, max_size=3).map(lambda tasks: f"```yaml\n{json.dumps({'tasks': tasks})}\n```"),
    values.map(json.dumps),
    st.text(max_size=60),
)


def holds_evil(value: Any) -> bool:
    """Return whether a text that names something outside is anywhere in a value."""
    if isinstance(value, dict):
        return any(map(holds_evil, [*value.keys(), *value.values()]))
    return any(map(holds_evil, value)) if isinstance(value, list) else value in EVIL


@given(answers)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_what_is_valid_is_executed(data: Path, model: Any, answer: str) -> None:
    config = structure(RunConfig, {"model": {"path": ""}, "data": {"train": str(data)}})
    executed = list[Any]()
    options = ModelOptions(url=model.url, model="m")
    planning = Planning(words="easy first", source=open_source(config, 3), registry=installed(), options=options)

    def run(self: trying.DryRun, tasks: Any) -> dict[str, Any]:
        executed.append(tasks)
        return {"problems": [], "notes": [], "stages": []}

    def build(self: PluginRecord, *_: Any) -> None:
        raise AssertionError("an operator is built in the process that has the key")

    model.script = [answer]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trying.DryRun, "__call__", run)
        patch.setattr(PluginRecord, "build", build)
        code = None
        try:
            planning.plan(corrections=0)
        except DataError as error:
            code = error.code
    event("valid" if code is None else "refused")
    assert (code is None) == bool(executed)
    assert code in (None, "data.plan", "data.plan-model")
    for tasks in executed:
        assert not holds_evil(tasks)
        for task in tasks:
            own = {name: value for name, value in task.items() if name != "name"}
            structure(installed().load("operator", task["name"]).settings_class, own)


@given(st.text(max_size=300) | values.map(json.dumps) | values.map(str))
@settings(deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(NoPlan):
        tasks, explanation = read_answer(text)
        assert isinstance(tasks, list)
        assert isinstance(explanation, str)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "part", ["[", "{", '{"tasks": ', "<think>", "```", "``` ", "```\n", "- ", "a: ", "? ", "*a ", "&a ", "'", '"', "\\"]
)
def test_no_text_takes_long_to_read(part: str) -> None:
    with contextlib.suppress(NoPlan):
        read_answer(part * (199_000 // len(part)))
    with contextlib.suppress(NoPlan):
        read_answer("```yaml\n" + part * (19_000 // len(part)) + "\n```")


@given(values, st.sampled_from(NAMES))
@settings(deadline=None)
def test_any_settings_are_structured_or_refused(value: Any, name: str) -> None:
    from jackfield_data_plan.checking import problems_of

    found = problems_of([{"name": name, "column": value}], installed())
    assert all(isinstance(each, str) and each for each in found)
    if not found:
        assert not holds_evil(value)


def test_a_plan_has_to_be_from_an_address_that_is_given() -> None:
    with pytest.raises(JackfieldError) as refused:
        ModelOptions(url="http://127.0.0.1:1/v1")
    assert "config.missing-key" == refused.value.code
