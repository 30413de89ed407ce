"""Configuration files: structure, overrides, messages that name the path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jackfield.config import RunConfig, apply_override, as_plain, explain, load_config, load_stages, make_config, show
from jackfield.config.data import DataSet, sets_of
from jackfield.errors import ConfigError
from jackfield.settings import option


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("name: small\nmodel: {path: some/folder}\nengine: {name: fsdp, mixed_precision: bfloat16}\n")
    return path


def fails(file: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return caught.value


def test_values_defaults_and_overrides(file: Path) -> None:
    config = load_config(file, ["schedule.steps=7", "optimizer.lr=1e-3", "data.train=a.jsonl", "agent=single_turn"])
    found = (config.name, config.model.path, config.schedule.steps, config.optimizer.lr, config.data.train)
    assert ("small", "some/folder", 7, 0.001, "a.jsonl") == found
    assert ("fsdp", {"mixed_precision": "bfloat16"}) == (config.engine.name, config.engine.settings)
    assert "single_turn" == config.agent.name


def test_the_backend_follows_from_the_cluster_unless_it_is_named(file: Path) -> None:
    """Workers of a cluster join the backend, which ``memory`` does not allow."""
    for overrides, expected in (
        ([], "memory"),
        (["cluster.name=ray"], "zmq"),
        (["cluster.name=ray", "transfer_queue={units: 2}"], "zmq"),
        (["cluster.name=ray", "transfer_queue=sql"], "sql"),
        (["transfer_queue=zmq"], "zmq"),
        (["queue.address=shared/address.json"], "zmq"),
        (["queue.address=shared/address.json", "transfer_queue=redis"], "redis"),
    ):
        assert expected == load_config(file, overrides).transfer_queue.name


def test_the_backend_of_a_served_queue_is_one_that_is_joined(file: Path) -> None:
    """For ``queue serve`` and each role, which share a file without ``queue.address``."""
    found = load_config(file, ["folder=/runs/shared"], served=True)
    assert ("zmq", "/runs/shared/queue/address.json") == (found.transfer_queue.name, found.queue.address)
    assert "memory" == load_config(file, ["transfer_queue=memory"], served=True).transfer_queue.name


def test_plain_values_are_those_that_json_reads_back(file: Path) -> None:
    """A checkpoint keeps them as JSON, and a resumed run compares them."""
    plain = as_plain(load_config(file, ["sampling.stop=[a]", "environments={own: {requires: [b]}}"]))
    assert plain == json.loads(json.dumps(plain))


def test_evaluation_stays_greedy_when_another_sampling_key_is_given(file: Path) -> None:
    sampling = load_config(file, ["evaluation.sampling.max_new_tokens=5"]).evaluation.sampling
    assert (0.0, 5) == (sampling.temperature, sampling.max_new_tokens)


SETS = "evaluation.sets={hard: {file: h.jsonl, rollouts: 4, answer: 'x(.)', sampling: {temperature: 0.5}}}"


def test_sets_of_held_out_tasks_have_their_own_settings(file: Path) -> None:
    loaded = load_config(file, [SETS, "evaluation.tasks=7"])
    own = loaded.evaluation.sets["hard"]
    assert ("h.jsonl", 4, None, 0.5, None) == (own.file, own.rollouts, own.tasks, own.sampling.temperature, own.format)
    assert (1, 7, 0.0) == (loaded.evaluation.rollouts, loaded.evaluation.tasks, loaded.evaluation.sampling.temperature)
    assert loaded == make_config(as_plain(loaded))


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("evaluation.rollouts=2", "config.invalid-value"),
        ("evaluation.sets={hard: {file: h.jsonl, rollouts: 2}}", "config.invalid-value"),
        ("evaluation.sets={eval: {file: h.jsonl}}", "config.invalid-value"),
        ("evaluation.sets={train: {file: h.jsonl}}", "config.invalid-value"),
        ("evaluation.sets={a/b: {file: h.jsonl}}", "config.invalid-value"),
        ("evaluation.sets={hard: {}}", "config.missing-key"),
        ("evaluation.sets={hard: {file: h.jsonl, every: 2}}", "config.unknown-key"),
        ("evaluation.answer='(('", "config.invalid-value"),
        ("evaluation.rollouts=0", "config.invalid-value"),
    ],
)
def test_sets_that_cannot_be_evaluated_are_refused(file: Path, override: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert code == caught.value.code
    assert "evaluation" in str(caught.value.where)


def test_what_show_prints_is_read_back_as_the_same_configuration(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["optimizer.betas=[0.9, 0.95]", "evaluation.every=5"])
    shown = tmp_path / "shown.yaml"
    shown.write_text(show(config))
    assert config == load_config(shown)


def test_a_misspelt_key_gets_a_suggestion(file: Path) -> None:
    error = fails(file, "optimizer.lrr=1")
    assert ("config.unknown-key", "optimizer.lrr") == (error.code, error.where)
    assert "unknown key 'lrr' at optimizer.lrr (did you mean 'lr'?)" == error.message


@pytest.mark.parametrize(
    ("override", "code", "where"),
    [
        ("schedule.steps=many", "config.wrong-type", "schedule.steps"),
        ("schedule.steps=0", "config.invalid-value", "schedule.steps"),
        ("mode=explore-ish", "config.invalid-value", "mode"),
        ("model=null", "config.wrong-type", "model"),
        ("optimizer.betas=[1, x]", "config.wrong-type", "optimizer.betas[1]"),
        ("engine=[1]", "config.wrong-type", "engine"),
        ("name.inner=1", "config.override", "name"),
        ("steps", "config.override", None),
        ("a.b=[", "config.override", "a.b"),
        ("engine={name: fsdp, name: other}", "config.override", "engine"),
    ],
)
def test_bad_values_are_named(file: Path, override: str, code: str, where: str | None) -> None:
    error = fails(file, override)
    assert (code, where) == (error.code, error.where)


def test_steps_to_profile_are_numbers_and_ranges_of_the_schedules_steps(file: Path) -> None:
    chosen = load_config(file, ["schedule.steps=9", "profile=step:5,8-9"])
    assert [5, 8, 9] == [step for steps in chosen.profiled_steps for step in steps]
    assert [] == load_config(file).profiled_steps


UNREADABLE = ("5", "step", "step:", "step:5,", "step:5-", "time:5", "step:+5", "step:5 ", "step:\u0665")
ABSENT = ("step:0", "step:3,10", "step:9-8", "step:1-99999999999999999999")


@pytest.mark.parametrize("text", [*UNREADABLE, *ABSENT])
def test_steps_that_cannot_be_profiled_are_refused(file: Path, text: str) -> None:
    error = fails(file, "schedule.steps=9", f"profile='{text}'")
    assert ("config.invalid-value", "profile", text) == (error.code, error.where, error.found)
    assert " at profile\n" in str(error)
    assert ("steps from 1 to 9" in str(error.expected)) == (text in ABSENT)
    assert error.fix is not None


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "config.unreadable" == fails(tmp_path / "none.yaml").code
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "config.unreadable" == fails(tmp_path / "bad.yaml").code
    (tmp_path / "list.yaml").write_text("- 1")
    assert "config.wrong-type" == fails(tmp_path / "list.yaml").code
    (tmp_path / "empty.yaml").write_text("")
    assert ("config.missing-key", "model") == (lambda e: (e.code, e.where))(fails(tmp_path / "empty.yaml"))


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("name: a\nmodel: {path: x}\nname: b\n", "name", 3),
        ("model: {path: x}\nschedule:\n  steps: 3\n  steps: 4\n", "steps", 4),
        ('model: {path: x, "path": y}\n', "path", 1),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str, key: str, line: int) -> None:
    (tmp_path / "twice.yaml").write_text(text)
    error = fails(tmp_path / "twice.yaml")
    assert "config.unreadable" == error.code
    assert f"'{key}'" in str(error.found)
    assert f"line {line}," in str(error.found)


def test_a_merged_mapping_may_replace_keys(tmp_path: Path) -> None:
    """The merge of YAML is no second key, also where the merging mapping is merged in turn."""
    text = "engine: {name: own, a: {b: &n {<<: {c: 1}, c: 2}}, d: {<<: *n, c: 3}}\nmodel: {path: x}\n"
    (tmp_path / "merged.yaml").write_text(text)
    assert {"a": {"b": {"c": 2}}, "d": {"c": 3}} == load_config(tmp_path / "merged.yaml").engine.settings


def test_explain_lists_every_setting_with_help_and_default(file: Path) -> None:
    rows = {path: (value, default) for path, value, default, _ in explain(load_config(file, ["schedule.steps=7"]))}
    assert (7, 100) == rows["schedule.steps"]
    assert ("some/folder", "(required)") == rows["model.path"]
    assert ("fsdp", "fsdp") == rows["engine.name"]


def test_a_default_that_depends_on_another_setting_is_explained() -> None:
    @attrs.frozen
    class Config:
        low: int = option(1, "the lower one")
        high: int = option(attrs.Factory(lambda made: made.low + 1, takes_self=True), "the higher one")

    assert [("low", 5, 1), ("high", 6, 6)] == [row[:3] for row in explain(Config(low=5))]


def test_every_setting_says_what_it_is_for(file: Path) -> None:
    rows = explain(load_config(file, ["model.lora={}"]))
    assert [] == [path for path, _, _, text in rows if not text]
    assert all(field.metadata.get("help") for field in attrs.fields(RunConfig)), "sections, too"


@given(st.lists(st.text("abcdefgh_", min_size=1), min_size=1, max_size=4), st.one_of(st.integers(), st.booleans()))
def test_overrides_are_yaml_at_a_path(keys: list[str], value: object) -> None:
    found: Any = apply_override({"other": 1}, ".".join(keys) + "=" + yaml.safe_dump(value))
    assert 1 == found.pop("other")
    for key in keys:
        assert [key] == list(found)
        found = found[key]
    assert value == found


def test_a_list_of_rewards_is_a_mixture() -> None:
    rewards = [{"name": "function", "path": "a.py:f", "weight": 0.7}, "rules"]
    reward = make_config({"model": {"path": "m"}, "reward": rewards}).reward
    assert ("mix", {"parts": rewards}) == (reward.name, reward.settings)


def test_sets_of_tasks_are_given_in_several_ways() -> None:
    def paths(train: object) -> list[DataSet]:
        return sets_of(make_config({"model": {"path": "m"}, "data": {"train": train}}).data.train)

    assert [DataSet(path="a.jsonl")] == paths("a.jsonl") == paths({"path": "a.jsonl"})
    assert [DataSet(path="a", weight=2.0), DataSet(path="b", weight=1.0)] == paths(
        [{"path": "a", "weight": 2}, {"path": "b", "weight": 1}]
    )
    for wrong, code in (({"path": "a", "wieght": 2}, "config.unknown-key"), ([5], "config.wrong-type")):
        with pytest.raises(ConfigError) as caught:
            paths(wrong)
        assert code == caught.value.code
        assert str(caught.value.where).startswith("data.train")


def test_an_algorithm_is_named_by_its_name_alone(tmp_path: Path) -> None:
    """Also in stages, where it gets further settings, or another name."""
    file = tmp_path / "stages.yaml"
    stages = {"first": {"algorithm": {"epochs": 2}}, "second": {"algorithm": "sft", "mode": "offline"}}
    file.write_text(yaml.safe_dump({"model": {"path": "m"}, "algorithm": "dapo", "stages": stages}))
    found = {name: (each.algorithm.name, each.algorithm.epochs) for name, each in load_stages(file).items()}
    assert {"first": ("dapo", 2), "second": ("sft", 1)} == found
