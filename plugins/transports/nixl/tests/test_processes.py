"""Every end in a process of its own: what arrives, and what happens when one of them is killed."""

from __future__ import annotations

import os
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
    """Processes that the tests share. Buckets of 64 KB: the embedding is larger, the model has several."""
    with team("nixl", cuda="JACKFIELD_NIXL_CUDA" in os.environ, bucket_bytes=1 << 16) as made:
        yield made


def test_two_ranks_and_two_workers(ends: Team) -> None:
    check_transfers(ends)


def test_a_killed_worker_is_named_and_the_others_go_on(ends: Team) -> None:
    kill_a_worker(ends)
    go_on_without_the_worker(ends)


def test_a_killed_sender_is_named(ends: Team) -> None:
    kill_the_sender(ends)
    go_on_with_another_sender(ends)


def test_a_worker_slower_than_the_deadline_is_named(ends: Team) -> None:
    check_a_slow_worker_is_named(ends)
