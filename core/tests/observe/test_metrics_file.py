from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jackfield.errors import RunError


def read(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    assert "" == lines.pop()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_every_event_is_one_line_that_is_there_when_the_hook_returns(make_run):
    run = make_run(metrics_file=True).start()
    run.evaluate(0, score=0.25)
    run.sync(1)
    run.step(1, seconds=2.5, loss=0.5, tokens=7)

    assert [
        {"kind": "evaluation", "step": 0, "time": 0.0, "score": 0.25},
        {
            "kind": "weights",
            "step": 1,
            "time": 0.0,
            "seconds": 0.5,
            "paused_seconds": 0.2,
            "replicas": 2,
            "sent_bytes": 0,
        },
        {"kind": "step", "step": 1, "time": 2.5, "loss": 0.5, "tokens": 7},
    ] == read(run.folder)


def test_values_that_are_not_finite_are_null_and_named(make_run):
    run = make_run(metrics_file=True).start()
    run.step(1, a=math.nan, b=1.0, c=math.inf, d=-math.inf)

    line = read(run.folder)[0]
    assert {"a": None, "b": 1.0, "c": None, "d": None} == {name: line[name] for name in "abcd"}
    assert ["a", "c", "d"] == line["not_finite"]


def test_array_and_tensor_scalars_are_numbers(make_run):
    run = make_run(metrics_file=True).start()
    run.step(1, a=np.float32(0.5), b=np.int64(3), c=torch.tensor(0.25), d=torch.tensor(math.nan))

    line = read(run.folder)[0]
    assert (0.5, 3, 0.25, None) == (line["a"], line["b"], line["c"], line["d"])


def test_a_metric_named_like_a_field_keeps_its_value_under_another_name(make_run):
    run = make_run(metrics_file=True).start()
    run.step(1, time=9.0, kind=8.0)

    line = read(run.folder)[0]
    assert ("step", 1.0, 9.0, 8.0) == (line["kind"], line["time"], line["metric/time"], line["metric/kind"])


def test_a_resumed_run_cuts_later_and_torn_lines_and_goes_on_in_time(make_run):
    first = make_run(metrics_file=True).start()
    for step in (1, 2, 3):
        first.step(step, seconds=10)
        first.evaluate(step, score=step / 10)
    path = first.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "ste')  # killed

    second = make_run(metrics_file=True).start(first_step=2)
    second.step(3, seconds=1, again=1)
    second.end()

    assert [("step", 1, 10), ("evaluation", 1, 10), ("step", 2, 20), ("evaluation", 2, 20), ("step", 3, 21)] == [
        (line["kind"], line["step"], line["time"]) for line in read(second.folder)
    ]
    assert ["metrics.jsonl"] == [path.name for path in second.folder.iterdir()]


def test_a_run_that_starts_again_keeps_nothing(make_run):
    make_run(metrics_file=True).start().evaluate(0, score=0.5)
    run = make_run(metrics_file=True).start()

    assert [] == read(run.folder)


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_a_full_disk_leaves_whole_lines_and_names_the_observer(make_run, full_disk, on_error):
    run = make_run(metrics_file=True, on_error=on_error).start()
    run.step(1, loss=1.0)
    with full_disk((run.folder / "metrics.jsonl").stat().st_size + 20):
        if on_error == "stop":
            with pytest.raises(RunError) as caught:
                run.step(2, loss=1.0)
            told = str(caught.value)
        else:
            run.step(2, loss=1.0)
            told = "\n".join(run.screen)
    run.step(3, loss=1.0)  # it no longer listens
    run.end()

    assert [1] == [line["step"] for line in read(run.folder)]
    assert "metrics.jsonl" in told
    assert "File too large" in told
    assert 1 >= "\n".join(run.screen).count("observer")


def test_an_event_before_the_start_is_an_error(make_run):
    with pytest.raises(RunError) as caught:
        make_run(metrics_file=True).step(1, loss=1.0)
    assert "run.failed" == caught.value.code


def test_damaged_lines_are_left_out_with_a_warning(make_run, caplog):
    run = make_run(metrics_file=True).start()
    run.step(1, a=1.0)
    run.end()
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n" + "garbage\n")

    again = make_run(metrics_file=True).start(first_step=1)
    again.step(2, a=2.0)
    assert [1.0, 2.0] == [line["a"] for line in read(again.folder)]
    assert "2 damaged lines" in caplog.text
