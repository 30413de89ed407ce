"""A queue in a database whose rows somebody alters or removes between two starts of a run: none of it is trained on."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from jackfield.queue import read_ledger
from jackfield_commands import Command, CommandServer, Completed

from .test_damaged_checkpoints import arguments, refused

pytestmark = pytest.mark.timeout(300)

STEPS, PROMPTS, RUNS = 3, 2, 2

#: Scores as its file says, until a further start: at the last score of the second step it waits to be killed.
REWARD = """
import pathlib
import time


def compute_score(solution_str, reached, **_):
    file = pathlib.Path(reached)
    if not file.exists():
        count = file.with_suffix(".count")
        number = int(count.read_text()) + 1 if count.exists() else 1
        count.write_text(str(number))
        if number == BLOCKED:
            file.touch()
            time.sleep(600)
    return len(solution_str) % 3
"""

#: Calls of the reward until one waits: those of the first step, and some of the second one.
BLOCKED = PROMPTS * RUNS + 3


class SQLite:
    """The rows of a run's own database file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "queue" / "samples.sqlite"
        self.settings = ["transfer_queue={name: sql}"]

    def keys(self) -> set[str]:
        with self._open() as database:
            return {key for (key,) in database.execute("select distinct key from jackfield_cells")}

    def zero(self) -> None:
        """Every value of every row."""
        with self._open() as database:
            database.execute("update jackfield_cells set content = zeroblob(length(content)) where content is not null")

    def swap(self) -> None:
        """The values of two rows, each whole in itself."""
        with self._open() as database:
            one, other = sorted(self.keys())[:2]
            for before, after in ((one, "aside"), (other, one), ("aside", other)):
                database.execute("update jackfield_cells set key = ? where key = ?", (after, before))

    def forget(self) -> None:
        """The whole store."""
        for file in self.file.parent.glob("samples.sqlite*"):
            file.unlink()

    def older_format(self) -> None:
        with self._open() as database:
            database.execute("update jackfield_format set version = 1")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file)) as database, database:
            yield database


class Redis:
    """The rows on a server."""

    def __init__(self, url: str) -> None:
        import redis

        self.client = redis.Redis.from_url(url)
        self.settings = [f"transfer_queue={{name: redis, url: '{url}'}}"]

    def _rows(self) -> list[bytes]:
        return sorted(self.client.scan_iter("jackfield:*:row:*"))

    def keys(self) -> set[str]:
        return {row.decode().rpartition(":")[2] for row in self._rows()}

    def zero(self) -> None:
        for row in self._rows():
            for name, value in self.client.hgetall(row).items():
                if name.startswith(b"v:"):
                    self.client.hset(row, name, bytes(len(value)))

    def swap(self) -> None:
        one, other = self._rows()[:2]
        first, second = self.client.hgetall(one), self.client.hgetall(other)
        self.client.hset(one, mapping=second)
        self.client.hset(other, mapping=first)

    def forget(self) -> None:
        self.client.flushall()

    def older_format(self) -> None:
        (name,) = self.client.scan_iter("jackfield:*:format")
        self.client.set(name, "1")


Store = SQLite | Redis


class Killed:
    """A run that was killed in its second step, when its queue had rows that no checkpoint has."""

    def __init__(self, jackfield: CommandServer, made: Path, folder: Path, store: Store) -> None:
        self._jackfield, self.folder, self.store = jackfield, folder, store
        reward, self.reached = folder.parent / "reward.py", folder.parent / "reached"
        reward.write_text(f"BLOCKED = {BLOCKED}\n{REWARD}")
        self._arguments = arguments(
            made,
            folder,
            f"schedule.steps={STEPS}",
            f"data.groups_per_batch={PROMPTS}",
            f"data.rollouts_per_group={RUNS}",
            f"reward={{name: function, path: '{reward}:compute_score', keywords: {{reached: '{self.reached}'}}}}",
            "reward.try_first=false",
            "queue.durable=true",
            *store.settings,
        )
        command = jackfield.start("run", *self._arguments)
        _wait_for(self.reached, command)
        self.keys = store.keys()
        command.kill()
        command.wait(60)
        assert any(key.startswith("train/1/") for key in self.keys)

    def again(self, *overrides: str) -> Completed:
        return self._jackfield("run", *self._arguments, *overrides)

    def ledger(self) -> list[dict[str, Any]]:
        return list(read_ledger(self.folder))

    def check_each_place_was_used_once(self) -> None:
        """By the step of its batch, after what was taken back."""
        used: dict[str, list[int]] = {}
        for entry in self.ledger():
            if entry.get("consumer") == "trainer" and entry["event"] in ("ack", "rollback"):
                for key in entry["keys"]:
                    if entry["event"] == "ack":
                        used.setdefault(key, []).append(entry["step"])
                    else:
                        used[key].pop()
        places = Counter((step, *_place(key)) for key, given in used.items() for step in given)
        expected = [(step, step, slot, run) for step in range(STEPS) for slot in range(PROMPTS) for run in range(RUNS)]
        assert sorted(expected) == sorted(places.elements())


def _place(key: str) -> tuple[int, int, int]:
    """Batch, group and rollout: keys are ``partition/batch/group/retry/rollout/sequence``."""
    _, ticket, slot, _, run, _ = key.split("/")
    return int(ticket), int(slot), int(run.partition("r")[0])


def _wait_for(file: Path, command: Command) -> None:
    """Until it is there; a run that ends before is an error."""
    until = time.monotonic() + 120
    while not file.exists():
        assert command.running, command.error
        assert time.monotonic() < until, command.error
        time.sleep(0.02)


@pytest.fixture(params=["sql", pytest.param("redis", marks=pytest.mark.needs("redis"))])
def killed(request: pytest.FixtureRequest, jackfield: CommandServer, made: Path, tmp_path: Path) -> Killed:
    folder = tmp_path / "run"
    store: Store = SQLite(folder) if request.param == "sql" else Redis(request.getfixturevalue("redis_server").url)
    if isinstance(store, Redis):
        store.forget()
    return Killed(jackfield, made, folder, store)


@pytest.mark.parametrize("alter", ["zero", "swap"])
def test_altered_values_are_made_again(killed: Killed, alter: str) -> None:
    """None of them is trained on; the ledger and a warning name their rows."""
    getattr(killed.store, alter)()
    ended = killed.again()
    assert 0 == ended.code, ended.error
    assert "damaged" in ended.error
    lost = {key for entry in killed.ledger() if entry["event"] == "lose" for key in entry["keys"]}
    assert lost
    assert lost <= killed.keys
    trained = [entry for entry in killed.ledger() if entry["event"] == "ack" and entry["consumer"] == "trainer"]
    assert not lost & {key for entry in trained for key in entry["keys"]}
    assert sorted(lost)[0] in ended.error
    killed.check_each_place_was_used_once()


def test_a_store_that_is_gone_is_filled_again(killed: Killed) -> None:
    killed.store.forget()
    ended = killed.again()
    assert 0 == ended.code, ended.error
    assert "gone from the queue's store" in ended.error
    assert "made again" in ended.error
    assert "train/1/" in ended.error
    killed.check_each_place_was_used_once()


def test_a_store_of_an_older_format_is_refused(killed: Killed) -> None:
    killed.store.older_format()
    ended = killed.again()
    refused(ended, "queue.store")
    assert "format" in ended.error
    assert "fix:" in ended.error


def test_a_damaged_database_file_is_refused_until_it_is_moved_away_or_the_run_begins_anew(
    jackfield: CommandServer, made: Path, tmp_path: Path
) -> None:
    store = SQLite(tmp_path / "run")
    killed = Killed(jackfield, made, tmp_path / "run", store)
    for file in store.file.parent.glob("samples.sqlite-*"):
        file.unlink()
    store.file.write_bytes(b"no database at all" * 1000)
    refused(killed.again(), "queue.store")
    ended = killed.again("checkpoint.resume=false", "schedule.steps=1")
    assert 0 == ended.code, ended.error
    store.file.write_bytes(b"no database at all" * 1000)
    store.forget()
    ended = killed.again()
    assert 0 == ended.code, ended.error
    killed.check_each_place_was_used_once()
