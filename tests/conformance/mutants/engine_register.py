"""Where the broken training engines are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mutants.harness import Mutant
from mutants.plain_engine import PlainEngine

MUTANTS: dict[str, Mutant] = {}


def mutant(
    *killed_by: str, only: tuple[str, ...] = (), ranks: bool = False
) -> Callable[[type[PlainEngine]], type[PlainEngine]]:
    """Register a class; its docstring is the fault. ``only``: the capabilities that it is declared to have."""

    def register(cls: type[PlainEngine]) -> type[PlainEngine]:
        declared = {"multi_rank": "full"} if ranks else dict.fromkeys(only, "full")
        what = (cls.__doc__ or "").strip()
        MUTANTS[cls.__name__] = Mutant(cls=cls, killed_by=killed_by, what=what, capabilities=declared)
        return cls

    return register


class Exporting(PlainEngine):
    """Its mutants change what is exported, tensor by tensor."""

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().exported():
            yield from self.changed(name, tensor)

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError
