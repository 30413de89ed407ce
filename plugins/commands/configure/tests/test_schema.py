"""The JSON Schema of config files, as editors use it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from jackfield.cli import main
from jackfield.plugins import Registry, discover
from jackfield_configure.schema import plugin_schemas

Refused = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def schema() -> Any:
    """What the command prints."""
    done = CliRunner().invoke(main, ["config", "schema"])
    assert 0 == done.exit_code, done.output
    found = json.loads(done.stdout)
    Draft202012Validator.check_schema(found)
    return found


@pytest.fixture(scope="module")
def refused(schema: Any) -> Refused:
    """Returns the paths at which a file is refused."""
    validator = Draft202012Validator(schema)
    return lambda text: [error.json_path for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize(
    "text",
    [
        "model: {path: m}\nalgorithm: sft\nmode: offline",
        "model: {path: m, lora: {rank: 4}}\nalgorithm: {name: grpo, kl: {coefficient: 1e-3}}",
        "model: {path: m}\noptimizer: {lr: 1e-6}\nschedule: {max_staleness: null}",
        "data: {train: [a.jsonl, {path: b.jsonl, weight: 2}]}",
        "transfer_queue: {name: auto}\ncheckpoint_engine: in_process",
        "reward: [{name: function}, {name: function}]",
        "stages: {first: {algorithm: sft, mode: offline}, second: {schedule: {steps: 3}}}",
        "{}",
    ],
)
def test_what_a_run_accepts_is_valid(refused: Refused, text: str) -> None:
    assert [] == refused(text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("modell: {path: m}", "$"),
        ("model: {path: 3}", "$.model.path"),
        ("mode: both", "$.mode"),
        ("data: {groups_per_batch: 0}", "$.data.groups_per_batch"),
        ("data: {groups_per_batch: 1.5}", "$.data.groups_per_batch"),
        ("model: {path: m, dropout: 1.0}", "$.model.dropout"),
        ("optimizer: {lr: fast}", "$.optimizer.lr"),
        ("algorithm: grpoo", "$.algorithm"),
        ("algorithm: {name: grpoo}", "$.algorithm"),
        ("transfer_queue: {name: memory, size: 3}", "$.transfer_queue"),
        ("transfer_queue: somewhere", "$.transfer_queue"),
        ("stages: {first: {modell: m}}", "$.stages.first"),
    ],
)
def test_what_a_run_refuses_is_not_valid(refused: Refused, text: str, path: str) -> None:
    assert [path] == refused(text)


def test_settings_have_their_help_and_default(schema: Any) -> None:
    steps = schema["$defs"]["ScheduleConfig"]["properties"]["steps"]
    assert ("integer", 100, 0, "training steps") == (
        steps["type"],
        steps["default"],
        steps["exclusiveMinimum"],
        steps["description"],
    )


@pytest.mark.shared_interpreter  # the reward is in another package
def test_the_settings_of_one_kind_of_plugin_have_schemas_of_their_own() -> None:
    """The built-in reward `function` takes a path; a schema refers to nothing that is not there."""
    schemas, definitions, left_out = plugin_schemas(Registry(discover().records("reward")), "reward")
    validator = Draft202012Validator({**schemas["function"], "$defs": definitions})
    assert [] == [*validator.iter_errors({"name": "function", "path": "a.py:f"})]
    assert ["$.path"] == [error.json_path for error in validator.iter_errors({"name": "function", "path": 3})]
    assert {} == left_out
    assert {*re.findall(r"#/\$defs/([\w.]+)", json.dumps([schemas, definitions]))} <= definitions.keys()
