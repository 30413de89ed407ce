"""Trackers get what a run reports, in order, and none of them can stop it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import pytest

from jackfield.abc.tracker import TrackedRun, Tracker
from jackfield.algorithms import registry
from jackfield.errors import ConfigError
from jackfield.observe import ObserveSettings
from jackfield.observe.trackers import check_trackers


@attrs.define(kw_only=True)
class Noting(Tracker):
    """Notes its calls; ``fails`` at a step, or ``waits`` there until the test says so."""

    calls: ClassVar[list[Any]] = []
    go_on: ClassVar[threading.Event]
    reached: ClassVar[threading.Event]
    fails: int = 0
    waits: int = 0

    def start(self, run: TrackedRun) -> str:
        self.calls.append(("start", run.id, run.config))
        return f"id-{len(self.calls)}"

    def metrics(self, kind: str, step: int, values: Any) -> None:
        if step == self.waits:
            self.reached.set()
            assert self.go_on.wait(30)
        if step == self.fails:
            raise OSError("no route to the service")
        self.calls.append((kind, step, values))

    def samples(self, step: int, partition: str, rows: Any) -> None:
        self.calls.append((partition, step, [row["key"] for row in rows]))

    def end(self, error: str | None, curve: Any) -> None:
        self.calls.append(("end", error, curve and curve.name))


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))
    registry.register("tracker", "noting")(Noting)
    Noting.calls, Noting.go_on, Noting.reached = [], threading.Event(), threading.Event()
    yield Noting.calls
    Noting.go_on.set()


def test_it_gets_configuration_metrics_samples_and_the_curve(make_run, sample, noting):
    run = make_run(report_to=("noting",), curve=True).start(lr=0.5)
    run.step(1, reward=0.25)
    run.samples(1, sample("a"))
    run.evaluate(1, score=1.0)
    run.end(steps=1)
    assert ("start", None, {"lr": 0.5}) == noting[0]
    assert [("step", 1, {"reward": 0.25}), ("train", 1, ["a"]), ("evaluation", 1, {"score": 1.0})] == noting[1:4]
    assert [("end", None, "learning_curve.png")] == noting[4:]
    assert {"id": "id-1"} == json.loads((run.folder / "trackers" / "noting.json").read_text())


@pytest.mark.parametrize(("first_step", "id"), [(2, "id-1"), (0, None)])
def test_a_resumed_run_has_its_id_and_one_from_the_beginning_has_not(make_run, noting, first_step, id):
    make_run(report_to=("noting",)).start().end()
    make_run(report_to=("noting",)).start(first_step=first_step).end()
    assert ["start", id] == list(noting[2][:2])


def test_one_that_fails_is_told_once_and_the_run_goes_on(make_run, noting):
    run = make_run(report_to=("noting",), trackers={"noting": {"fails": 1}}).start()
    run.step(1, reward=0.0)
    run.listeners[-1]._thread.join(30)
    run.step(2, reward=0.0)
    run.step(3, reward=0.0)
    run.end()
    told = "the tracker 'noting' failed, and the run goes on without it: OSError: no route to the service"
    assert [told] == run.screen
    kept = json.loads((run.folder / "trackers" / "noting.json").read_text())
    assert {"id": "id-1", "error": "OSError: no route to the service", "lost": 4} == kept


def test_one_that_hangs_is_left_behind_at_its_deadline(make_run, noting):
    settings = {"trackers": {"noting": {"waits": 1}}, "tracker_deadline": 5.0}
    run = make_run(report_to=("noting",), **settings).start()
    run.step(1, reward=0.0)
    assert Noting.reached.wait(30)
    run.step(2, seconds=4.0, reward=0.0)  # it may still answer
    assert [] == run.screen
    run.step(3, seconds=4.0, reward=0.0)
    run.step(4, reward=0.0)
    run.end()  # it is not waited for
    assert ["it did not answer in 5 s (observe.tracker_deadline)"] == [each.partition("it: ")[2] for each in run.screen]
    assert 5 == json.loads((run.folder / "trackers" / "noting.json").read_text())["lost"]


def test_one_that_never_ends_does_not_hold_the_run_up(make_run, noting):
    settings = {"trackers": {"noting": {"waits": 1}}, "tracker_deadline": 0.1}
    run = make_run(report_to=("noting",), **settings).start()
    run.step(1, seconds=0.0, reward=0.0)
    run.end(steps=1)
    assert "it did not end in 0.1 s" in run.screen[-1]


@pytest.mark.parametrize(
    ("settings", "where", "says"),
    [
        ({"report_to": ("notng",)}, "observe.report_to", "did you mean 'noting'?"),
        ({"report_to": ("noting", "noting")}, "observe.report_to", "named twice"),
        ({"trackers": {"noting": {}}}, "observe.trackers.noting", "no effect"),
        ({"report_to": ("noting",), "trackers": {"noting": {"a": 1}}}, "observe.trackers.noting.a", "unknown key"),
    ],
)
def test_what_cannot_report_is_refused_before_the_run(settings, where, says):
    with pytest.raises(ConfigError) as caught:
        check_trackers(ObserveSettings(**settings))
    assert where == caught.value.where
    assert says in caught.value.message
