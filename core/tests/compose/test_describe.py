"""What ``jackfield config explain`` says about a schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield.compose.checks import describe_lengths
from jackfield.compose.schedules import describe

from .test_resolve import STREAM, resolved, resolved_config

SEPARATE = "cluster.placement=separate"


@pytest.mark.parametrize(
    ("overrides", "said", "unsaid"),
    [
        ((), ["Every token is of the weights that its step starts from.", "Nothing overlaps with rollouts"], ["older"]),
        (
            ("schedule.sync_offset=1", SEPARATE),
            [
                "at most one step older",
                "until replicas have the weights that step b - 1",
                "overlap with log-probs",
            ],
            ["take turns", "Nothing overlaps"],
        ),
        (
            ("schedule.sync_interval=3", "cluster.placement=shared"),
            ["after every 3 steps", "at most 2 steps older", "take turns", "not with updates"],
            ["Every token"],
        ),
        (STREAM, ["Each of 4 updates starts when the rewards of its groups are there"], ["Updates start when all"]),
        (
            (*STREAM, "algorithm.old_log_probs=engine"),
            ["Log-probs and values are computed once per batch, while its rewards are pending."],
            [],
        ),
        (
            ("schedule.mode=async", "schedule.max_staleness=4"),
            ["any that are complete", "at most 4 steps older", "waits for a straggler only when"],
            ["step t on batch t"],
        ),
        (
            ("schedule.mode=async", "schedule.on_stale=drop", "schedule.rollouts_in_flight=7"),
            ["waits for no straggler", "generated again", "fewer than 7 rollouts"],
            ["trained on late"],
        ),
        (
            ("schedule.partial_rollout=true", "schedule.sync_offset=1", "cluster.placement=shared"),
            ["An update interrupts the rollouts that run"],
            ["has no effect"],
        ),
        (
            ("schedule.partial_rollout=true", "schedule.sync_offset=1", "cluster.name=inline", "cluster.threads=1"),
            ["schedule.partial_rollout has no effect"],
            ["An update interrupts"],
        ),
        (("schedule.rollouts_in_flight=1",), ["A group starts while no rollout runs"], ["fewer than"]),
        (("mode=offline", "algorithm.name=sft"), ["nothing is stale"], ["explorer"]),
    ],
)
def test_a_schedule_is_described(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], said: list[str], unsaid: list[str]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # room for an engine and a replica of one thread each
    text = " ".join(describe(resolved_config(*overrides), resolved(*overrides)))
    assert [] == [part for part in said if part not in text], text
    assert [] == [part for part in unsaid if part in text], text


@pytest.mark.parametrize(
    ("positions", "overrides", "said"),
    [
        (100, ("data.max_prompt_tokens=40", "sampling.max_new_tokens=60"), None),
        (
            99,
            ("sampling.max_new_tokens=120",),
            "end at 99 tokens (max_position_embeddings), before a prompt of 1 and a",
        ),
        (200, ("sampling.max_new_tokens=60", "cluster.max_model_len=50"), "end at 50 tokens (cluster.max_model_len"),
        (None, ("sampling.max_new_tokens=60",), None),
    ],
)
def test_a_limit_of_positions_is_said(
    positions: int | None, overrides: tuple[str, ...], said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    found = describe_lengths(resolved_config(f"model.path={tmp_path}", *overrides))
    assert [True] * (said is not None) == [str(said) in each for each in found]


def test_a_model_that_is_not_there_has_no_limit() -> None:
    assert [] == describe_lengths(resolved_config("model.path=nowhere"))
