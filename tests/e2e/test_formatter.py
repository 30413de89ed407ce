"""Raw data that the command formats is accepted by runs as it is, for each of the four models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from jackfield.cli import main
from jackfield_formatter import ExperienceRow, SftRow, TaskRow, read_rows

from .conftest import Run
from .test_mixing import SMALL
from .test_modes import steps

pytestmark = pytest.mark.timeout(240)  # the first one makes the quickstart's files

Records = Sequence[Mapping[str, Any]]


def formatted(source: Path, out: Path, model: str, *options: object) -> dict[str, Any]:
    """Run `jackfield data format`; return its report."""
    words = ["data", "format", source, out, "--as", model, *options, "--json"]
    done = CliRunner().invoke(main, [*map(str, words)])
    assert 0 == done.exit_code, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def written(file: Path, records: Records) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    return file


@pytest.fixture
def problems(made: Path) -> list[dict[str, Any]]:
    """Problems of the quickstart."""
    return [json.loads(line) for line in (made / "problems.jsonl").read_text().splitlines()[:24]]


def test_tasks_from_parquet(small_run: Run, problems: Records, tmp_path: Path) -> None:
    """Thoughts and tags of an own layout; a run explores the tasks and scores what was found in the answers."""
    rows = [
        {"asked": each["question"], "worked": f"<think>Well.</think><answer>{each['answer']}</answer>"}
        for each in problems
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "raw.parquet")
    mapping = ("--map", "prompt=asked", "--map", "ground_truth=worked | final('answer')")
    report = formatted(tmp_path / "raw.parquet", out := tmp_path / "tasks.jsonl", "task", *mapping)
    assert (24, 0) == (report["rows"], report["set_aside"])
    expected = [(each["question"], str(each["answer"]), f"raw:{n}") for n, each in enumerate(problems, 1)]
    assert expected == [(row.prompt, row.ground_truth, row.id) for row in read_rows(out, TaskRow)]
    _, lines = small_run("tasks", f"data.train={out}", "schedule.steps=2", *SMALL)
    assert [4.0, 4.0] == [line["samples"] for line in steps(lines)]


def test_answers_to_imitate_from_conversations_and_from_a_corpus(
    small_run: Run, problems: Records, tmp_path: Path
) -> None:
    """Each turn of ShareGPT's conversations, and the pieces of a text file: both are trained on."""
    chats = [
        {
            "conversations": [
                {"from": author, "value": str(each[column])}
                for each in pair
                for author, column in (("human", "question"), ("gpt", "answer"))
            ]
        }
        for pair in zip(problems[::2], problems[1::2], strict=True)
    ]
    out, text = tmp_path / "sft.jsonl", tmp_path / "text.jsonl"
    assert 24 == formatted(written(tmp_path / "chats.jsonl", chats), out, "sft", "--turns", "all")["rows"]
    said = [row.completion for row in read_rows(out, SftRow)]
    assert [str(each["answer"]) for each in problems] == [each[0]["content"] for each in said if each[0]]  # type: ignore[index]
    (tmp_path / "corpus.txt").write_text("\n\n".join(each["question"] for each in problems))
    assert 12 <= formatted(tmp_path / "corpus.txt", text, "sft", "--size", 60)["rows"]
    for name, file in (("chats", out), ("corpus", text)):
        settings = (f"data.train={file}", "schedule.steps=2", "data.groups_per_batch=8")
        _, lines = small_run(name, *settings, file="warmup.yaml")
        assert [8.0, 8.0] == [line["samples"] for line in steps(lines)]


def test_preferences_from_transcripts(small_run: Run, problems: Records, tmp_path: Path) -> None:
    """Two transcripts that begin alike become a prompt and two answers, from which DPO learns."""
    pairs = [
        {
            name: f"\n\nHuman: {each['question']}\n\nAssistant: {answer}"
            for name, answer in (("chosen", each["answer"]), ("rejected", "I do not know."))
        }
        for each in problems
    ]
    out = tmp_path / "dpo.jsonl"
    assert 24 == formatted(written(tmp_path / "pairs.jsonl", pairs), out, "dpo")["rows"]
    settings = (f"data.train={out}", "algorithm.name=dpo", "schedule.steps=2", "data.groups_per_batch=4")
    _, lines = small_run("dpo", *settings, file="warmup.yaml")
    assert [8.0, 8.0] == [line["samples"] for line in steps(lines)]


def test_experiences_from_scored_responses(small_run: Run, made: Path, problems: Records, tmp_path: Path) -> None:
    """Responses with rewards from elsewhere become samples in the run's tokens, which batches mix in."""
    rows = [
        {"prompt": each["question"], "response": said, "reward": reward, "group": n, "id": f"p{n}"}
        for n, each in enumerate(problems[:6])
        for said, reward in ((str(each["answer"]), 1.0), ("I do not know.", 0.0))
    ]
    raw, out, queue = written(tmp_path / "raw.jsonl", rows), tmp_path / "human.jsonl", tmp_path / "kept"
    assert 12 == formatted(raw, out, "experience", "--model", made / "model", "--log-probs")["rows"]
    found = list(read_rows(out, ExperienceRow))
    assert [("p0", "0", 1.0), ("p0", "0", 0.0)] == [(row.task, row.group, row.reward) for row in found[:2]]
    assert all(row.rollout_log_probs and max(row.rollout_log_probs) < 0 for row in found)
    done = CliRunner().invoke(main, ["queue", "import", str(out), str(queue), "--partition", "human"])
    assert (0, "12 samples") == (done.exit_code, done.output[:10]), done.output
    for name, samples in (("imported", queue), ("file", out)):
        human = f"mixing.human={{ratio: 1, samples: {samples}}}"
        _, lines = small_run(name, "schedule.steps=2", human, *SMALL)
        assert [4.0, 4.0] == [line["samples/human"] for line in steps(lines)]


def test_a_run_begins_with_the_formatter(small_run: Run, problems: Records, tmp_path: Path) -> None:
    """Records of an own layout become tasks within the run, and a sample is traced to its raw line."""
    raw = written(tmp_path / "raw.jsonl", [{"asked": each["question"], "worked": each["answer"]} for each in problems])
    settings = (
        f"data.train={raw}",
        "data.pipeline.tasks=[{name: format, into: task, map: {prompt: asked, ground_truth: worked | string}}]",
        "data.format={prompt_key: prompt, answer_key: ground_truth}",
        "schedule.steps=1",
    )
    result, lines = small_run("piped", *settings, *SMALL)
    assert [4.0] == [line["samples"] for line in steps(lines)]
    done = CliRunner().invoke(main, ["data", "trace", str(result.folder), "raw:1"])
    assert 0 == done.exit_code, done.output
    assert "changed by format" in done.output
    assert problems[0]["question"] in done.output
