"""Every end in a process of its own: what arrives, and what happens when one of them is killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jackfield_conformance.support.transfer_ends import Team, team
from jackfield_transfers import (
    check_a_slow_worker_is_named,
    check_transfers,
    go_on_with_another_sender,
    go_on_without_the_worker,
    kill_a_worker,
    kill_the_sender,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def ends() -> Iterator[Team]:
    """Processes that the tests share. Segments of 64 KB, few at a time; the embedding is larger."""
    with team("shared", bucket_bytes=1 << 16, max_bytes=3 << 16) as made:
        yield made


def test_two_ranks_and_two_workers(ends: Team) -> None:
    after = check_transfers(ends)
    assert [True, False, False, False] == [held["mapped"] > 0 for held in after]  # the sender keeps its segments
    # memory without a name in the file system ends with the processes that map it, also when they are killed
    assert [0, 0, 0, 0] == [held["named"] for held in after]


def test_a_killed_worker_is_named_and_the_others_go_on(ends: Team) -> None:
    kill_a_worker(ends)
    living = (*ends.ranks, ends.workers[0], ends.workers[2])
    assert [0, 0, 0, 0] == [end.ask("held")["mapped"] for end in living]  # what broke off is not kept
    go_on_without_the_worker(ends)


def test_a_killed_sender_is_named(ends: Team) -> None:
    kill_the_sender(ends)
    assert [0, 0] == [end.ask("held")["mapped"] for end in ends.workers]  # nobody holds the memory of the dead any more
    go_on_with_another_sender(ends)


def test_a_worker_slower_than_the_deadline_is_named(ends: Team) -> None:
    check_a_slow_worker_is_named(ends)
