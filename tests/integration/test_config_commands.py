"""The commands that help to write a config file, with every plugin of the repository installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from jackfield.algorithms import names
from jackfield.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINIMAL = str(EXAMPLES / "guides" / "minimal.yaml")
#: A part of a file, one whose agent a test creates, a recipe of Data-Juicer, and columns for the formatter.
NOT_ALONE = {"guides/ray_runtime.yaml", "scaffolded_agent/grpo.yaml"}
NOT_ALONE |= {"guides/data_juicer_recipe.yaml", "guides/formatting_columns.yaml"}
FILES = sorted(str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.yaml"))
#: Algorithms that need more than a model and tasks, and the setting that `jackfield init` names.
NEED_MORE = {"gdpo": "algorithm.reward_dimensions", "mix": "data.expert", "mix_chord": "data.expert"}


def called(*arguments: str) -> Result:
    """Call a command without a terminal."""
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    """What editors check files by."""
    done = called("config", "schema")
    assert (0, "") == (done.exit_code, done.stderr)
    return Draft202012Validator(json.loads(done.stdout))


@pytest.mark.parametrize("name", [name for name in FILES if name not in NOT_ALONE])
def test_examples_are_valid(schema: Draft202012Validator, name: str) -> None:
    values = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    assert [] == [error.json_path for error in schema.iter_errors(values)]


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("engine", {"name": "fsdpp"}),
        ("engine", {"name": "fsdp", "shards": 2}),
        ("rollout", {"max_batch_size": "many"}),
        ("rollout", {"name": "vllm", "batch_size": 2}),
        ("reward", {"name": "rules", "method": "exakt"}),
        ("reward", "rulez"),
        ("agent", {"name": "tool", "turns": -1}),
        ("algorithm", "grpoo"),
    ],
)
def test_wrong_settings_of_plugins_are_not(schema: Draft202012Validator, section: str, wrong: Any) -> None:
    values = {**yaml.safe_load(Path(MINIMAL).read_text(encoding="utf-8")), section: wrong}
    assert [f"$.{section}"] == [error.json_path for error in schema.iter_errors(values)]


@pytest.mark.parametrize("algorithm", names("algorithm"))
def test_a_first_file_is_valid(tmp_path: Path, schema: Draft202012Validator, algorithm: str) -> None:
    """Or the command says what the algorithm needs beside the three answers."""
    file = tmp_path / "mine.yaml"
    done = called("init", str(file), "--algorithm", algorithm, "--model", "models/mine", "--data", "tasks.jsonl")
    if algorithm in NEED_MORE:
        assert (1, False) == (done.exit_code, file.exists())
        assert NEED_MORE[algorithm] in done.stderr
        return
    assert 0 == done.exit_code, done.stderr
    assert [file] == list(tmp_path.iterdir())
    assert 0 == called("config", "validate", str(file)).exit_code
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert [] == [error.json_path for error in schema.iter_errors(values)]
    assert (algorithm, "models/mine", "tasks.jsonl") == (
        values["algorithm"]["name"],
        values["model"]["path"],
        values["data"]["train"],
    )


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("algorithm=grpoo", "did you mean 'grpo'?"),
        ("algorithm.loss.options.clipp=1", "did you mean 'clip_low'?"),
        ("algorithm.kl.name=k9", "no part of kind kl is named 'k9'"),
        ("model.dtype=float17", "one of float32, bfloat16, float16"),
        ("reward.methodd=exact", "did you mean 'method'?"),
        ("reward=[{name: rulez}]", "did you mean 'rules'?"),
        ("reward=[{name: rules, methodd: exact}]", "reward.parts.rules.methodd (did you mean 'method'?)"),
        ("reward=[{name: rules, reward_service: {retriess: 1}}]", "did you mean 'retries'?"),
    ],
)
def test_wrong_names_and_options_are_refused(setting: str, told: str) -> None:
    done = called("config", "validate", MINIMAL, setting)
    assert 1 == done.exit_code
    assert told in done.stderr


def test_an_algorithm_is_named_as_a_plugin_is() -> None:
    done = called("config", "validate", MINIMAL, "algorithm=sft", "mode=offline", "--json")
    assert (0, "sft") == (done.exit_code, json.loads(done.stdout)["algorithm"]["loss"]["name"])


def test_explain_shows_what_was_changed() -> None:
    done = called("config", "explain", MINIMAL, "--changed", "algorithm=dapo", "rollout.max_batch_size=7")
    assert 0 == done.exit_code
    shown = {line.partition(" = ")[0] for line in done.stdout.splitlines() if line and not line.startswith(" ")}
    file = {"name", "folder", "model.path", "data.train", "data.eval", "optimizer.lr", "evaluation.every"}
    file |= {"sampling.max_new_tokens", "evaluation.sampling.max_new_tokens"}
    assert shown - file == {"algorithm.name", "rollout.max_batch_size"}
