"""Cells, files of checkpoints, and the name of a queue on a server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from jackfield.errors import QueueError
from jackfield.sdk.archive import ArchiveWriter, SavedSample, queue_name, read_archive, write_archive
from jackfield.sdk.cells import ColumnType, column_from_rows, join, split

torch = pytest.importorskip("torch")


def row(key: str, *numbers: float) -> SavedSample:
    text, (content,) = split(column_from_rows([torch.tensor(numbers)]))
    return SavedSample(partition="p", key=key, cells={"x": (text, content)}, tags={"k": key})


def contents(folder: Path) -> list[tuple[str, list[float], object]]:
    return [(each.key, join("x", [each.cells["x"]]).values.tolist(), each.tags) for each in read_archive(folder)]


def test_rows_come_back_in_order_with_their_tags(tmp_path: Path) -> None:
    written = write_archive(tmp_path, [row("b", 1.0, 2.0), row("a")])
    assert (2, 8) == (written.samples, written.bytes)
    assert [("b", [1.0, 2.0], {"k": "b"}), ("a", [], {"k": "a"})] == contents(tmp_path)


def test_a_checkpoint_that_is_broken_off_keeps_the_one_before_it(tmp_path: Path) -> None:
    write_archive(tmp_path, [row("a", 1.0)])
    files = sorted(tmp_path.iterdir())
    with closing(ArchiveWriter(tmp_path)) as writer:
        writer.add([row("b", 2.0)])
    assert [("a", [1.0], {"k": "a"})] == contents(tmp_path)
    assert files == sorted(tmp_path.iterdir())
    write_archive(tmp_path, [row("c", 3.0)])
    assert [("c", [3.0], {"k": "c"})] == contents(tmp_path)
    assert 2 == len(list(tmp_path.iterdir()))


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"format": 1, "files": {}}')
    with pytest.raises(QueueError) as caught:
        next(read_archive(tmp_path))
    assert ("queue.invalid", "format 1") == (caught.value.code, caught.value.found)


def test_a_damaged_stream_is_found_before_it_is_parsed(tmp_path: Path) -> None:
    """Samples before it are read; an archive of the wrong size is refused."""
    write_archive(tmp_path, [row("a", *[1.0] * (1 << 23)), row("b", 2.0)])
    (file,) = tmp_path.glob("samples-*.arrow")
    content = file.read_bytes()
    file.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    samples = read_archive(tmp_path)
    assert "a" == next(samples).key
    with pytest.raises(QueueError) as caught:
        next(samples)
    assert "queue.store" == caught.value.code
    file.write_bytes(content[:-1])
    with pytest.raises(QueueError) as caught:
        next(read_archive(tmp_path))
    assert "queue.invalid" == caught.value.code


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('["jagged","int64",[]]', 15),
        ('["dense","int64",[2]]', 8),
        ('["jagged","no_dtype",[]]', 2),
        ('["jagged","load",[]]', 2),
        ('["jagged","int64",[0]]', 4),
        ('["strange","int64",[2]]', 16),
        ("null", 0),
        ("[", 0),
    ],
)
def test_a_type_that_does_not_fit_its_bytes_is_refused(text: str, size: int) -> None:
    with pytest.raises(QueueError) as caught:
        ColumnType.parse(text).length(bytes(size))
    assert "queue.store" == caught.value.code


def test_a_queue_keeps_its_name_with_its_folder(tmp_path: Path) -> None:
    """Another process finds the name; another folder, or the same one created again, has another name."""
    name = queue_name(str(tmp_path / "my-run" / "queue"))
    assert name.startswith("my-run-")
    assert name == queue_name(str(tmp_path / "my-run" / "queue"))
    assert ["name.txt"] == [path.name for path in (tmp_path / "my-run" / "queue").iterdir()]
    (tmp_path / "my-run" / "queue" / "name.txt").unlink()
    assert 3 == len({name, queue_name(str(tmp_path / "my-run" / "queue")), queue_name(None)})
