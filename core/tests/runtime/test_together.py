"""Results of concurrent work come in lists, by time and count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jackfield.runtime.workers import together
from jackfield_virtual_clock import VirtualClock


def lists(ends: Sequence[float], **options: float) -> list[tuple[float, list[float]]]:
    """Run work that ends after these seconds; return the lists of results, each with its time."""
    clock = VirtualClock()

    async def work(seconds: float) -> float:
        await clock.sleep(seconds)
        return seconds

    async def main() -> list[tuple[float, list[float]]]:
        each = together([(None, work(seconds)) for seconds in ends], **options)
        return [(clock.time(), [task.result() for _, task in ended]) async for ended in each]

    found: list[tuple[float, list[float]]] = clock.run(main())
    return found


def test_stragglers_share_lists_for_a_tenth_of_their_age_and_two_seconds_at_most() -> None:
    found = lists([0.0, 0.03, 1.0, 1.09, 1.2, 100.0, 101.5, 102.5, 300.0])
    assert [[0.0, 0.03], [1.0, 1.09], [1.2], [100.0, 101.5], [102.5], [300.0]] == [results for _, results in found]
    assert pytest.approx([0.05, 1.1, 1.32, 102.0, 104.5, 300.0]) == [time for time, _ in found]


def test_results_that_a_device_waits_for_are_held_back_for_a_smaller_share() -> None:
    found = lists([0.3, 0.305, 0.32, 10.0, 10.1, 10.3], share=0.02)
    assert [[0.3, 0.305], [0.32], [10.0, 10.1], [10.3]] == [results for _, results in found]
    assert pytest.approx([0.31, 0.33, 10.2, 10.3]) == [time for time, _ in found]


def test_many_results_at_once_come_in_lists_of_bounded_size() -> None:
    assert [(1.0, [1.0] * size) for size in (512, 512, 276)] == lists([1.0] * 1300)


def test_waiting_for_a_straggler_wakes_the_loop_only_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps: list[float] = []

    def note(clock: VirtualClock, name: str, value: float) -> None:
        jumps.extend([value - before] if value > (before := getattr(clock, "now", value)) else [])
        object.__setattr__(clock, name, value)

    monkeypatch.setattr(VirtualClock, "__setattr__", note)
    lists([1.0, 3600.0])
    assert pytest.approx([1.0, 0.1, 3598.9]) == jumps
