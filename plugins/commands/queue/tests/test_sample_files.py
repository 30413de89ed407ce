"""Export of samples to files, their import, and their lineage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.cli import main
from jackfield.errors import QueueError
from jackfield.queue.meta import Lineage
from jackfield.queue.sample_files import cell_of, read_samples, saved_samples, to_plain, write_samples
from jackfield.queue.store import STORE_FILE
from jackfield.sdk.archive import SavedSample
from jackfield.sdk.cells import Cell, column_from_rows, dense_column, json_column, split

torch = pytest.importorskip("torch")

DTYPES = [
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "int64", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "float8_e4m3fn"),
]
SPECIAL = bytes.fromhex("0100c07f000080ff00000080")  # a NaN with a payload, minus infinity, minus zero


def call(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["queue", *map(str, arguments)])
    assert code == result.exit_code, result.output
    return result.output


def traced(folder: Path, key: str) -> list[tuple[str, str, str]]:
    """Return key (indented by depth), operation and whether it is in the queue, of each line of ``queue trace``."""
    rows = [line.rsplit(maxsplit=2) for line in call("trace", folder, key).splitlines()[1:]]
    return [(name.rstrip(), operation, is_in_queue) for name, operation, is_in_queue in rows]


def invalid_at(where: str) -> Callable[[QueueError], bool]:
    return lambda error: (error.code, error.where) == ("queue.invalid", where)


def content(rows: Any) -> list[Any]:
    """Return the content that a round trip must keep: bytes, tags, groups."""
    return [
        (
            {name: (text, bytes(content)) for name, (text, content) in row.cells.items()},
            {name: value for name, value in row.tags.items() if name not in ("operation", "parents")},
            row.task,
        )
        for row in rows
    ]


def rows_of_all_sorts() -> list[SavedSample]:
    def row(number: int, **cells: Cell) -> SavedSample:
        return SavedSample(
            cells=cells, tags={"number": number, "ä": "ö"}, group=f"g{number // 2}", task=f"t{number // 2}"
        )

    def tensor(dtype: str, *shape: int) -> Any:
        return torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, dtype))

    def jagged(dtype: str, *shape: int) -> Cell:
        text, (content,) = split(column_from_rows([tensor(dtype, *shape)]))
        return text, content

    def dense(dtype: str) -> Cell:
        text, (content,) = split(dense_column(tensor(dtype, 1)))
        return text, content

    every = {f"c_{dtype}": jagged(dtype, 3) for dtype in DTYPES} | {f"d_{dtype}": dense(dtype) for dtype in DTYPES}
    floats = '["jagged","float32",[]]'
    return [
        row(0, **every, special=(floats, SPECIAL), text=cell_of("text", {"ä": [1, None]})),
        row(1, special=(floats, b""), wide=jagged("float32", 2, 3), none=jagged("float32", 2, 0)),
        row(2, mixed=jagged("int64", 2), odd=('["json","uint8",[]]', b'{"a": 1}')),
        row(3, mixed=jagged("float32", 2), wide=jagged("float32", 0, 3)),
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_row_comes_back_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    rows = rows_of_all_sorts()
    file = tmp_path / f"rows.{suffix}"
    assert 4 == write_samples(file, lambda: rows)
    assert content(rows) == content(read_samples(file))
    assert [file] == list(tmp_path.iterdir())


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(width=32), max_size=6), json_value=st.dictionaries(st.text(), st.integers() | st.text())
)
def test_plain_values_are_exact(values: list[float], json_value: Any) -> None:
    kind, (content,) = split(column_from_rows([torch.tensor(values, dtype=torch.float32)]))
    for cell in ((kind, content), cell_of("x", {"value": json_value})):
        text = json.dumps(to_plain(cell), allow_nan=False)
        assert cell == cell_of("x", json.loads(text), cell[0])


def test_other_peoples_rows_need_columns_only(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"columns": {"prompt_ids": [1, 2], "response_mask": [1, 0], "reward": 1, "quality": 0.5, "note": "x", '
        '"w": [[1.5]]}}\n'
    )
    (row,) = read_samples(file)
    assert {
        "prompt_ids": ('["jagged","int64",[]]', 16),
        "response_mask": ('["jagged","bool",[]]', 2),
        "reward": ('["jagged","float32",[]]', 4),
        "quality": ('["dense","float32",[]]', 4),
        "note": ('["json","uint8",[]]', 3),
        "w": ('["jagged","float32",[1]]', 4),
    } == {name: (text, len(content)) for name, (text, content) in row.cells.items()}
    damaged = '{"columns": {"a": [1]}, "types": {"a": "[\\"jagged\\",\\"int64\\",[2]]"}}'
    for bad in ("[]", damaged, "{", '{"tags": {}}'):
        file.write_text(f"{bad}\n")
        with pytest.raises(QueueError, check=invalid_at(f"{file}, line 1")):
            list(read_samples(file))


def test_other_peoples_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"columns.prompt_ids": [[1, 2], [3]], "columns.reward": [0.5, None], "group": ["a", "a"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    first, second = read_samples(tmp_path / "rows.parquet")
    assert ("a", [1, 2], [0.5]) == (first.group, to_plain(first.cells["prompt_ids"]), to_plain(first.cells["reward"]))
    assert ["prompt_ids"] == list(second.cells)
    parquet.write_table(pyarrow.table({"prompt_ids": [1]}), tmp_path / "rows.parquet")
    with pytest.raises(QueueError, check=invalid_at(str(tmp_path / "rows.parquet"))):
        list(read_samples(tmp_path / "rows.parquet"))
    for bad in ({"columns.w": [[[1], [1, 2]]]}, {"columns.x": [1], "tags": ["{"]}):
        parquet.write_table(pyarrow.table(bad), tmp_path / "rows.parquet")
        with pytest.raises(QueueError, check=invalid_at(str(tmp_path / "rows.parquet"))):
            list(read_samples(tmp_path / "rows.parquet"))
    (tmp_path / "rows.parquet").write_text("PAR1")
    with pytest.raises(QueueError, check=invalid_at(str(tmp_path / "rows.parquet"))):
        list(read_samples(tmp_path / "rows.parquet"))


def test_a_missing_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(QueueError) as caught:
        write_samples(tmp_path / "rows.parquet", lambda: ())
    assert "plugin.requirement" == caught.value.code


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_queue_is_exported_imported_and_traced(run: Callable[..., None], tmp_path: Path, suffix: str) -> None:
    """After two imports into one folder, groups are still groups, and each sample has its parent."""
    saved, file, made = tmp_path / "saved", tmp_path / f"rows.{suffix}", tmp_path / "made"

    async def fill(bench: Any) -> None:
        for number, key in enumerate(await bench.vacant(await bench.claim(groups=2))):
            group = await bench.open(key, 2, task=f"t{number}")
            for index in range(2):
                columns = {
                    "ids": column_from_rows([torch.arange(5 * number + index)]),
                    "values": dense_column(torch.full((1, 2), 0.1, dtype=torch.bfloat16)),
                    "fields": json_column([{"ä": index}]),
                }
                await bench.report(group, index, columns, length=index)
        await bench.queue.checkpoint(saved)

    run(fill)
    assert f"4 samples in {file}" in call("export", saved, file)
    for _ in range(2):
        assert f"4 samples in {made}" in call("import", file, made, "--partition", "human")
    before, after = list(saved_samples(saved)), list(saved_samples(made))
    assert 2 * content(before) == content(after)
    assert [2] * 4 == [sum(row.group == group for row in after) for group in dict.fromkeys(row.group for row in after)]
    assert [("human/1/0/0/1/0", "import", "True"), (f"  {file}:train/0/0/0/1/0", "-", "False")] == traced(
        made, "human/1/0/0/1/0"
    )
    tree = json.loads(call("trace", made, "human/1/0/0/1/0", "--json"))
    assert ("import", True, f"{file}:train/0/0/0/1/0") == (
        tree["operation"],
        tree["in_queue"],
        tree["parents"][0]["key"],
    )
    assert "the sample 'nobody' is unknown" in call("trace", made, "nobody", code=1)
    assert "a file of this name" in call("export", made, file, code=1)
    file.unlink()
    call("export", made, file)
    call("import", file, tmp_path / "again")
    assert [
        ("train/0/0/0/1/0", "import", "True"),
        (f"  {file}:human/0/0/0/1/0", "import", "False"),
        (f"    {file}:train/0/0/0/1/0", "-", "False"),
    ] == traced(tmp_path / "again", "train/0/0/0/1/0")
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    assert "something else than a queue" in call("import", file, other, code=1)


def test_the_tree_outlives_the_samples(run: Callable[..., None], tmp_path: Path) -> None:
    """Grandparents of consumed samples are found with only a checkpoint and with only the store."""
    saved, folder = tmp_path / "saved", tmp_path / "run"

    async def test(bench: Any) -> None:
        queue = bench.queue
        await bench.trainer()

        async def derive(operation: str, parents: list[str]) -> str:
            (key,) = await bench.vacant(await bench.claim())
            made = Lineage(operation, tuple(parents)) if parents else None
            (name,) = await bench.report(await bench.open(key, 1), 0, bench.columns(1), made=made)
            return str(name)

        first, second = await derive("", []), await derive("", [])
        repaired = await derive("repair", [first])
        await queue.ack(await queue.lease("trainer", deadline_seconds=0))
        await derive("mix", [repaired, second, "else/0/0/0/0/0"])
        assert 1 == (await queue.stats())["samples"]
        batch = await queue.lease("trainer", deadline_seconds=0)
        assert ("mix", [repaired, second, "else/0/0/0/0/0"]) == (batch.tags[0]["operation"], batch.tags[0]["parents"])
        await queue.checkpoint(saved)
        await queue.restore(saved)
        await queue.checkpoint(saved)

    run(test, store=folder / "queue" / STORE_FILE)
    parents = [
        ("  train/2/0/0/0/0", "repair", "False"),
        ("    train/0/0/0/0/0", "-", "False"),
        ("  train/1/0/0/0/0", "-", "False"),
        ("  else/0/0/0/0/0", "-", "False"),
    ]
    assert [("train/3/0/0/0/0", "mix", "True"), *parents] == traced(saved, "train/3/0/0/0/0")
    assert [("train/3/0/0/0/0", "mix", "False"), *parents] == traced(folder, "train/3/0/0/0/0")
