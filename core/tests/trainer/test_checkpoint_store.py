"""Tests that a checkpoint on disk is complete or absent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import RunError
from jackfield.trainer.checkpoint import CheckpointStore, open_checkpoint


def write(store: CheckpointStore, step: int, text: str = "weights") -> None:
    folder = store.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "model").write_text(f"{text} {step}")
    store.commit(step, {"step": step})


def test_the_newest_are_kept_and_state_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for look in (store.newest, store.checkpoints):
        with pytest.raises(RunError) as caught:
            look()
        assert "run.no-checkpoint" == caught.value.code
    for step in (2, 4, 6):
        write(store, step)
    assert [4, 6] == list(store.checkpoints())
    newest = store.newest()
    assert {"step": 6} == newest.state()
    assert {"actor/model", "state.json"} == newest.files.keys()
    assert (
        sum(path.stat().st_size for path in newest.folder.rglob("*[le]*") if path.name in ("model", "state.json"))
        == newest.bytes
    )
    store.clean(everything=True)
    assert [] == list(store.folder.iterdir())


def test_what_a_kill_leaves_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 2)
    (store.begin(4) / "actor").mkdir()
    (tmp_path / "step_00000001.partial").mkdir()  # its removal was interrupted
    assert [2] == list(store.checkpoints())
    store.clean()
    assert ["step_00000002"] == [path.name for path in tmp_path.iterdir()]


def test_a_folder_may_be_removed_by_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of an attempt that was given up removes what the recovery removes, too; other errors are raised."""
    store, unlink = CheckpointStore(tmp_path), os.unlink
    (store.begin(2) / "index.json").write_text("{}")

    def after_another(path: Any, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    def refused(path: Any, *, dir_fd: int | None = None) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(PermissionError):
        store.clean()
    monkeypatch.setattr(os, "unlink", after_another)
    store.clean()
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "manifest", "format"])
def test_a_damaged_checkpoint_is_recognised(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 2)
    file, manifest = tmp_path / "step_00000002" / "actor" / "model", tmp_path / "step_00000002" / "manifest.json"
    if damage == "cut":
        file.write_text("weight")
    elif damage == "changed":
        file.write_text("Weights 2")
    elif damage == "missing":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:20])
    else:
        manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(RunError) as caught:
        open_checkpoint(tmp_path / "step_00000002")
    assert "run.checkpoint-damaged" == caught.value.code
    assert ("manifest.json" if damage in ("manifest", "format") else "actor/model") in str(caught.value.where)
