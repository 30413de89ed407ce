"""Every end in a process of its own: what arrives, and what happens when one of them is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackfield_conformance.support.transfer_ends import End, Team, team

pytestmark = pytest.mark.timeout(180)

SECONDS = 20.0  #: the deadline; errors after a kill have to come long before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the weights go."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def ends(folder: Path) -> Iterator[Team]:
    """Processes that the tests share. Files of 64 KB: the embedding is larger, the model has several."""
    with team("file", folder=str(folder), bucket_bytes=1 << 16, poll_seconds=0.01) as made:
        yield made


def promptly(end: End) -> dict[str, str]:
    """An error that has to come long before the deadline."""
    start = time.monotonic()
    answer = end.answer()
    assert time.monotonic() - start < SECONDS / 2
    return answer


def test_two_ranks_and_two_workers(ends: Team) -> None:
    """Full weights and an adapter alone, again and again, bit for bit; the processes hold no more than before."""
    ends.gather(ranks=2, workers=2)
    ends.transfer(1)
    before = [end.ask("held")["descriptors"] for end in (*ends.ranks, *ends.workers)]
    ends.transfer(2, "adapter")
    ends.transfer(3)
    assert before == [end.ask("held")["descriptors"] for end in (*ends.ranks, *ends.workers)]


def test_a_killed_worker_is_named_and_the_others_go_on(ends: Team) -> None:
    """The others need only the folder, where everything is: they finish, and the sender says who did not."""
    ends.gather(ranks=2, workers=3, seconds=SECONDS)
    ends.begin(4, worker_1=7)
    assert {"holding": 7} == ends.workers[1].answer()
    ends.workers[1].kill()
    sender = promptly(ends.ranks[0])
    assert "weights.transfer" == sender["code"]
    assert "worker 1 died" in sender["text"]
    for end in (ends.workers[0], ends.workers[2], ends.ranks[1]):
        assert "digests" in promptly(end)
    ends.finalize()
    ends.workers[1:] = ends.workers[2:]
    ends.gather(ranks=2, workers=2)
    ends.transfer(5)


def test_a_killed_sender_is_named_and_what_it_left_is_removed(ends: Team, folder: Path) -> None:
    ends.gather(ranks=1, workers=2, seconds=SECONDS)
    before = set(folder.iterdir())
    ends.begin(6, rank_0=20)
    assert {"holding": 20} == ends.ranks[0].answer()
    (left,) = set(folder.iterdir()) - before
    assert list(left.glob("weights-*"))
    ends.ranks[0].kill()
    for end in ends.workers:
        answer = promptly(end)
        assert "weights.transfer" == answer["code"]
        assert "the sender died" in answer["text"]
    ends.gather(ranks=1, workers=2)
    ends.transfer(7)
    assert not left.exists()
    assert 3 == len(list(folder.iterdir()))  # two transfers and the marker


def test_a_worker_slower_than_the_deadline_is_named(ends: Team) -> None:
    ends.gather(ranks=1, workers=2, seconds=1.5)
    ends.begin(8, worker_0=3)
    assert {"holding": 3} == ends.workers[0].answer()
    sender = ends.ranks[0].answer()
    assert "DeadlineExceeded" == sender["error"]
    assert "worker 0" in sender["text"]
    assert "worker 1" not in sender["text"]
    assert "digests" in ends.workers[1].answer()
    ends.finalize()
    ends.workers[0].kill()


def test_a_disk_without_room_ends_the_transfer_at_every_end(ends: Team, folder: Path) -> None:
    """The sender may write files of 100 KB; the embedding is larger. The newest weights stay what they were."""
    ends.gather(ranks=1, workers=2, seconds=SECONDS)
    marker = (folder / "LATEST.json").read_text()
    assert {"limited": True} == ends.ranks[0].ask("limit", file_bytes=100_000)
    ends.begin(9)
    answer = promptly(ends.ranks[0])
    assert "weights.storage" == answer["code"]
    assert "no room" in answer["text"]
    for end in ends.workers:
        answer = promptly(end)
        assert "weights.transfer" == answer["code"]
        assert "no room" in answer["text"]
    ends.finalize()
    assert marker == (folder / "LATEST.json").read_text()
    ends.ranks[0].kill()
    ends.gather(ranks=1, workers=1)
    ends.transfer(10)
