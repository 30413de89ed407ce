"""Files are whole: replaced in one move, appended as a whole, and damage of sealed ones is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jackfield.files import AppendFile, digest_of, replace_file, replacing, seal, unseal


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "config.yaml"
    replace_file(file, "first")
    replace_file(file, "second")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "third, of which a part cannot be written: \ud800")
    assert ("second", [file]) == (file.read_text(), list(file.parent.iterdir()))


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    """A device or a pipe stays; the error names it."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, folder, tmp_path / "link"):
        with pytest.raises(OSError, check=lambda error, path=path: error.filename == str(path)):
            replace_file(path, "text")
    assert (pipe.is_fifo(), folder.is_dir()) == (True, True)
    assert {"pipe", "folder", "link"} == {path.name for path in tmp_path.iterdir()}


def test_what_is_written_for_one_user_is_never_readable_by_others(tmp_path: Path) -> None:
    file = tmp_path / "address.json"
    replace_file(file, "for all")
    with replacing(file, mode=0o600) as partial:
        assert partial.stat().st_mode & 0o777 == 0o600
        partial.write_text("secret")
    assert file.stat().st_mode & 0o777 == 0o600


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "list.json", b"]")
    file.append(b"[1")
    with pytest.raises(TypeError):
        file.append("2")  # type: ignore[arg-type]
    file.append(b", 3")
    file.close()
    assert (tmp_path / "list.json").read_text() == "[1, 3]"


def test_the_digest_of_a_file_is_that_of_its_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"x" * ((1 << 22) + 1))
    second.write_bytes(first.read_bytes())
    assert digest_of(first) == digest_of(second)
    second.write_bytes(first.read_bytes() + b"y")
    assert digest_of(first) != digest_of(second)


def test_every_changed_byte_of_a_sealed_object_is_found() -> None:
    sealed = seal('{"step": 3}').encode()
    assert unseal(sealed) == {"step": 3}
    for index in range(len(sealed)):
        with pytest.raises(ValueError, match="digest"):
            unseal(sealed[:index] + bytes([sealed[index] ^ 1]) + sealed[index + 1 :])
