"""What every checkpoint engine has to do with each end in a process of its own; who dies, dies by ``kill -9``.

A plugin's tests call these with a team of its own, and look at what is particular to it in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jackfield_conformance.support.transfer_ends import End, Team

SECONDS = 20.0  #: the deadline; errors after a kill have to come long before


def promptly(end: End) -> dict[str, str]:
    """An answer that has to come long before the deadline."""
    start = time.monotonic()
    answer = end.answer()
    assert time.monotonic() - start < SECONDS / 2
    return answer


def broke_off(end: End, why: str, code: str = "weights.transfer") -> None:
    """The end has to say so, promptly."""
    answer = promptly(end)
    assert code == answer["code"]
    assert why in answer["text"]


def check_transfers(ends: Team, held: Callable[[dict[str, Any]], Any] = lambda held: held) -> list[dict[str, Any]]:
    """Full weights and an adapter alone, again and again, bit for bit; the processes hold no more than before.

    Returns what each holds at the end.
    """
    ends.gather(ranks=2, workers=2)
    ends.transfer(1)
    before = [end.ask("held") for end in (*ends.ranks, *ends.workers)]
    ends.transfer(2, "adapter")
    ends.transfer(3)
    after = [end.ask("held") for end in (*ends.ranks, *ends.workers)]
    assert list(map(held, before)) == list(map(held, after))
    return after


def kill_a_worker(ends: Team, others_finish: bool = False) -> None:
    """A worker of three dies in the middle; everybody else ends promptly, and the sender names it.

    Args:
        ends: the team.
        others_finish: rather than break off, naming it, too.
    """
    ends.gather(ranks=2, workers=3, seconds=SECONDS)
    ends.begin(4, worker_1=7)
    assert {"holding": 7} == ends.workers[1].answer()
    ends.workers[1].kill()
    broke_off(ends.ranks[0], "worker 1 died")
    for end in (ends.workers[0], ends.workers[2]):
        if others_finish:
            assert "digests" in promptly(end)
        else:
            broke_off(end, "worker 1 died")
    assert "digests" in ends.ranks[1].answer()  # it only exhausts
    ends.finalize()


def go_on_without_the_worker(ends: Team) -> None:
    """The same objects make the next transfer."""
    ends.workers[1:] = ends.workers[2:]
    ends.gather(ranks=2, workers=2)
    ends.transfer(5)


def kill_the_sender(ends: Team) -> None:
    """The sender dies in the middle; workers break off promptly and say so."""
    ends.gather(ranks=1, workers=2, seconds=SECONDS)
    ends.begin(6, rank_0=20)
    assert {"holding": 20} == ends.ranks[0].answer()
    ends.ranks[0].kill()
    for end in ends.workers:
        broke_off(end, "the sender died")


def go_on_with_another_sender(ends: Team) -> None:
    """The same workers take weights from a new one."""
    ends.gather(ranks=1, workers=2)
    ends.transfer(7)


def check_a_slow_worker_is_named(ends: Team, other_finishes: bool = False) -> None:
    """A worker that stops reading is named by the sender at the deadline, and the other one is not."""
    ends.gather(ranks=1, workers=2, seconds=1.5)
    ends.begin(8, worker_0=3)
    assert {"holding": 3} == ends.workers[0].answer()
    sender = ends.ranks[0].answer()
    assert "DeadlineExceeded" == sender["error"]
    assert "worker 0" in sender["text"]
    assert "worker 1" not in sender["text"]
    other = ends.workers[1].answer()
    assert "digests" in other if other_finishes else other["error"] in {"WeightsError", "DeadlineExceeded"}
    ends.finalize()
    ends.workers[0].kill()
