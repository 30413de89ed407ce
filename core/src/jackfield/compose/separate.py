"""The parts of explorers and of rewards that are launched apart from their trainer."""

from __future__ import annotations

from contextlib import AsyncExitStack

import attrs

from jackfield.compose.joining import following
from jackfield.compose.parts import Parts
from jackfield.runtime.replicas import Replicas
from jackfield.trainer import (
    Explorer,
    FollowedVersion,
    PlacementLease,
    RewardPipeline,
    trainer_begun,
)
from jackfield.weights import WeightFollower

__all__ = ["Exploration", "ExplorerParts", "RewardParts"]


@attrs.frozen(kw_only=True)
class Exploration:
    """Everything that runs where a process explores and nothing else."""

    explorer: Explorer
    weights: FollowedVersion
    replicas: Replicas


class ExplorerParts(Parts):
    """Makes what explores and nothing else."""

    async def build(self, stack: AsyncExitStack) -> Exploration:
        """Make, connect and start an explorer, and replicas that follow the weights of a trainer elsewhere."""
        config = self.config
        await self._begin(stack)
        replicas = await self._replicas(stack)
        assert replicas is not None
        self.rollout_placement = PlacementLease(self.clock, config.deadlines.batch)
        engine, seconds = config.checkpoint_engine, config.deadlines.sync
        follower = WeightFollower(replicas.members, engine.name, engine.settings, self.clock, seconds)
        replicas.connect(following(follower, self.rollout_placement, self.stages))
        return Exploration(
            explorer=self._explorer(config.name, self._task_order(self.tasks.train)),
            weights=FollowedVersion(
                queue=self.queue,
                follower=follower,
                version=self.version,
                clock=self.clock,
                stages=self.stages,
                idle_seconds=config.deadlines.batch,
            ),
            replicas=replicas,
        )


class RewardParts(Parts):
    """Makes what rewards and nothing else."""

    async def build(self, stack: AsyncExitStack) -> RewardPipeline:
        """Make and start the rewards, once the trainer has begun."""
        await self._begin(stack)
        await trainer_begun(self.queue, self.config.deadlines.batch)
        return await self._rewards()
