"""Every end in a process of its own: what arrives, and what happens when one of them is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from jackfield_conformance.support.transfer_ends import End, Team, team

pytestmark = pytest.mark.timeout(180)

SECONDS = 20.0  #: the deadline; errors after a kill have to come long before


@pytest.fixture(scope="module")
def ends() -> Iterator[Team]:
    """Processes that the tests share. Buckets of 64 KB: the embedding is larger, the model has several."""
    with team("nccl", cuda="JACKFIELD_NCCL" in os.environ, bucket_bytes=1 << 16) as made:
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
    before = [end.ask("held") for end in (*ends.ranks, *ends.workers)]
    ends.transfer(2, "adapter")
    ends.transfer(3)
    assert before == [end.ask("held") for end in (*ends.ranks, *ends.workers)]


def test_a_killed_worker_is_named_and_the_others_go_on(ends: Team) -> None:
    ends.gather(ranks=2, workers=3, seconds=SECONDS)
    ends.begin(4, worker_1=7)
    assert {"holding": 7} == ends.workers[1].answer()
    ends.workers[1].kill()
    sender = promptly(ends.ranks[0])
    assert "weights.transfer" == sender["code"]
    assert "worker 1 died" in sender["text"]
    for end in (ends.workers[0], ends.workers[2]):
        answer = promptly(end)
        assert "weights.transfer" == answer["code"]
        assert "worker 1 died" in answer["text"]
    assert "digests" in ends.ranks[1].answer()  # it only exhausts
    ends.finalize()
    ends.workers[1:] = ends.workers[2:]
    ends.gather(ranks=2, workers=2)
    ends.transfer(5)


def test_a_killed_sender_is_named(ends: Team) -> None:
    ends.gather(ranks=1, workers=2, seconds=SECONDS)
    ends.begin(6, rank_0=20)
    assert {"holding": 20} == ends.ranks[0].answer()
    ends.ranks[0].kill()
    for end in ends.workers:
        answer = promptly(end)
        assert "weights.transfer" == answer["code"]
        assert "the sender died" in answer["text"]
    ends.gather(ranks=1, workers=2)
    ends.transfer(7)


def test_a_worker_slower_than_the_deadline_is_named(ends: Team) -> None:
    ends.gather(ranks=1, workers=2, seconds=1.5)
    ends.begin(8, worker_0=3)
    assert {"holding": 3} == ends.workers[0].answer()
    sender = ends.ranks[0].answer()
    assert "DeadlineExceeded" == sender["error"]
    assert "worker 0" in sender["text"]
    assert "worker 1" not in sender["text"]
    assert ends.workers[1].answer()["error"] in {"WeightsError", "DeadlineExceeded"}
    ends.finalize()
    ends.workers[0].kill()
