"""Engines of one process share its process group."""

from __future__ import annotations

import functools
from pathlib import Path

import attrs
import pytest
import torch.distributed as dist

from jackfield.abc.engine import EngineContext, ModelSpec
from jackfield_engines.groups import GroupHold, make_group
from jackfield_testing import refused

CONTEXT = EngineContext(role="actor", model=ModelSpec(path="none"))


def hold(context: EngineContext = CONTEXT) -> GroupHold:
    return GroupHold(context, functools.partial(make_group, context, 30.0))


def test_the_last_engine_destroys_the_group() -> None:
    """An engine may leave twice, and a new group may be made afterwards."""
    there: list[bool] = []
    for _ in range(2):
        first, second = hold(), hold()
        first.leave()
        first.leave()
        assert dist.is_initialized()
        second.leave(lambda: there.append(dist.is_initialized()))
        assert not dist.is_initialized()
    assert [True, True] == there


def test_a_group_that_no_engine_has_made_is_kept(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        hold().leave()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_engines_of_other_ranks_are_refused() -> None:
    """The group stays as it was."""
    first = hold()
    with refused("engine.state", "rank 1 of 2", "rank 0 of 1"):
        hold(attrs.evolve(CONTEXT, rank=1, world_size=2))
    first.leave()
    assert not dist.is_initialized()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_a_meeting_place_are_refused(world: int) -> None:
    with refused("config.invalid-value", "EngineContext.init_method", f"{world} ranks"):
        hold(attrs.evolve(CONTEXT, world_size=world))
    assert not dist.is_initialized()
