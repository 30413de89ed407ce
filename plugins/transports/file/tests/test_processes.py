"""Every end in a process of its own: what arrives, and what happens when one of them is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jackfield_conformance.support.transfer_ends import Team, team
from jackfield_transfers import (
    SECONDS,
    broke_off,
    check_a_slow_worker_is_named,
    check_transfers,
    go_on_with_another_sender,
    go_on_without_the_worker,
    kill_a_worker,
    kill_the_sender,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the weights go."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def ends(folder: Path) -> Iterator[Team]:
    """Processes that the tests share. Files of 64 KB: the embedding is larger, the model has several."""
    with team("file", folder=str(folder), bucket_bytes=1 << 16, poll_seconds=0.01) as made:
        yield made


def test_two_ranks_and_two_workers(ends: Team) -> None:
    check_transfers(ends, held=lambda held: held["descriptors"])


def test_a_killed_worker_is_named_and_the_others_go_on(ends: Team) -> None:
    """The others need only the folder, where everything is: they finish, and the sender says who did not."""
    kill_a_worker(ends, others_finish=True)
    go_on_without_the_worker(ends)


def test_a_killed_sender_is_named_and_what_it_left_is_removed(ends: Team, folder: Path) -> None:
    before = set(folder.iterdir())
    kill_the_sender(ends)
    (left,) = set(folder.iterdir()) - before
    assert list(left.glob("weights-*"))
    go_on_with_another_sender(ends)
    assert not left.exists()
    assert 3 == len(list(folder.iterdir()))  # two transfers and the marker


def test_a_worker_slower_than_the_deadline_is_named(ends: Team) -> None:
    check_a_slow_worker_is_named(ends, other_finishes=True)


def test_a_disk_without_room_ends_the_transfer_at_every_end(ends: Team, folder: Path) -> None:
    """The sender may write files of 100 KB; the embedding is larger. The newest weights stay what they were."""
    ends.gather(ranks=1, workers=2, seconds=SECONDS)
    marker = (folder / "LATEST.json").read_text()
    assert {"limited": True} == ends.ranks[0].ask("limit", file_bytes=100_000)
    ends.begin(9)
    broke_off(ends.ranks[0], "no room", "weights.storage")
    for end in ends.workers:
        broke_off(end, "no room")
    ends.finalize()
    assert marker == (folder / "LATEST.json").read_text()
    ends.ranks[0].kill()
    ends.gather(ranks=1, workers=1)
    ends.transfer(10)
