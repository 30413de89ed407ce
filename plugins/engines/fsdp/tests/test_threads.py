"""Passes use further threads while no replica of the process generates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch

from jackfield_engine_fsdp.config import Config
from jackfield_huggingface.generating import generating

Build = Callable[..., Any]


def test_threads_follow_replicas_within_a_pass(
    kit: ModuleType, build: Build, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica begins to generate between the forward and the backward pass of one micro-batch."""
    usual, counts = torch.get_num_threads(), list[int]()
    set_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (counts.append(count), set_threads(count)))
    engine, inner = build(Config(extra_threads=1), micro_batch_tokens=1000), kit.PolicyLoss(rows)
    with ExitStack() as replica, engine.train_mode():

        def loss(output: Any, data: Any) -> Any:
            generating.add(replica)
            replica.callback(generating.discard, replica)
            counts.append(0)
            return inner(output, data)

        engine.forward_backward_batch(kit.make_batch(rows), loss)
    middle = counts.index(0)
    assert {usual + 1} == set(counts[:middle])
    assert {usual} == set(counts[middle + 1 :])
    assert min(middle, len(counts) - middle - 1) > 2  # by layers, and at the end
    assert usual == torch.get_num_threads()


def test_a_pass_that_fails_restores_the_threads(kit: ModuleType, build: Build, rows: list[dict[str, Any]]) -> None:
    usual, engine = torch.get_num_threads(), build(Config(extra_threads=1))

    def loss(output: Any, data: Any) -> Any:
        assert usual + 1 == torch.get_num_threads()
        raise ArithmeticError

    with engine.train_mode(), pytest.raises(ArithmeticError):
        engine.forward_backward_batch(kit.make_batch(rows), loss)
    assert usual == torch.get_num_threads()
