"""Pipelines that several runs share: a real service, killed, stopped and started again, and its runs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.clock import Clock
from jackfield.config import RunConfig
from jackfield.data.formats import TaskFormat
from jackfield.errors import ConfigError, DataError, DeadlineExceeded, OperatorError, RpcError
from jackfield.plugins import discover
from jackfield.sdk.rpc import Address
from jackfield_pipelines.client import PipelineClient, client_of, sources_of
from jackfield_pipelines.lineage import trace
from jackfield_pipelines.protocol import FRAME_BYTES, TaskJob
from jackfield_pipelines.row_sets import FILES, RowSet
from jackfield_pipelines.serving import Pipelines, ServeConfig, load
from jackfield_pipelines.stages import Limits
from jackfield_testing import in_loop

from .conftest import Counters, Held, Serve, config, experiences, rows, source, stages

pytestmark = pytest.mark.timeout(180)


def numbered(folder: Path, name: str, *, service: bool = True, **more: Any) -> RunConfig:
    """A run whose tasks are numbered, three in a request."""
    operator = {"name": "served_number", "folder": str(folder), "most": 17}
    pipeline = {"tasks": [operator], "rows_per_request": 3}
    return config(folder, name, {**pipeline, **({"service": str(folder / "service")} if service else {})}, **more)


async def without_service(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that the run itself computes; the operators' notes are dropped."""
    async with Held(folder) as gate:
        gate.release()
        found, _ = await stages(numbered(folder, "alone", service=False))
    (folder / "held").unlink()
    (folder / "said").unlink()
    return rows(found[-1])


@in_loop
async def test_runs_share_stages_and_wait_for_the_same_work(serve: Serve, tmp_path: Path) -> None:
    """Two runs at the same time, and one later: each row is processed once, and a trace leads to the raw line."""
    source(tmp_path, 20, held=7)
    expected = await without_service(tmp_path)
    async with Held(tmp_path) as gate, serve():
        first = asyncio.ensure_future(stages(numbered(tmp_path, "first")))
        await gate.wait_for(lambda: gate.count == 1)
        second = asyncio.ensure_future(stages(numbered(tmp_path, "second")))
        client = client_of(numbered(tmp_path, "looks"), Clock())
        while sum(each["runs"] for each in await client.call(lambda served: served.overview())) < 2:
            await asyncio.sleep(0)
        await client.close()
        gate.release()
        (one, there), (other, also) = await first, await second
        third, found = await stages(numbered(tmp_path, "third"))
        arguments = ["data", "served", str(tmp_path / "service"), "--json"]
        asked = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert expected == rows(one[-1]) == rows(other[-1]) == rows(third[-1])
    assert 17 == len(expected)
    assert [False] * 3 == there == also
    assert [True] * 3 == found
    assert ["start", *["ask"] * 7, "close"] == gate.said
    assert [] == json.loads(asked.output)
    assert all(each.folder.is_symlink() for each in one)
    events = trace(one, "raw:3")
    assert f"{tmp_path / 'raw.jsonl'}:3" == events[0].detail


@in_loop
async def test_a_kill_in_the_middle_of_a_stage_loses_and_repeats_nothing(serve: Serve, tmp_path: Path) -> None:
    """The run waits for the service that starts again; the numbers are those of a stage that was not killed."""
    source(tmp_path, 20, held=13)
    expected = await without_service(tmp_path)
    async with Held(tmp_path) as gate:
        async with serve() as service:
            run = asyncio.ensure_future(stages(numbered(tmp_path, "run")))
            await gate.wait_for(lambda: gate.count == 1)
            await service.end(signal.SIGKILL)
        gate.release()
        async with serve():
            found, _ = await asyncio.wait_for(run, 60)
    assert expected == rows(found[-1])
    assert {"tokens": 20.0} == found[1].manifest["counters"]
    assert 2 == gate.count, "the request that was held came again"


@in_loop
async def test_a_run_that_ends_is_not_worked_for(serve: Serve, tmp_path: Path) -> None:
    """Its request is cancelled; the stage goes on for the next run that asks."""
    source(tmp_path, 9, held=4)
    async with Held(tmp_path) as gate, serve():
        given = numbered(tmp_path, "run")
        client = client_of(given, Clock())
        job, file = job_of(tmp_path, given)
        folder = tmp_path / "run" / "data"
        run = asyncio.ensure_future(client.prepare(job, [file], folder, lambda made, there: None))
        await gate.wait_for(lambda: gate.count == 1)
        assert client.connection is not None
        client.connection.end("as of a process that was killed")
        run.cancel()
        await asyncio.wait([run])
        await gate.wait_for(lambda: "cancelled" in gate.said)
        gate.release()
        found, _ = await stages(given)
        assert 9 == len(found[-1])


def job_of(folder: Path, given: RunConfig) -> tuple[TaskJob, BytesIO]:
    """Return what a run asks, and its file."""
    file = BytesIO((folder / "raw.jsonl").read_bytes())
    limits, columns = Limits(), {"prompt": "question", "answer": "answer"}
    shared: Any = {"form": TaskFormat(), "columns": columns, "seed": 0, "limits": limits, "rows": 3, "seconds": 60.0}
    files = sources_of([(file, "raw.jsonl", "raw")])
    return TaskJob(operators=given.data.pipeline.tasks, files=files, **shared), file


@in_loop
async def test_sets_come_in_frames_where_folders_are_not_shared(serve: Serve, tmp_path: Path) -> None:
    """A copy has the bytes of the set; what is there of it does not come again, and nothing is left beside it."""
    text = "x" * (FRAME_BYTES // 3)
    lines = "".join(json.dumps({"question": f"{n} {text}", "answer": ""}) + "\n" for n in range(7))
    (tmp_path / "raw.jsonl").write_text(lines)
    async with serve():
        given = numbered(tmp_path, "linked")
        linked, _ = await stages(given)
        client = client_of(given, Clock())
        client.links = False
        job, file = job_of(tmp_path, given)
        folder = tmp_path / "copied"
        begun = folder / f".{linked[0].folder.name}.partial"
        begun.mkdir(parents=True)
        (begun / "rows.jsonl").write_bytes((linked[0].folder / "rows.jsonl").read_bytes()[:1000])
        copied = await client.prepare(job, [file], folder, lambda made, there: None)
        await client.close()
    assert linked[0].digest == copied[0].digest
    for each in copied:
        assert not each.folder.is_symlink()
        original = RowSet.open(next((tmp_path / "service" / "tasks").glob(f"*/{each.folder.name}")))
        assert original is not None
        assert [(original.folder / name).read_bytes() for name in FILES] == [
            (each.folder / name).read_bytes() for name in FILES
        ]
    assert {".lock", *(each.folder.name for each in copied)} == {each.name for each in folder.iterdir()}


@in_loop
async def test_a_service_that_does_not_answer_is_named(serve: Serve, tmp_path: Path) -> None:
    """A stopped one, one that is not there, and one with another token."""
    source(tmp_path, 9, held=4)
    soon = {"deadlines": {"batch": 2.0}}
    async with Held(tmp_path) as gate, serve() as service:
        run = asyncio.ensure_future(stages(numbered(tmp_path, "run", **soon)))
        await gate.wait_for(lambda: gate.count == 1)
        service.send(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded) as late:
            await run
        assert f"the pipeline service at {tmp_path / 'service'}" in late.value.message
        with pytest.raises(DeadlineExceeded) as late:
            await stages(numbered(tmp_path, "other", **soon))
        assert f"the pipeline service at {tmp_path / 'service'}" in late.value.message
        service.send(signal.SIGCONT)
        address = Address.read(tmp_path / "service" / "address.json")
        changed = json.loads((tmp_path / "service" / "address.json").read_text()) | {"secret": "0" * 64}
        (tmp_path / "wrong.json").write_text(json.dumps(changed))
        client = PipelineClient(place=tmp_path / "wrong.json", run="a stranger", seconds=30.0, clock=Clock())
        with pytest.raises(RpcError) as refused:
            await client.call(lambda served: served.overview())
        assert "rpc.authentication" == refused.value.code
        await service.end(signal.SIGTERM)
    assert address.secret not in str(refused.value)
    with pytest.raises(DeadlineExceeded) as late:
        await stages(numbered(tmp_path, "third", **soon))
    assert "no server's address is there" in str(late.value.found)


@in_loop
async def test_operators_ask_what_the_file_of_the_service_has(serve: Serve, tmp_path: Path) -> None:
    """The reward is there, and the policy is not: that is refused before a row is processed, and with its place."""
    source(tmp_path, 6)

    def asking(name: str, asks: str) -> RunConfig:
        before = {"name": "served_number", "folder": str(tmp_path)}
        tasks = [before, {"name": "served_ask", "asks": asks}]
        return config(tmp_path, name, {"tasks": tasks, "service": str(tmp_path / "service" / "address.json")})

    async with serve(
        asks={"reward": {"name": "rules", "method": "exact", "pattern": None, "ground_truth_pattern": None}}
    ):
        found, _ = await stages(asking("reward", "reward"))
        assert [0.0] * 4 + [1.0, 0.0] == [row["score"] for row in rows(found[-1])]
        (tmp_path / "said").unlink()
        with pytest.raises(ConfigError) as refused:
            await stages(asking("policy", "policy"))
        assert "data.pipeline.tasks[1]" == refused.value.where
        assert "asks.model" in str(refused.value.fix)
        assert not (tmp_path / "said").exists()
        given = [{"name": "served_ask", "asks": "policy"}]
        pipeline = {"experiences": given, "service": str(tmp_path / "service")}
        shapes = Counters(config(tmp_path, "shapes", pipeline)).pipeline
        with pytest.raises(ConfigError) as refused:
            await shapes.start()
        await shapes.close()
        assert "data.pipeline.experiences[0]" == refused.value.where


@in_loop
async def test_operators_run_with_environments_of_the_service_alone(serve: Serve, tmp_path: Path) -> None:
    """A run can name an environment of the service's file; it cannot have another program started there."""
    source(tmp_path, 6)

    def other(name: str, interpreter: str, **pipeline: Any) -> RunConfig:
        step = {"name": "served_number", "folder": str(tmp_path), "interpreter": interpreter}
        return config(tmp_path, name, {"service": str(tmp_path / "service"), **(pipeline or {"tasks": [step]})})

    async with serve(asks={"environments": {"same": {"folder": sys.prefix}}}) as service:
        found, _ = await stages(other("same", "same"))
        assert 6 == len(rows(found[-1]))
        learns = {"name": "served_learn", "interpreter": "same"}
        shapes = Counters(other("shapes", "", experiences=[learns])).pipeline
        await shapes.start()
        assert 2 == len((await shapes.shape(experiences(1, "a", "b"), 1)).columns)
        processes = psutil.Process(service.command.pid).children()
        await shapes.close()
        assert processes
        _, left = await asyncio.to_thread(psutil.wait_procs, processes, 60.0)
        assert not left, "the operators' process ends with the last run that uses it"
        for given in (sys.executable, "other"):
            with pytest.raises(ConfigError) as refused:
                await stages(other("path", given))
            assert "data.pipeline.tasks[0].interpreter" == refused.value.where
            assert "asks.environments" in str(refused.value.fix)


def shaping(folder: Path, name: str, *, service: bool = True) -> Counters:
    """A run with an operator that learns and one that does not."""
    given = [{"name": f"served_{each}", "folder": str(folder)} for each in ("learn", "plain")]
    pipeline = {"experiences": given, **({"service": str(folder / "service")} if service else {})}
    return Counters(config(folder, name, pipeline))


@in_loop
async def test_what_operators_learn_is_of_one_run_and_outlives_the_service(serve: Serve, tmp_path: Path) -> None:
    """Two runs take turns, one through two deaths of the service, and get what each would compute itself."""
    texts = [("a", "bb"), ("ccc",), ("held", "e"), ("f",)]
    alone = shaping(tmp_path, "alone", service=False)
    async with Held(tmp_path) as gate:
        gate.release()
        await alone.pipeline.start()
        expected = [await alone.pipeline.shape(experiences(n, *each), n) for n, each in enumerate(texts)]
        states = [alone.pipeline.state_before(batch) for batch in range(4)]
        await alone.pipeline.close()
    (tmp_path / "held").unlink()
    (tmp_path / "said").unlink()
    run, other = shaping(tmp_path, "run"), shaping(tmp_path, "other")
    async with Held(tmp_path) as gate:
        async with serve() as service:
            await run.pipeline.start()
            await other.pipeline.start()
            assert ["start"] * 3 == gate.said, "one of each run, and one for both"
            got = [await run.pipeline.shape(experiences(n, *each), n) for n, each in enumerate(texts[:2])]
            mine = await other.pipeline.shape(experiences(0, *texts[0]), 0)
            asking = asyncio.ensure_future(run.pipeline.shape(experiences(2, *texts[2]), 2))
            await gate.wait_for(lambda: gate.count == 1)
            await service.end(signal.SIGKILL)
        gate.release()
        async with serve():
            got.append(await asking)
            await other.pipeline.close()
        async with serve():
            got.append(await run.pipeline.shape(experiences(3, *texts[3]), 3))
            await run.pipeline.close()
    assert [attrs.evolve(each, made=tuple(each.made)) for each in expected] == got
    assert got[0] == mine
    assert states == [run.pipeline.state_before(batch) for batch in range(4)]
    assert alone.counted == run.counted
    assert run.pipeline.reads == alone.pipeline.reads


@in_loop
async def test_a_run_continues_from_its_checkpoint(serve: Serve, tmp_path: Path) -> None:
    """Operators that were started go on from restored states; states of other operators are refused."""
    run = shaping(tmp_path, "run")
    async with serve():
        await run.pipeline.start()
        before = run.pipeline.state_before(0)
        run.pipeline.restore([{"seen": 40}, None])
        found = await run.pipeline.shape(experiences(7, "a", "b"), 7)
        assert [{"seen": 0}, None] == before
        assert [{"seen": 40}, None] == run.pipeline.state_before(7)
        assert [{"seen": 42}, None] == run.pipeline.state_before(8)
        run.pipeline.restore([None])
        with pytest.raises(OperatorError) as refused:
            await run.pipeline.shape(experiences(8, "a"), 8)
        await run.pipeline.close()
    assert "operator.state" == refused.value.code
    assert {42} == {columns["count"] for columns in found.columns.values()}


@in_loop
async def test_a_request_that_is_cancelled_teaches_nothing(serve: Serve, tmp_path: Path) -> None:
    """Operators go on from what the run knows, also if the request had reached some of them."""
    run = shaping(tmp_path, "run")
    async with Held(tmp_path) as gate, serve():
        await run.pipeline.start()
        asking = asyncio.ensure_future(run.pipeline.shape(experiences(0, "held"), 0))
        await gate.wait_for(lambda: gate.count == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await gate.wait_for(lambda: "cancelled" in gate.said)
        found = await run.pipeline.shape(experiences(0, "a"), 0)
        await run.pipeline.close()
    assert 1 == found.columns["0/0"]["count"]


@pytest.mark.parametrize("place", [("..", "1-x", "rows.jsonl"), ("0" * 12, "../../1-x", "rows.jsonl")])
@in_loop
async def test_no_other_file_can_be_read(tmp_path: Path, place: tuple[str, str, str]) -> None:
    pipelines = Pipelines(ServeConfig(folder=str(tmp_path)), discover(), Clock())
    with pytest.raises(DataError):
        await anext(pipelines.read(*place, 0))
    with pytest.raises(DataError):
        await anext(pipelines.read("0" * 12, "1-x", "token", 0))
    with pytest.raises(DataError):
        await pipelines.size("../token")


def test_a_wrong_file_is_refused_with_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    for text, where in (
        ("host: 0.0.0.0", "host"),
        ("ports: 1", "ports"),
        ("asks: {reward: {name: rules}, rewards: 1}", "rewards"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            load(file)
        assert where == refused.value.where


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "service").write_text("")
    (tmp_path / "serve.yaml").write_text(f"folder: {tmp_path / 'service'}")
    done = CliRunner().invoke(main, ["data", "serve", str(tmp_path / "serve.yaml"), "--json"])
    error = json.loads(done.stdout)["error"]
    assert (1, "config.invalid-value", "folder") == (done.exit_code, error["code"], error["where"])
    assert str(tmp_path / "service") in error["found"]
    assert "remove the file" in error["fix"]
