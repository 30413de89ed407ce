"""What a call has changed and the journal does not have yet."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import attrs

if TYPE_CHECKING:
    from jackfield.queue.records import Slot

__all__ = ["Changes", "journaled"]

P = ParamSpec("P")
T = TypeVar("T")
Q = TypeVar("Q", bound=Any)


@attrs.define(eq=False)
class Changes:
    """Collected until the call ends."""

    kept: bool = False  #: whether there is a journal
    entries: list[list[Any]] = attrs.field(factory=list)
    slots: dict[Slot, None] = attrs.field(factory=dict)

    def note(self, *entry: Any) -> None:
        """Something that is no slot has changed."""
        if self.kept:
            self.entries.append(list(entry))

    def touch(self, slot: Slot) -> None:
        """A slot, its group, or rows of it have changed."""
        if self.kept:
            self.slots[slot] = None


def journaled(
    method: Callable[Concatenate[Q, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Q, P], Coroutine[Any, Any, T]]:
    """A method of the queue that changes what the journal has: it is there when the call has ended."""

    @wraps(method)
    async def called(self: Any, *arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return await method(self, *arguments, **keywords)
        finally:
            self._write_changes()

    return cast(Callable[Concatenate[Q, P], Coroutine[Any, Any, T]], called)
