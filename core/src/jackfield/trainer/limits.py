"""The end of a run before ``schedule.steps``: collected samples are used up, or a limit of ``schedule.until``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import attrs

from jackfield.errors import DataError
from jackfield.trainer.role import Role


@attrs.define(kw_only=True, eq=False)
class Limits:
    """Counts what the run has used over all its starts, and ends its schedule when a limit is reached."""

    role: Role
    used: Mapping[str, float] = {}  #: by limit; in mode train also the number of steps for the data

    async def use_up_data(self) -> None:
        """End the schedule when the queue's groups are used up, less those that fill no batch (``data.empty``)."""
        data, groups = self.role.config.data, (await self.role.queue.stats())["groups"]
        if not (steps := groups * data.epochs // data.groups_per_batch):
            what, expected = "too few groups of samples", f"{data.groups_per_batch} (data.groups_per_batch)"
            raise DataError(what, code="data.empty", where=data.samples, expected=expected, found=groups)
        self.restore({"steps": steps})

    def restore(self, used: Mapping[str, float]) -> None:
        """Continue with what a checkpoint's run had used."""
        self.used, most = used, self.role.config.schedule.steps
        self.role.schedule = attrs.evolve(self.role.schedule, steps=min(int(used.get("steps", most)), most))

    def count(self, steps_done: int, tags: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Add a step's samples and time."""
        workers, ranks = self.role.workers, max(map(len, self.role.workers.ranks.values()), default=0)
        replicas = workers.replicas * workers.replica_devices
        devices = max(ranks, replicas) if workers.shares_devices else ranks + replicas
        tokens = sum(each["response_tokens"] for each in tags)
        found = {"samples": len(tags), "tokens": tokens, "seconds": seconds, "device_seconds": seconds * devices}
        self.used = {**self.used, **{name: self.used.get(name, 0) + value for name, value in found.items()}}
        self.check(steps_done, self.used)

    def check(self, steps_done: int, found: Mapping[str, float]) -> None:
        """End the schedule with this step if one of these values has reached its limit."""
        for name, limit in attrs.asdict(self.role.config.schedule.until).items():
            if limit is not None and found.get(name, -inf) >= limit and 0 < steps_done < self.role.schedule.steps:
                what = "schedule.until.%s: %g reached %g, the run ends with step %d"
                logging.getLogger("jackfield").info(what, name, found[name], limit, steps_done)
                self.role.schedule = attrs.evolve(self.role.schedule, steps=steps_done)
