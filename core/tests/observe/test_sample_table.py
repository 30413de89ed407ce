from __future__ import annotations

import io
import json
import math

from rich.console import Console

from jackfield.observe import read_samples, render_samples


def test_a_sample_is_one_readable_object(make_run, sample):
    run = make_run(sample_table=True).start()
    more = {"log_probs": (-0.5, 0.0), "weight_versions": (3, -1), "token_rewards": (), "rollout": {"turns": 2}}
    run.samples(1, sample("a", response="größer\u2028 [b]", response_mask=(1, 0, 0, 1, 1), **more))

    raw = (run.folder / "samples/train.jsonl").read_text(encoding="utf-8")
    assert 1 == len(raw.splitlines())
    assert "größer" in raw
    assert {
        "step": 1,
        "key": "a",
        "prompt": "2 + 2 = ?",
        "response": "größer\u2028 [b]",
        "reward": 1.0,
        "response_ids": [5, 6, 7],
        "response_mask": [1, 0, 0, 1, 1],
        "mask_text": "1 model, 2 inserted, 2 model",
        "tags": {"group": 3},
        "log_probs": [-0.5, 0.0],
        "weight_versions": [3, -1],
        "token_rewards": [],
        "rollout": {"turns": 2},
    } == json.loads(raw)


def test_tables_are_apart(make_run, sample):
    run = make_run(sample_table=True).start()
    for count, partition in enumerate(("train", "eval", "../odd"), 2):
        run.samples(1, *(sample(str(number)) for number in range(count)), partition=partition)
    run.failures(1, x="deadline", y="reward agent said no")
    run.end()

    folder = run.folder / "samples"
    assert {"train.jsonl": 2, "eval.jsonl": 3, "_odd.jsonl": 4, "failed.jsonl": 2} == {
        path.name: len(read_samples(path)) for path in folder.iterdir()
    }
    assert {"step": 1, "key": "x", "reason": "deadline"} == read_samples(folder / "failed.jsonl")[0]


def test_odd_values_stay_json(make_run, sample):
    run = make_run(sample_table=True).start()
    run.samples(1, sample(reward=math.nan, response="\ud83d alone", tags={"a": [1, math.inf], "b": {2}, "c": object}))

    (row,) = read_samples(run.folder / "samples/train.jsonl")
    assert (None, ["reward", "tags.a[1]"]) == (row["reward"], row["not_finite"])
    assert {"a": [1, None], "b": [2], "c": "<class 'object'>"} == row["tags"]
    assert "\ud83d alone" == row["response"]


def test_a_resumed_run_cuts_and_a_new_one_removes(make_run, sample):
    first = make_run(sample_table=True).start()
    for step in (1, 2, 3):
        first.samples(step, sample())
    first.samples(3, sample(), partition="eval")
    second = make_run(sample_table=True).start(first_step=2)
    second.samples(3, sample("new"))

    train = second.folder / "samples/train.jsonl"
    assert [(1, "a"), (2, "a"), (3, "new")] == [(row["step"], row["key"]) for row in read_samples(train)]
    assert ["new"] == [row["key"] for row in read_samples(train, step=-1)]
    assert [] == read_samples(second.folder / "samples/eval.jsonl")

    make_run(sample_table=True).start()
    assert [] == list((second.folder / "samples").iterdir())


def test_rendering_shows_rows_and_records_as_they_are(make_run, sample):
    run = make_run(sample_table=True).start()
    run.samples(1, sample("k1", response="[bold]x[/bold]"))
    rows = read_samples(run.folder / "samples/train.jsonl")
    text = io.StringIO()
    render_samples([*rows, sample("k2", reward=None)], Console(file=text, width=160), title="step 1")

    shown = text.getvalue()
    for part in ("step 1", "k1", "k2", "2 + 2 = ?", "[bold]x[/bold]", "2 model, 1", "inserted", " 1 ", " - "):
        assert part in shown
    assert max(len(line) for line in shown.splitlines()) <= 160
