"""The optimizer's state is on the accelerator for a step alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.optimization import Placement


class Recorder:
    """An optimization that notes where its state goes."""

    def __init__(self) -> None:
        self.moves: list[str] = []

    def move(self, device: torch.device) -> None:
        """Note a move."""
        self.moves.append(device.type)


@pytest.mark.parametrize("offload", [True, False])
def test_the_state_follows_the_steps(offload: bool) -> None:
    """Two steps, a pass between them, and a run whose engine gives the device to replicas and gets it back."""
    state: Any = Recorder()
    model: Any = nn.Module()  # without parameters, so it moves to a device that is not here
    placement = Placement(model, state, torch.device("cuda"), Config(optimizer_offload=offload))
    for _ in range(2):
        with placement.on_device(training=True), placement.stepping():
            state.moves.append("step")
    placement.move("cpu", model=True, optimizer=True, grad=True)
    placement.move("cuda", model=True, optimizer=True, grad=True)
    without = ["step", "step", "cpu", "cuda"]
    assert (["step", "cpu", "cuda", "step", "cpu"] if offload else without) == state.moves
