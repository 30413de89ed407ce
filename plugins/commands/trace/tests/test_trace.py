"""``jackfield trace``: the list, a rollout on the terminal, and where rollouts come from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import pytest

from jackfield_trace.sources import Source

from .conftest import ANSWER, CALL, EVIL, KEY, RunFolder, Trace, record

#: What is said of a score in a run's folder ``scores``.
SCORE = {
    "key": KEY,
    "score": 0.75,
    "status": "ok",
    "reward": "judge",
    "explanation": f"right, {EVIL}",
    "dimensions": {"right": 1.0},
    "time": 1.8e9,
    "ground_truth": "4",
}
SUB_AGENT = {"task": "sum-3", "parent": 0, "relation": "sub_agent", "agent_name": "critic", "finish_reason": "stop"}


def second(key: str = "train/0/3/0/1/1") -> attrs.AttrsInstance:
    return record(key, ("No.<|im_end|>", 1), tags=SUB_AGENT)


def test_rollouts_are_listed_with_their_sequences_together(run_folder: RunFolder, trace: Trace) -> None:
    run_folder.table(1, record(), second())  # type: ignore[arg-type]
    run_folder.table(2, record("train/1/0/0/0/0", reward=None))
    run_folder.table(2, record("eval/sum-9", tags={"task": "sum-9", "ground_truth": "9"}), partition="eval")
    rows = json.loads(trace(run_folder.folder, "--json").output)
    found = {row["rollout"]: (row["step"], row["sequences"], row["reward"]) for row in rows}
    expected = {"train/0/3/0/1": (1, 2, "0.75, 0.75"), "train/1/0/0/0": (2, 1, None), "eval/sum-9": (2, 1, "0.75")}
    assert expected == found
    assert 1 == len(json.loads(trace(run_folder.folder, "--step", 1, "--json").output))
    assert "train/0/3/0/1" in trace(run_folder.folder).output


def test_a_rollout_is_printed_with_all_that_is_known_of_it(run_folder: RunFolder, trace: Trace) -> None:
    run_folder.table(1, record(), second())  # type: ignore[arg-type]
    run_folder.scores(SCORE)
    text = trace(run_folder.folder, "train/0/3/0/1").output
    for part in (
        CALL,
        ANSWER,
        "turn 1 · 70 tokens",
        "turn 2 · 14 tokens",
        "inserted",
        "reward 0.75",
        "sequence 1 · critic · sub agent of sequence 0",
        "answered",
        "judge",
        "right: 1",
        "550 ms",  # when the tool began
        "200 ms",  # how long it took
        "weights 5",
        "weight versions  4, 5",
    ):
        assert part in text, part


def test_the_key_of_a_sample_is_enough(run_folder: RunFolder, trace: Trace) -> None:
    run_folder.table(1, record(), second())  # type: ignore[arg-type]
    assert "sequence 0" in trace(run_folder.folder, "train/0/3/0/1/1").output


def test_texts_of_models_and_tools_cannot_control_the_terminal(run_folder: RunFolder, trace: Trace) -> None:
    """Neither by escape sequences nor by rich's markup; with and without colours."""
    run_folder.table(1, record(tags={"task": EVIL, "turns": 2}))
    run_folder.scores(SCORE)
    for arguments in ((), (KEY,), (KEY, "--json"), (KEY, "--export", "sharegpt"), (KEY, "--export", "otel")):
        text = trace(run_folder.folder, *arguments).output
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text), arguments
    assert "[bold]not bold[/bold]" in trace(run_folder.folder, KEY).output


def test_colours_are_the_only_escape_sequences(
    run_folder: RunFolder, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run_folder.table(1, record())
    text = trace(run_folder.folder, KEY, color=True).output
    assert "\x1b[" in text
    assert "\x1b" not in re.sub("\x1b\\[[0-9;]*m", "", text)
    assert "\x1b[1;37;41m" in text  # a token that was improbable


def test_the_latest_step_is_shown_if_none_is_named(run_folder: RunFolder) -> None:
    """Evaluations of several weight versions have the same keys."""
    for step, reward in ((0, 0.0), (4, 1.0)):
        tags = {"task": "sum-9", "ground_truth": "9"}
        run_folder.table(step, record("eval/sum-9", tags=tags, reward=reward), partition="eval")
    source = Source(run_folder.folder)
    assert (4, [1.0]) == (source.find("eval/sum-9").step, source.find("eval/sum-9").rewards)
    assert [0.0] == source.find("eval/sum-9", 0).rewards


def test_rollouts_of_one_evaluation_task_are_apart(run_folder: RunFolder) -> None:
    tags = {"task": "t", "ground_truth": "9"}
    rows = [record("eval/t", tags={**tags, "rollout": each}, reward=float(each)) for each in range(2)]
    run_folder.table(3, *rows, partition="eval")
    source = Source(run_folder.folder)
    assert {"eval/t", "eval/t/1"} == {each.key for each in source.listed()}
    assert [1.0] == source.find("eval/t/1").rewards


@pytest.mark.parametrize("of_run", [True, False])
def test_an_archive_has_the_same_as_a_table(run_folder: RunFolder, tmp_path: Path, of_run: bool) -> None:
    """It is found through the run's configuration, or named itself."""
    folder = run_folder.archive(tmp_path / "archive", record(), second(), step=0)  # type: ignore[arg-type]
    run_folder.configure(queue={"archive": str(folder)})
    model = str(run_folder.folder / "model")
    archived = (Source(run_folder.folder) if of_run else Source(folder, model)).find(KEY)
    run_folder.table(1, record(), second())  # type: ignore[arg-type]
    table = Source(run_folder.folder).find(KEY)
    assert archived.source.endswith(".parquet")
    assert table.source.endswith(".jsonl")
    assert table.step == archived.step == 1
    assert table.told == archived.told
    for one, other in zip(table.sequences, archived.sequences, strict=True):
        assert one.prompt == other.prompt
        assert [token.text for token in one.tokens] == [token.text for token in other.tokens]
        assert [token.version for token in one.tokens] == [token.version for token in other.tokens]
        assert pytest.approx([token.log_prob for token in one.tokens]) == [token.log_prob for token in other.tokens]
        assert (one.reward, one.parent, one.relation) == (other.reward, other.parent, other.relation)


@pytest.mark.parametrize("closed", [True, False])
def test_scores_are_read_while_the_run_writes_them(run_folder: RunFolder, closed: bool) -> None:
    run_folder.table(1, record())
    run_folder.scores(SCORE, {**SCORE, "key": "another"}, closed=closed)
    (score,) = Source(run_folder.folder).find(KEY).sequences[0].scores
    assert ("judge", 0.75, {"right": 1.0}, 1.8e9) == (score.name, score.score, score.dimensions, score.time)
    assert score.explanation.startswith("right")


def test_without_a_tokenizer_tokens_are_ids(run_folder: RunFolder, trace: Trace) -> None:
    (run_folder.folder / "model" / "tokenizer.json").unlink()
    run_folder.table(1, record())
    text = trace(run_folder.folder, KEY).output
    assert "--model" in text
    assert f"⟦{record().response_ids[0]}⟧" in text


def test_what_is_not_there_is_an_error_that_says_what_to_do(run_folder: RunFolder, trace: Trace) -> None:
    empty = trace(run_folder.folder, "--json")
    assert (1, "queue.invalid") == (empty.exit_code, json.loads(empty.output)["error"]["code"])
    run_folder.table(1, record())
    missing = json.loads(trace(run_folder.folder, "train/0/3/0/2/0", "--json").output)["error"]
    assert "queue.unknown-sample" == missing["code"]
    assert "train/0/3/0/1" in missing["fix"]
    unknown = json.loads(trace(run_folder.folder, KEY, "--model", run_folder.folder, "--json").output)["error"]
    assert "config.invalid-value" == unknown["code"]
    assert 2 == trace(run_folder.folder, "--html", run_folder.folder / "x.html").exit_code
    assert 2 == trace(run_folder.folder, KEY, "--out", run_folder.folder / "x.json").exit_code


def test_tables_of_earlier_versions_are_shown(run_folder: RunFolder, trace: Trace) -> None:
    """They have neither log-probs nor what the agent said."""
    (run_folder.folder / "samples").mkdir(exist_ok=True)
    row = {"step": 3, "key": KEY, "prompt": "p", "response": "ab", "reward": 1.0, "response_ids": [64, 65]}
    line = json.dumps({**row, "response_mask": [1, 0], "mask_text": "", "tags": {"task": "t"}})
    (run_folder.folder / "samples" / "train.jsonl").write_text(line + "\nnot json\n")
    assert "turn 1 · 1 tokens" in trace(run_folder.folder, KEY).output
    assert 0 == trace(run_folder.folder, KEY, "--export", "otel").exit_code
