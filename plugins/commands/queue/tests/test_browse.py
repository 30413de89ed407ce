"""A checkpointed queue on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.sdk.cells import column_from_rows, json_column

torch = pytest.importorskip("torch")


@pytest.fixture
def folder(run: Callable[..., None], tmp_path: Path) -> Path:
    """Return a checkpoint with a group of two acked samples, one of them with a late reward."""

    async def fill(bench: Any) -> None:
        await bench.queue.register_consumer("archive", partition="train", columns=("ids",))
        (key,) = await bench.vacant(await bench.claim())
        group = await bench.open(key, 2, task="t:1")
        for number in range(2):
            columns = {
                "ids": column_from_rows([torch.arange(20 * number + 1)]),
                "values": column_from_rows([torch.full((1,), 0.5, dtype=torch.bfloat16)]),
                "fields": json_column([{"ä": number}]),
            }
            await bench.report(group, number, columns, length=number)
        await bench.queue.ack(await bench.queue.lease("archive", deadline_seconds=0), step=0)
        await bench.queue.checkpoint(tmp_path / "saved")

    run(fill)
    return tmp_path / "saved"


def call(*arguments: object) -> Any:
    result = CliRunner().invoke(main, ["queue", *map(str, arguments)])
    assert 0 == result.exit_code, result.output
    return result.output


def test_rows_are_listed_shown_and_counted(folder: Path) -> None:
    rows = json.loads(call("ls", folder, "--json"))
    assert [("t:1", 0, ["fields", "ids", "values"], ["archive"])] * 2 == [
        (row["task"], row["batch"], row["columns"], row["acked_by"]) for row in rows
    ]
    assert ["KEY", *(row["key"] for row in rows)] == [line.split()[0] for line in call("ls", folder).splitlines()]
    assert [] == json.loads(call("ls", folder, "--partition", "other", "--json"))
    shown = yaml.safe_load(call("show", folder, rows[1]["key"]))
    assert ({"length": 1}, "jagged, int64, [21]") == (shown["tags"], shown["types"]["ids"])
    assert [0, 1, 2, 3, 4, 5, 6, 7, "…"] == shown["columns"]["ids"]
    whole = json.loads(call("show", folder, rows[1]["key"], "--json"))
    assert ({"ä": 1}, list(range(21)), [0.5]) == tuple(whole["columns"][name] for name in ("fields", "ids", "values"))
    counts = json.loads(call("stats", folder, "--json"))["train"]
    assert (2, {"archive": 2}, {"samples": 2, "bytes": 8 + 168}) == (
        counts["samples"],
        counts["acked"],
        counts["columns"]["ids"],
    )
    assert counts == yaml.safe_load(call("stats", folder))["train"]


def test_rows_are_exported(folder: Path, tmp_path: Path) -> None:
    assert "2 samples" in call("export", folder, tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [{"length": 0}, {"length": 1}] == [row["tags"] for row in rows]
    assert [[0], list(range(21))] == [row["columns"]["ids"] for row in rows]


def test_a_refused_import_names_the_key_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """The corrected command is then accepted, in a new folder and in an empty one; an earlier import stays."""
    good, bad, empty = tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "empty"
    good.write_text('{"columns": {"ids": [1]}, "group": "a"}\n')
    bad.write_text(good.read_text() + '{"columns": {"ids": [2]}, "grup": "a"}\n')
    empty.mkdir()

    def refused(into: Path) -> None:
        result = CliRunner().invoke(main, ["queue", "import", str(bad), str(into)])
        assert 1 == result.exit_code
        for word in ("[queue.invalid]", f"{bad}, line 2", "'grup'", "'group'", "'columns'"):
            assert word in result.output

    for into, left in ((tmp_path / "new", False), (empty, True)):
        refused(into)
        assert (left, []) == (into.exists(), list(into.glob("*")))
        assert "1 samples" in call("import", good, into)
        refused(into)
        assert 1 == len(json.loads(call("ls", into, "--json")))


def test_parquet_with_an_unknown_column_is_refused(tmp_path: Path) -> None:
    """It has to be known as for JSONL: a column that is left out would be lost without a word."""
    table = pa.table({"columns.ids": [[1]], "grup": ["a"]})
    pq.write_table(table, tmp_path / "bad.parquet")
    result = CliRunner().invoke(main, ["queue", "import", str(tmp_path / "bad.parquet"), str(tmp_path / "new")])
    assert 1 == result.exit_code
    for word in ("[queue.invalid]", str(tmp_path / "bad.parquet"), "'grup'", "'group'", "'columns'"):
        assert word in result.output
    assert not (tmp_path / "new").exists()


def test_what_is_not_there_is_an_error(folder: Path, tmp_path: Path) -> None:
    for arguments, code in (
        (["show", folder, "nobody"], "queue.unknown-sample"),
        (["ls", tmp_path], "run.no-checkpoint"),
        (["ledger", tmp_path / "none"], "queue.ledger"),
    ):
        result = CliRunner().invoke(main, ["queue", *map(str, arguments), "--json"])
        assert 1 == result.exit_code
        error = json.loads(result.output)["error"]
        assert code == error["code"]
        assert "checkpoint.resume" not in (error["fix"] or ""), "nothing was damaged"
