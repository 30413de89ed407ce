"""Late labels of a run's samples, which are applied between two steps."""

from __future__ import annotations

import logging
from pathlib import Path

import attrs

from jackfield.queue.labels import read_labels
from jackfield.queue.meta import partition_of
from jackfield.trainer.role import Role


@attrs.define(kw_only=True, eq=False)
class LateLabels:
    """Applies each version of the labels in the run's folder once."""

    role: Role
    version: int = 0  #: the last version that was applied

    async def apply(self) -> None:
        """Apply the versions that are new: tags of samples that are in the queue, and their rewards."""
        for labels in read_labels(Path(self.role.config.folder), self.version):
            known = await self.role.queue.label(labels.numbers, labels.by, labels.version)
            rewards = dict[str, dict[str, float]]()
            for key in known:
                if (reward := labels.numbers[key].get("reward")) is not None:
                    rewards.setdefault(partition_of(key), {})[key] = reward
            for partition, mine in rewards.items():
                await self.role.workers.agents.of(0).replace_rewards(partition, mine)
            self.version = labels.version
            told = len(labels.numbers), len(labels.numbers) - len(known)
            what = "labels %d by %s: of %d samples, %d are not in the queue any more"
            logging.getLogger("jackfield").info(what, labels.version, labels.by, *told)
