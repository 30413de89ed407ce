"""Names the ranks that are missing when a collective operation fails or times out.

Each rank writes in the group's store which operation it begins; nothing waits for that. When an operation fails, the
ranks that are left answer a roll call in the store. Those that do not answer are named, with what they began last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from jackfield.errors import EngineError

#: the part of a deadline after which an operation fails, and the part in which ranks answer
_OPERATION, _ANSWER = 0.8, 0.2


class Presence:
    """A rank's entries in the store of its group.

    ``seconds`` is how long a rank waits for another, the roll call included; operations of process groups have the
    timeout :attr:`operation`.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        self._begun = 0
        self.operation = timedelta(seconds=_OPERATION * seconds)
        self._answer = timedelta(seconds=_ANSWER * seconds)

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """Run a collective operation; if it fails because of other ranks, say which (``engine.absent``)."""
        if self._size == 1:
            yield
            return
        self._begun += 1
        try:
            self._store.set(f"began/{self._rank}", f"{self._begun} {operation}")
            yield
        except RuntimeError as error:
            if not _is_of_communication(error):
                raise
            raise self._absence(operation, error) from error

    def join(self) -> None:
        """Wait until all ranks are here, or name those that are not (``engine.absent``)."""
        try:
            self._store.set(f"joined/{self._rank}", "")
            self._store.wait([f"joined/{rank}" for rank in range(self._size)], timedelta(seconds=self._seconds))
        except RuntimeError as error:
            missing = self._missing("joined")
            raise self._error("did not join the process group", missing, "the start of all ranks") from error

    def _absence(self, operation: str, error: RuntimeError) -> EngineError:
        try:
            self._store.set(f"present/{self._rank}", "")
            self._store.wait([f"present/{rank}" for rank in self._others()], self._answer)
        except RuntimeError:
            missing = self._missing("present")
            said = ", ".join(f"rank {rank} began {self._last(rank)}" for rank in missing)
            return self._error(f"did not take part in {operation}", missing, said)
        behind = [rank for rank in self._others() if int(self._last(rank).partition(" ")[0]) < self._begun]
        if behind:
            return self._error(f"came too late to {operation}", behind, str(error).strip())
        return EngineError(
            f"{operation} failed, though all ranks are there",
            code="engine.absent",
            where=f"rank {self._rank}",
            found=str(error).strip(),
            fix="look for the first error in the logs of all ranks",
        )

    def _error(self, what: str, ranks: list[int], found: str) -> EngineError:
        names = "rank " + ", ".join(map(str, ranks)) if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
        return EngineError(
            f"{names} {what}",
            code="engine.absent",
            where=f"rank {self._rank}",
            expected=f"all {self._size} ranks within {self._seconds:g} s (engine.collective_timeout)",
            found=found,
            fix=f"look at the process and the log of {names}; then resume from the last checkpoint",
        )

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self._size) if rank != self._rank)

    def _missing(self, roll: str) -> list[int]:
        """Return the other ranks without an entry; rank 0, which has the store, if the store does not answer."""
        try:
            return [rank for rank in self._others() if not self._store.check([f"{roll}/{rank}"])]
        except RuntimeError:
            return [0]

    def _last(self, rank: int) -> str:
        """Return the number and the name of the operation that a rank began last."""
        try:
            if not self._store.check([f"began/{rank}"]):
                return "0 nothing"
            return str(self._store.get(f"began/{rank}").decode())
        except RuntimeError:
            return "0 nothing that is known"


def _is_of_communication(error: RuntimeError) -> bool:
    """Return whether an error came from a process group: torch has no class for those of gloo."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "NCCL" in str(error)
