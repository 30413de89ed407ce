"""The plugin ``function``: all forms of functions, what they may return, and what is refused at the start."""

from __future__ import annotations

import asyncio
import os
import textwrap
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import ResponsePart, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import JackfieldError
from jackfield_reward_rules.function import FunctionReward, FunctionRewardConfig

REQUEST = ScoreRequest(
    data_source="gsm8k",
    solution_str="It is 7<tool>7</tool>.",
    ground_truth="7",
    extra_info={"level": 3},
    prompt_str="3 + 4?",
    response_ids=(5, 6),
    idempotency_key="train/1/0",
    group_id="train/1",
    group_size=2,
    messages=({"role": "user", "content": "3 + 4?"},),
    parts=(ResponsePart(author="model", text="It is 7"), ResponsePart(author="tool", text="<tool>7</tool>")),
    turns=2,
    metrics={"calls": 1.0},
)


def score(folder: Path, code: str, name: str, *requests: ScoreRequest, **settings: Any) -> list[ScoreResult]:
    """Score requests by a function of a file."""
    (folder / "rewards.py").write_text(textwrap.dedent(code))

    async def main() -> list[ScoreResult]:
        config = FunctionRewardConfig(path=f"{folder}/rewards.py:{name}", **settings)
        agent = FunctionReward(config, RewardContext())
        try:
            await agent.start()
            return list(await asyncio.gather(*map(agent.compute_score, requests or [REQUEST])))
        finally:
            await agent.close()

    return asyncio.run(main())


CALLABLES = """
import functools

def other_order(ground_truth, solution_str):
    return float(ground_truth in solution_str)

def keyword_only(*, data_source, solution_str, extra_info, **rest):
    return {"score": extra_info["level"], "rest": len(rest)}

def positional_only(data_source, solution_str, ground_truth, extra_info, /):
    return extra_info["level"]

def fields(messages, group_id, group_size, metrics, response_ids, model_text, tool_text, turns, parts, prompt_str):
    told = [messages[0]["content"] == prompt_str, group_id == "train/1", group_size == 2, metrics == {"calls": 1.0}]
    told += [response_ids == [5, 6], model_text == "It is 7", tool_text == "<tool>7</tool>", turns == 2]
    return sum(told) + len(parts) / 10

def with_default(solution_str, threshold=0.25):
    return threshold

def with_self(self, data_source, solution_str, ground_truth, extra_info=None):
    return 1, solution_str, "why"

async def coroutine(solution_str):
    return 2

def returns_a_coroutine(solution_str):
    return coroutine(solution_str)

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 1
    return wrapper

@decorated
def wrapped(solution_str, ground_truth):
    return len(ground_truth)

part = functools.partial(with_default, threshold=4)

class Counter:
    def __init__(self, start=0):
        self.count = start
    def compute_score(self, solution_str):
        self.count += 1
        return self.count

class Calls:
    def __call__(self, solution_str):
        return 5

class CallsLater:
    async def __call__(self, solution_str):
        return 6

class Scores:
    async def compute_score(self, data_source, solution_str, ground_truth, extra_info):
        return True

instance = Calls()
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("other_order", 1.0),
        ("keyword_only", 3.0),
        ("positional_only", 3.0),
        ("fields", 8.2),
        ("with_default", 0.25),
        ("with_self", 1.0),
        ("coroutine", 2.0),
        ("returns_a_coroutine", 2.0),
        ("wrapped", 2.0),
        ("part", 4.0),
        ("Counter", 1.0),
        ("Calls", 5.0),
        ("CallsLater", 6.0),
        ("Scores", 1.0),
        ("instance", 5.0),
    ],
)
def test_functions_of_all_kinds_are_called(tmp_path: Path, name: str, expected: float) -> None:
    [result] = score(tmp_path, CALLABLES, name)
    assert ("ok", expected) == (result.status, result.score), result.error


def test_keywords_and_state(tmp_path: Path) -> None:
    assert [9.0] == [each.score for each in score(tmp_path, CALLABLES, "with_default", keywords={"threshold": 9})]
    results = score(tmp_path, CALLABLES, "Counter", REQUEST, REQUEST, keywords={"start": 4})
    assert [5.0, 6.0] == [each.score for each in results]


RESULTS = """
import asyncio, numpy

def give(extra_info, solution_str):
    return eval(extra_info["give"])

async def zero():
    return 0
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("True", ScoreResult(score=1.0)),
        ("numpy.float32(0.5)", ScoreResult(score=0.5)),
        ("numpy.bool_(True)", ScoreResult(score=1.0)),
        ("{'score': 1, 'acc': numpy.int64(2)}", ScoreResult(score=1.0, metrics={"acc": 2.0})),
        (
            "{'score': 1, 'explanation': 'good', 'dimensions': {'style': 0.5}}",
            ScoreResult(score=1.0, explanation="good", dimensions={"style": 0.5}),
        ),
        ("(0.5, solution_str, 'too long')", ScoreResult(score=0.5, explanation="too long")),
        ("(0.5, 'the query', solution_str)", ScoreResult(score=0.5)),
        ("(0.5, 'too long')", ScoreResult(score=0.5, explanation="too long")),
        ("(0.5, {'acc': 1, 'explanation': 'no'})", ScoreResult(score=0.5, metrics={"acc": 1.0}, explanation="no")),
    ],
)
def test_numbers_dicts_and_tuples_are_scores(tmp_path: Path, value: str, expected: ScoreResult) -> None:
    [result] = score(tmp_path, RESULTS, "give", attrs.evolve(REQUEST, extra_info={"give": value}))
    assert expected == result


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("None", "NoneType None"),
        ("'0.5'", "str '0.5'"),
        ("zero()", "coroutine"),
        ("{'score': zero()}", "a coroutine that was not awaited"),
        ("(1, 2, 3, 4)", "tuple"),
        ("(1, 2)", "tuple (1, 2)"),
        ("[0.5]", "list [0.5]"),
        ("10 ** 400", "int"),
        ("numpy.array([0.5])", "ndarray"),
        ("{'score': 1, 'dimensions': {'style': None}}", "NoneType None"),
    ],
)
def test_what_is_no_score_is_told(tmp_path: Path, value: str, found: str) -> None:
    if value == "zero()":  # it is awaited: only an inner one is wrong
        value, found = "[zero()]", "coroutine"
    [result] = score(tmp_path, RESULTS, "give", attrs.evolve(REQUEST, extra_info={"give": value}))
    assert ("failed", None) == (result.status, result.score)
    assert str(result.error).startswith("[reward.output]"), result.error
    assert found in str(result.error)


REFUSED = """
import functools

def two(x, y): return 1.0

def nothing(): return 1.0

def extra(solution_str, rubric): return 1.0

def generates(solution_str): yield 1.0

async def generates_later(solution_str): yield 1.0

def mixed(prompts, solution_str): return 1.0

def plain(solution_str): return 1.0

class NeedsArguments:
    def __init__(self, model): ...
    def compute_score(self, solution_str): return 1.0

class NoMethod:
    def score(self, solution_str): return 1.0

class WrongGroup:
    def score_group(self): return []

class WrongPost:
    def compute_score(self, solution_str): return 1.0
    def post_process_scores(self, scores, groups): return scores

number = 3
"""


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("two", {}, "def two(x, y)"),
        ("nothing", {}, "def nothing()"),
        ("extra", {}, "def extra(solution_str, rubric)"),
        ("generates", {}, "with yield"),
        ("generates_later", {}, "with yield"),
        ("mixed", {}, "'prompts'"),
        ("plain", {"keywords": {"weight": 1}}, "'weight'"),
        ("NeedsArguments", {}, "NeedsArguments(model): missing a required argument: 'model'"),
        ("NoMethod", {}, "NoMethod with score"),
        ("WrongGroup", {}, "score_group"),
        ("WrongPost", {}, "def post_process_scores(scores, groups)"),
        ("number", {}, "int"),
    ],
)
def test_a_wrong_function_is_refused_at_the_start(
    tmp_path: Path, name: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(JackfieldError) as caught:
        score(tmp_path, REFUSED, name, **settings)
    error = caught.value
    assert "reward.function" == error.code
    assert words in str(error)
    assert error.expected
    assert error.fix
    if name != "number":
        line = 1 + REFUSED.splitlines().index(next(each for each in REFUSED.splitlines() if name.strip() in each))
        file, _, found = str(error.where).rpartition(":")
        assert f"{tmp_path}/rewards.py" == file
        assert name.startswith("Wrong") or line == int(found)


def test_a_missing_name_is_refused_with_the_names_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(JackfieldError) as caught:
        score(tmp_path, REFUSED, "planes")
    assert "worker.start" == caught.value.code
    assert "'planes'" in str(caught.value)
    assert "plain" in str(caught.value.found)


@pytest.mark.parametrize("settings", [{"in_flight": 5}, {"form": "text"}])
def test_a_setting_without_effect_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(JackfieldError) as caught:
        score(tmp_path, REFUSED, "plain", **settings)
    assert "config.invalid-value" == caught.value.code
    assert f"reward.{next(iter(settings))}" == caught.value.where


def test_an_installed_entry_point_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package.py").write_text("def brief(solution_str): return 1 / len(solution_str)\n")
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[jackfield.reward_functions]\nbrief = my_package:brief\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def main(name: str) -> ScoreResult:
        agent = FunctionReward(FunctionRewardConfig(path=name), RewardContext())
        try:
            await agent.start()
            assert agent.version
            return await agent.compute_score(REQUEST)
        finally:
            await agent.close()

    assert 1 / len(REQUEST.solution_str) == asyncio.run(main("brief")).score
    with pytest.raises(JackfieldError) as caught:
        asyncio.run(main("short"))
    assert "worker.start" == caught.value.code
    assert "['brief']" in str(caught.value)


def version(folder: Path, **settings: Any) -> str | None:
    async def main() -> str | None:
        config = FunctionRewardConfig(**{"path": f"{folder}/versioned.py:score", **settings})
        agent = FunctionReward(config, RewardContext())
        try:
            await agent.start()
            return agent.version
        finally:
            await agent.close()

    return asyncio.run(main())


def test_the_version_changes_with_the_code_and_what_it_imports_beside_it(tmp_path: Path) -> None:
    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)

    write(versioned="import helper\ndef score(solution_str, scale=1): return helper.one() * scale\n")
    write(helper="def one():\n    import far\n    return far.ONE\n", far="ONE = 1\n", other="1\n")
    first = version(tmp_path)
    assert first == version(tmp_path)
    write(other="2\n")
    assert first == version(tmp_path), "nobody imports it"
    versions = {first, version(tmp_path, keywords={"scale": 2})}
    write(far="ONE = 2\n")
    versions.add(version(tmp_path))
    write(versioned="import helper\ndef score(solution_str): return helper.one()\n")
    versions.add(version(tmp_path))
    assert 4 == len(versions)
    assert "mine" == version(tmp_path, version="mine")


@pytest.mark.parametrize("code", ["from graders.parts import numbers", "from ..parts import numbers"])
def test_the_version_changes_with_what_a_module_imports_from_its_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Also by the package's name, and from a folder above the module's own."""
    (inner := tmp_path / "graders" / "inner").mkdir(parents=True)
    (tmp_path / "graders" / "__init__.py").touch()
    (inner / "__init__.py").touch()
    (parts := tmp_path / "graders" / "parts").mkdir()
    (parts / "numbers.py").write_text("ONE = 1\n")
    (inner / "versioned.py").write_text(f"{code}\ndef score(solution_str): return numbers.ONE\n")
    (tmp_path / "graders_of_others.py").write_text("1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = "graders.inner.versioned:score"
    first = version(tmp_path, path=path)
    (tmp_path / "graders_of_others.py").write_text("2\n")
    assert first == version(tmp_path, path=path)
    (parts / "numbers.py").write_text("ONE = 2\n")
    assert first != version(tmp_path, path=path)


def test_thousands_of_samples_of_a_coroutine_function_are_scored_at_once(tmp_path: Path) -> None:
    """Each waits for all the others, in one process."""
    code = """
    import asyncio, os
    here, everyone = 0, asyncio.Event()

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        global here
        here += 1
        if here == 3000:
            everyone.set()
        await everyone.wait()
        return {"score": 1, "process": os.getpid()}
    """
    results = score(tmp_path, code, "compute_score", *[REQUEST] * 3000)
    assert 1 == len({each.metrics["process"] for each in results})
    assert os.getpid() not in {each.metrics["process"] for each in results}
