"""Cells as typed bytes, checkpoints as files, and the name of a queue on a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from jackfield.errors import QueueError
from jackfield.queue.archive import ArchivedRow, ArchiveWriter, read_archive, write_archive
from jackfield.queue.cells import Cell
from jackfield.queue.namespace import queue_name

torch = pytest.importorskip("torch")


def row(key: str, *numbers: float) -> ArchivedRow:
    return ArchivedRow(partition="p", key=key, cells={"x": Cell.of(torch.tensor(numbers), "jagged")}, tags={"k": key})


def contents(folder: Path) -> list[tuple[str, list[float], object]]:
    return [(each.key, each.cells["x"].tensor().tolist(), each.tags) for each in read_archive(folder)]


def test_rows_come_back_in_order_with_their_tags(tmp_path: Path) -> None:
    written = write_archive(tmp_path, [row("b", 1.0, 2.0), row("a")])
    assert (2, 8) == (written.samples, written.bytes)
    assert [("b", [1.0, 2.0], {"k": "b"}), ("a", [], {"k": "a"})] == contents(tmp_path)


def test_a_checkpoint_that_is_broken_off_keeps_the_one_before_it(tmp_path: Path) -> None:
    write_archive(tmp_path, [row("a", 1.0)])
    files = sorted(tmp_path.iterdir())
    with ArchiveWriter(tmp_path) as writer:
        writer.add(row("b", 2.0))
    assert [("a", [1.0], {"k": "a"})] == contents(tmp_path)
    assert files == sorted(tmp_path.iterdir())
    write_archive(tmp_path, [row("c", 3.0)])
    assert [("c", [3.0], {"k": "c"})] == contents(tmp_path)
    assert 3 == len(list(tmp_path.iterdir()))


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"format": 1, "files": {}}')
    with pytest.raises(QueueError, match="another format"):
        next(read_archive(tmp_path))


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ('["jagged","int64",[2]]', 15),
        ('["jagged","no_dtype",[2]]', 2),
        ('["jagged","load",[2]]', 2),
        ('["strange","int64",[2]]', 16),
        ("null", 0),
        ("[", 0),
    ],
)
def test_a_header_that_does_not_fit_its_bytes_is_refused(header: str, size: int) -> None:
    with pytest.raises(QueueError, match="damaged") as caught:
        Cell.parse(header, bytes(size))
    assert "queue.store" == caught.value.code


def test_a_queue_keeps_its_name_with_its_folder(tmp_path: Path) -> None:
    """Another process finds it; another folder, and the same one made again, have other names."""
    name = queue_name(str(tmp_path / "my-run" / "queue"))
    assert name.startswith("my-run-")
    assert name == queue_name(str(tmp_path / "my-run" / "queue"))
    assert ["name.txt"] == [path.name for path in (tmp_path / "my-run" / "queue").iterdir()]
    (tmp_path / "my-run" / "queue" / "name.txt").unlink()
    assert 3 == len({name, queue_name(str(tmp_path / "my-run" / "queue")), queue_name(None)})
