"""The curriculum of a run: which tasks each batch has, and when it learns from which rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import attrs
import xxhash

from jackfield.abc.curriculum import Curriculum
from jackfield.config import RunConfig
from jackfield.data.curriculum import TrainingTasks
from jackfield.data.formats import Task
from jackfield.errors import RunError
from jackfield.queue.meta import GroupKey

_KEPT = 64  #: batches before the last step whose tasks are kept


@attrs.define(eq=False, kw_only=True)
class RunCurriculum:
    """Asks a curriculum for the tasks of each batch, once, in order.

    The choice for batch *b* depends on the rewards of steps below *b* - ``lag``, which have all ended when a group of
    *b* may start. So it does not depend on the speed of anything, and a resumed run makes the same choices.
    """

    curriculum: Curriculum
    size: int  #: number of tasks
    seed: int
    groups: int  #: per batch
    retries: int  #: most retries of a group, each with a task of its own
    lag: int  #: steps by which a batch may be ahead of the weights
    in_order: bool = True  #: whether step n trains on batch n
    _next: int = attrs.field(default=0, init=False)  #: the first batch without a choice
    _chosen: dict[int, list[int]] = attrs.field(factory=dict, init=False)  #: numbers of tasks by batch
    #: by group: the number of its task and its rewards, until its step ends
    _heard: dict[str, tuple[int, list[float]]] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(cls, config: RunConfig, tasks: Sequence[Task], lag: int) -> RunCurriculum | None:
        """Return the curriculum of a run; None: it has none."""
        if config.data.curriculum is None:
            return None
        made = config.data.curriculum.make()
        made.begin(TrainingTasks(tasks))
        shared: Any = {"size": len(tasks), "seed": config.seed, "groups": config.data.groups_per_batch}
        shared |= {"retries": config.schedule.max_retries, "in_order": config.schedule.mode == "sync"}
        return cls(curriculum=made, lag=lag, **shared)

    def number(self, key: GroupKey) -> int | None:
        """Return the number of a group's task; None for a group of a batch that has ended long ago."""
        self._reach(key.batch)
        chosen = self._chosen.get(key.batch)
        return None if chosen is None else chosen[key.retry * self.groups + key.index]

    def _reach(self, batch: int) -> None:
        """Have the tasks of all batches up to this one chosen, those for retries like those of the batch."""
        while self._next <= batch:
            parts = (self._choose(self._next, retry) for retry in range(self.retries + 1))
            self._chosen[self._next] = list(chain.from_iterable(parts))
            self._next += 1

    def _choose(self, batch: int, retry: int) -> list[int]:
        import numpy as np

        key = xxhash.xxh3_128_intdigest(f"curriculum/{self.seed}/{batch}/{retry}".encode())
        random = np.random.Generator(np.random.Philox(key=key))
        found = [int(each) for each in self.curriculum.choose(batch, self.groups, random)]
        if len(found) != self.groups or not all(0 <= each < self.size for each in found):
            expected = f"{self.groups} numbers below {self.size}"
            what, wrong = "the curriculum chose no tasks for a batch", f"{len(found)} numbers: {found[:8]}"
            details: Any = {"where": f"batch {batch}", "expected": expected, "found": wrong}
            raise RunError(what, code="data.curriculum", **details)
        return found

    def hear(self, group: str, rewards: Sequence[float | None]) -> None:
        """Take the rewards of a group's rollouts. A reward without a number raises ``data.curriculum``."""
        if None in rewards:
            expected, fix = "a number for each sample", "choose a reward that scores whole responses"
            what, details = "a curriculum cannot learn from rewards per token", {"expected": expected, "fix": fix}
            raise RunError(what, code="data.curriculum", where=group, **details)
        key = attrs.evolve(GroupKey.of(group), reissue=0)  # what was made again counts once
        if (number := self.number(key)) is not None and rewards:
            self._heard[str(key)] = number, [float(each) for each in rewards if each is not None]

    def end(self, step: int) -> dict[str, float]:
        """End a step, all of whose groups were rewarded; return its metrics."""
        ended = {group: GroupKey.of(group) for group in self._heard}
        mine = sorted(
            (key.batch, key.index, key.retry, group)
            for group, key in ended.items()
            if key.batch <= step or not self.in_order
        )
        told = [self._heard.pop(group) for *_, group in mine]
        self._reach(step + self.lag)  # what may have begun does not know this step
        self.curriculum.learn(told)
        for batch in [batch for batch in self._chosen if batch < step - _KEPT]:
            del self._chosen[batch]
        found = {"tasks": float(len({number for number, _ in told}))}
        if told:
            found["reward"] = fmean(fmean(rewards) for _, rewards in told)
        return {f"curriculum/{name}": value for name, value in {**found, **self.curriculum.metrics()}.items()}

    def state(self) -> dict[str, Any]:
        """Return everything as JSON values, for a checkpoint."""
        chosen = {str(batch): numbers for batch, numbers in self._chosen.items()}
        return {
            "next": self._next,
            "chosen": chosen,
            "heard": self._heard,
            "curriculum": dict(self.curriculum.state_dict()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._next = state["next"]
        self._chosen = {int(batch): list(numbers) for batch, numbers in state["chosen"].items()}
        self._heard = {group: (number, list(rewards)) for group, (number, rewards) in state["heard"].items()}
        self.curriculum.load_state_dict(state["curriculum"])
