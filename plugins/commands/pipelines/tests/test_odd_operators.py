"""Operators that give scores which are no numbers, or raise what ends a program: in files, in a run, in a service."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import JackfieldError, OperatorError
from jackfield_commands import CommandServer
from jackfield_pipelines.row_sets import SET_ASIDE
from jackfield_testing import in_loop

from .conftest import Counters, Held, Serve, config, experiences, rows, stages

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("site")]

SCORES = ("number", "text", "nan", "none", "infinity", "huge", "list", "true")
GOOD = ("number", "none", "true")  #: a task's score may be null


def write(folder: Path, *texts: str) -> None:
    """Write tasks whose questions are these texts."""
    lines = [json.dumps({"question": text, "answer": "1"}) + "\n" for text in texts]
    (folder / "raw.jsonl").write_text("".join(lines))


def pipeline(folder: Path, name: str, /, *, served: bool = False, target: str = "tasks", **more: Any) -> Any:
    """Return the configuration of a run whose tasks or experiences pass an operator."""
    given = {target: [{"name": name, **more}], **({"service": str(folder / "service")} if served else {})}
    return config(folder, "served" if served else "run", given)


async def odd_tasks(folder: Path, *, served: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found, _ = await stages(pipeline(folder, "served_odd", served=served))
    return rows(found[-1]), list(found[-1].records(SET_ASIDE))


@in_loop
async def test_tasks_whose_scores_are_no_numbers_are_set_aside(serve: Serve, tmp_path: Path) -> None:
    """Each with its reason, in a service as in a run; null says that a row has no score."""
    write(tmp_path, *SCORES)
    kept, aside = await odd_tasks(tmp_path, served=False)
    assert list(GOOD) == [row["question"] for row in kept]
    assert [0.5, None, True] == [row["score"] for row in kept]
    assert [2, 3, 5, 6, 7] == [int(row["_row"].partition(":")[2]) for row in aside]
    for row, what in zip(aside, ("'high'", "nan", "-inf", "1000", "[1.0]"), strict=True):
        assert row["operator"] == "served_odd"
        assert row["why"].startswith(f"the operator gave {what}")
        assert row["why"].endswith(" as score, which is no finite number")
    async with serve():
        assert (kept, aside) == await odd_tasks(tmp_path, served=True)


@in_loop
async def test_experiences_whose_rewards_are_no_numbers_are_left_out(serve: Serve, tmp_path: Path) -> None:
    """Otherwise the run would train on the reward before."""
    write(tmp_path, "number")
    found = list[Any]()
    async with serve():
        for served in (False, True):
            shaping = Counters(pipeline(tmp_path, "served_odd", served=served, target="experiences")).pipeline
            await shaping.start()
            found.append(await shaping.shape(experiences(0, *SCORES), 0))
            await shaping.close()
    here, there = found
    assert {"0/0": {"reward": 0.5}} == dict(here.columns) == dict(there.columns)
    assert {f"0/{number}" for number in range(1, len(SCORES))} == set(here.removed)
    assert "served_odd: the operator gave nan as reward, which is no finite number" == here.removed["0/2"]
    assert dict(here.removed) == dict(there.removed)


@in_loop
async def test_so_many_experiences_may_be_set_aside_and_no_more(serve: Serve, tmp_path: Path) -> None:
    """The first 20 are free; after that the share counts, over all batches so far."""
    write(tmp_path, "number")
    async with serve():
        for served in (False, True):
            pipelines = {"experiences": [{"name": "served_odd"}], "maximum_set_aside": 0.5}
            pipelines |= {"service": str(tmp_path / "service")} if served else {}
            shaping = Counters(config(tmp_path, "run", pipelines)).pipeline
            await shaping.start()
            for batch in range(10):
                await shaping.shape(experiences(batch, "number", "number", "text", "text"), batch)
            assert 2 == len((await shaping.shape(experiences(10, "nan", "number", "number"), 10)).columns)
            with pytest.raises(OperatorError) as refused:
                await shaping.shape(experiences(11, "text", "text", "nan"), 11)
            await shaping.close()
            assert ("operator.set-aside", "served_odd") == (refused.value.code, refused.value.where)
            assert "24 of 46 rows were set aside" == refused.value.message
            assert "data.pipeline.maximum_set_aside" in str(refused.value.fix)


ENDS = ("exit", "interrupt", "cancel", "own")


@in_loop
async def test_rows_with_which_an_operator_ends_the_program_are_set_aside(serve: Serve, tmp_path: Path) -> None:
    """Also where a task of its own does; the other rows pass, in a service as in a run."""
    texts = [*ENDS, *(f"task {name}" for name in ENDS), "good"]
    write(tmp_path, *texts)
    ends = [each for each in ENDS if each != "interrupt"]  # in a process's first thread, that is a person's Ctrl-C
    names = ("SystemExit(0)", "KeyboardInterrupt()", "CancelledError()", "Own('boom')") * 2
    found = list[Any]()
    async with serve():
        for served in (False, True):
            made, _ = await stages(pipeline(tmp_path, "served_end", served=served))
            assert ["good"] == [row["question"] for row in rows(made[-1])]
            aside = list(made[1].records(SET_ASIDE))
            for row, name in zip(aside, names, strict=True):
                assert row["operator"] == "served_end"
                assert name in row["why"]
            shaping = Counters(pipeline(tmp_path, "served_end", served=served, target="experiences")).pipeline
            await shaping.start()
            found.append(await shaping.shape(experiences(0, *ends, "good"), 0))
            await shaping.close()
    for each in found:
        assert ["0/3"] == list(each.columns)
        assert all("the operator raised" in each.removed[f"0/{number}"] for number in range(3))


@pytest.mark.parametrize("place", ["made", "start", "decide", "close"])
def test_a_command_does_not_end_without_a_word(
    jackfield: CommandServer, site: Path, tmp_path: Path, place: str
) -> None:
    """The operator says ``SystemExit(0)``, and the command says that it is a fault of the operator."""
    write(tmp_path, "good")
    given = {"folder": str(tmp_path / "run"), "model": {"path": "none"}}
    tasks = [{"name": "served_end", "asks": place}]
    given |= {"data": {"train": str(tmp_path / "raw.jsonl"), "pipeline": {"tasks": tasks}}}
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    done = jackfield("data", "run", str(tmp_path / "run.yaml"), environment={"PYTHONPATH": str(site)})
    assert 0 != done.code
    assert "[operator.contract]" in done.error
    assert "served_end" in done.error
    assert "SystemExit" in done.error


@in_loop
async def test_ctrl_c_ends_a_command_whose_operator_waits(jackfield: CommandServer, site: Path, tmp_path: Path) -> None:
    """Its request is cancelled, and it is closed; the next command goes on."""
    write(tmp_path, "good", "held")
    given = {"folder": str(tmp_path / "run"), "model": {"path": "none"}}
    tasks = [{"name": "served_end", "folder": str(tmp_path)}]
    given |= {"data": {"train": str(tmp_path / "raw.jsonl"), "pipeline": {"tasks": tasks}}}
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    async with Held(tmp_path) as gate:
        command = jackfield.start("data", "run", str(tmp_path / "run.yaml"), environment={"PYTHONPATH": str(site)})
        await gate.wait_for(lambda: gate.count == 1)
        command.send(signal.SIGINT)
        done = await asyncio.to_thread(command.wait, 60.0)
        assert 0 != done.code
        assert "cancelled" in gate.said
        gate.release()
        made, _ = await stages(pipeline(tmp_path, "served_end", folder=str(tmp_path)))
    assert 2 == len(made[-1])


@in_loop
async def test_a_cancellation_by_the_host_is_none_of_the_operators(tmp_path: Path) -> None:
    """It goes through, and no row is set aside for it."""
    write(tmp_path, "good")
    shaping = Counters(pipeline(tmp_path, "served_learn", target="experiences", folder=str(tmp_path))).pipeline
    await shaping.start()
    async with Held(tmp_path) as gate:
        asking = asyncio.ensure_future(shaping.shape(experiences(0, "held"), 0))
        await gate.wait_for(lambda: gate.count == 1)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
    await shaping.close()


@in_loop
async def test_an_operator_of_experiences_that_cannot_start_is_named(tmp_path: Path) -> None:
    write(tmp_path, "good")
    shaping = Counters(pipeline(tmp_path, "served_end", target="experiences", asks="start")).pipeline
    with pytest.raises(JackfieldError) as refused:
        await shaping.start()
    assert ("operator.contract", "served_end") == (refused.value.code, refused.value.where)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(
    ("asks", "mixing", "at_start", "later"),
    [
        ("", {}, 1, 1),
        ("any", {}, 0, 1),
        ("pairs", {}, 0, 0),
        ("", {"made": {"ratio": 1.0}}, 0, 0),
    ],
)
@in_loop
async def test_samples_that_are_made_and_not_trained_on_are_said(
    serve: Serve,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    served: bool,
    asks: str,
    mixing: dict[str, Any],
    at_start: int,
    later: int,
) -> None:
    """Once, at the start if the operator declares it; pairs are for another run, and no samples."""
    write(tmp_path, "number")
    pipelines = {"experiences": [{"name": "served_make", "asks": asks}]}
    pipelines |= {"service": str(tmp_path / "service")} if served else {}

    def said() -> list[str]:
        return [each.message for each in caplog.records if "are not trained on" in each.message]

    async with serve() if served else nullcontext():
        shaping = Counters(config(tmp_path, "run", pipelines, mixing=mixing)).pipeline
        await shaping.start()
        assert at_start == len(said())
        for batch in range(2):
            assert 2 == len((await shaping.shape(experiences(batch, "x", "y"), batch)).made)
        await shaping.close()
    assert later == len(said())
    for text in said():
        for part in ("served_make", "worker-0.jsonl", "mixing.made", "data.pipeline.experiences"):
            assert part in text
