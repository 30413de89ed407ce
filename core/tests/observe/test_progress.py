from __future__ import annotations

import re

import pytest

from jackfield.errors import EngineError
from jackfield.plugins.hooks import RewardsPending

PLUGINS = {
    "engine": {"name": "fsdp", "lr": 1e-3},
    "reward": {"name": "rules"},
    "cluster": {"name": "inline"},
    "optimizer": {"name": "adamw"},
}


def a_whole_run(run) -> None:
    run.start(**PLUGINS)
    run.evaluate(0, score=0.25, failed=0.0, tasks=8.0)
    run.step(1, seconds=2, **{"reward/mean": 0.5, "policy/loss": -0.00025, "samples_per_second": 32.0})
    run.failures(1, a="deadline\npassed", b="deadline passed", c="no score")
    run.step(2, seconds=4, **{"reward/mean": 0.625, "policy/loss": 0.5, "samples_per_second": 20.0})
    run.evaluate(2, score=0.75, failed=0.125)
    run.step(3, seconds=240, **{"reward/mean": 0.5, "policy/loss": 0.5})
    run.step(4, seconds=1, **{"reward/mean": 0.75, "policy/loss": 12345678.0})
    run.evaluate(4, score=0.5)


def test_without_a_terminal_there_are_plain_lines(make_run):
    run = make_run(progress=True, metrics_file=True, progress_interval=0.0)
    a_whole_run(run)
    run.end()

    assert [
        "run demo in FOLDER",
        "plugins: engine fsdp, reward rules",
        "evaluation at step 0: score 0.250",
        "step 1/4: reward 0.500, loss -2.50e-04, 32.0 samples/s, 6 s left",
        "step 1: 3 samples failed: 1 x deadline passed; 1 x deadline passed; 1 x no score",
        "step 2/4: reward 0.625, loss 0.500, 20.0 samples/s, 6 s left",
        "evaluation at step 2: score 0.750, failed 0.125 (best 0.750 at step 2)",
        "step 3/4: reward 0.500, loss 0.500, 82 s left",
        "step 4/4: reward 0.750, loss 1.23e+07",
        "evaluation at step 4: score 0.500 (best 0.750 at step 2)",
        "run ended well: 4 steps in 4:07",
        "evaluation score: best 0.750 at step 2, last 0.500 at step 4",
        "files in FOLDER: metrics.jsonl",
    ] == run.screen


def test_lines_come_no_more_often_than_the_interval_but_the_first_and_the_last_always(make_run):
    run = make_run(progress=True, progress_interval=3.0).start(total_steps=8)
    for step in range(1, 9):
        run.step(step, seconds=1, **{"policy/loss": 1.0})

    assert ["1/8", "4/8", "7/8", "8/8"] == re.findall(r"step (\d+/\d+)", "\n".join(run.screen))


def test_a_step_that_waits_for_rewards_says_so_every_ten_seconds(make_run):
    run = make_run(progress=True).start()
    for seconds, scored in ((0, 0), (6, 10), (11, 300), (12, 310), (25, 600)):
        run.clock.now = 100 + seconds
        run.emit(RewardsPending(step=0, scored=scored, in_progress=64, waiting=1000 - scored))
    told = [line for line in run.screen if "rewards" in line]
    assert [
        "step 1/4: rewards: 300 scored, 64 in progress, 700 waiting",
        "step 1/4: rewards: 600 scored, 64 in progress, 400 waiting",
    ] == told


def test_a_failure_is_told_in_one_line(make_run):
    run = make_run(progress=True).start()
    run.end(steps=2, error=EngineError("the engine [x] broke", expected="that it holds"))
    assert "run FAILED after 2 steps in 0 s: [engine.failed] the engine [x] broke" == run.screen[1]
    assert "files in FOLDER: none" == run.screen[2]

    other = make_run(progress=True).start()
    other.end(steps=0, error=KeyboardInterrupt())
    assert "run FAILED after 0 steps in 0 s: KeyboardInterrupt" == other.screen[1]


def test_a_role_that_scores_counts_groups(make_run):
    run = make_run(progress=True).start()
    run.end(steps=24, counted="groups scored")
    assert "run ended well: 24 groups scored in 0 s" == run.screen[1]


def test_a_resumed_run_says_so_and_knows_its_best(make_run):
    first = make_run(metrics_file=True).start()
    first.evaluate(1, score=0.9)
    first.evaluate(3, score=0.99)
    run = make_run(progress=True).start(first_step=2)
    run.evaluate(4, score=0.5)

    assert [
        "resumed after step 2 of 4",
        "evaluation at step 4: score 0.500 (best 0.900 at step 1)",
    ] == run.screen[1:]


def test_a_run_that_recovers_in_its_process_forgets_scores_of_steps_that_are_done_again(make_run):
    run = make_run(metrics_file=True, progress=True).start()
    run.evaluate(1, score=0.5)
    run.evaluate(3, score=0.99)
    run.end(steps=3, error=EngineError("a worker died"))
    run.start(first_step=2).evaluate(4, score=0.75)

    assert "evaluation at step 4: score 0.750 (best 0.750 at step 4)" == run.screen[-1]


def test_an_evaluation_without_a_score_shows_all_it_has(make_run):
    run = make_run(progress=True).start()
    run.evaluate(0, perplexity=4.0, tokens=5.5)
    run.evaluate(1, score=float("nan"))

    assert ["evaluation at step 0: perplexity 4.000, tokens 5.500", "evaluation at step 1: score nan"] == run.screen[1:]


def test_on_a_terminal_there_is_a_bar_that_goes_away_at_the_end(make_run):
    run = make_run(terminal=True, progress=True)
    a_whole_run(run)
    run.end()

    shown = run.text.getvalue()
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "4/4" in plain
    assert "reward 0.750, evaluation score 0.750, loss 1.23e+07" in plain
    assert "evaluation at step 2: score 0.750, failed 0.125 (best 0.750 at step 2)" in plain
    assert plain.rstrip().endswith(f"files in {run.folder}: none")
    assert "\x1b[?25h" in shown  # the cursor is shown again


def test_a_narrow_terminal_cuts_the_metrics_and_keeps_the_bar(make_run):
    run = make_run(terminal=True, width=60, progress=True).start()
    run.step(3, seconds=2, **{"reward/mean": 0.5, "policy/loss": 0.25}, samples_per_second=1000.0)
    run.end()

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", run.text.getvalue())
    (line,) = [line for line in re.split(r"[\r\n]+", plain) if "3/4" in line]
    assert "2 s left reward" in line
    assert line.rstrip().endswith("…")


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "COLORTERM"])
def test_forced_colours_put_no_escape_codes_into_a_file(make_run, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    run = make_run(progress=True, progress_interval=0.0)
    a_whole_run(run)
    run.end()

    assert "\x1b" not in run.text.getvalue()
