"""Every end in a process of its own: what arrives, and what happens when one of them is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jackfield_conformance.support.processes import shared_memory, shared_memory_since
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


def segments_since(before: frozenset[str]) -> list[str]:
    """New segments of shared memory; folders that other programs of the machine make there are none."""
    return [name for name in shared_memory_since(before) if not (Path("/dev/shm") / name).is_dir()]


def test_two_ranks_and_two_workers(ends: Team) -> None:
    after = check_transfers(ends)
    assert [True, False, False, False] == [held["mapped"] > 0 for held in after]  # the sender keeps its segments


def test_a_killed_worker_is_named_and_the_others_go_on(ends: Team) -> None:
    names = shared_memory()
    kill_a_worker(ends)
    living = (*ends.ranks, ends.workers[0], ends.workers[2])
    assert [0, 0, 0, 0] == [end.ask("held")["mapped"] for end in living]  # what broke off is not kept
    assert not segments_since(names)
    go_on_without_the_worker(ends)


def test_a_killed_sender_is_named(ends: Team) -> None:
    names = shared_memory()
    kill_the_sender(ends)
    assert [0, 0] == [end.ask("held")["mapped"] for end in ends.workers]  # nobody holds the memory of the dead any more
    assert not segments_since(names)
    go_on_with_another_sender(ends)


def test_a_worker_slower_than_the_deadline_is_named(ends: Team) -> None:
    check_a_slow_worker_is_named(ends)
