"""What the modules of broken training engines share."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mutants import harness
from mutants.harness import Mutant
from mutants.plain_engine import PlainEngine


def mutant(cls: type[PlainEngine], what: str, numbers: str, only: tuple[str, ...] = ()) -> Mutant:
    """Make a mutant that declares only these capabilities."""
    return harness.mutant("engine", cls, what, numbers, capabilities=dict.fromkeys(only, "full"))


class Exporting(PlainEngine):
    """Its mutants change what is exported, tensor by tensor."""

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().exported():
            yield from self.changed(name, tensor)

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError
