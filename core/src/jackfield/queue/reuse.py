"""Using groups more than once: how often, how soon again, how stale, and what is kept for it."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt, optional

from jackfield.settings import option

__all__ = ["Reuse", "Uses"]


@attrs.frozen(kw_only=True)
class Reuse:
    """How often a consumer may use the same groups, and for how long."""

    max_uses: int | None = option(
        None, help="uses of a group, the first one included; null: no limit", validator=optional(gt(0))
    )
    cooldown: int = option(0, help="steps that a group rests after each use", validator=ge(0))
    max_staleness: int | None = option(
        None,
        help="steps by which the weights that made a group may lag behind the step that uses it, older ones are let "
        "go; null: no limit",
        validator=optional(ge(0)),
    )
    capacity: int | None = option(
        None, help="used groups that are kept, the sampler's first choices; null: all", validator=optional(gt(0))
    )


@attrs.define(eq=False)
class Uses:
    """What a consumer has done with a group. Steps are those of its acks; None: final at once."""

    steps: list[int | None] = attrs.field(factory=list)
    retired: int | None = None  #: the step at which it was let go

    def may_be_used_again(self, reuse: Reuse | None) -> bool:
        """Whether the limits leave another use."""
        if reuse is None or self.retired is not None:
            return False
        return reuse.max_uses is None or len(self.steps) < reuse.max_uses

    def is_final(self, committed: int | None) -> bool:
        """Whether no rollback can take any of it back."""
        return all(step <= (-1 if committed is None else committed) for step in self.noted())

    def noted(self) -> list[int]:
        """The steps that need a commit."""
        steps = [*self.steps, self.retired]
        return [step for step in steps if step is not None]

    def take_back(self, step: int) -> None:
        """Forget what was done after ``step``."""
        self.steps = [each for each in self.steps if each is None or each <= step]
        if self.retired is not None and self.retired > step:
            self.retired = None
