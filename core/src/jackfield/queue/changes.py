"""What a call has changed and the journal does not have yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import attrs

if TYPE_CHECKING:
    from jackfield.queue.state import Slot

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


def journaled(method: Callable[Concatenate[Q, P], T]) -> Callable[Concatenate[Q, P], T]:
    """A method of the queue that changes what the journal has: it is there when the call has ended."""
    if iscoroutinefunction(method):

        @wraps(method)
        async def awaited(self: Any, *arguments: P.args, **keywords: P.kwargs) -> Any:
            try:
                return await method(self, *arguments, **keywords)
            finally:
                self._write_changes()

        return cast(Callable[Concatenate[Q, P], T], awaited)

    @wraps(method)
    def called(self: Any, *arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return method(self, *arguments, **keywords)
        finally:
            self._write_changes()

    return cast(Callable[Concatenate[Q, P], T], called)
