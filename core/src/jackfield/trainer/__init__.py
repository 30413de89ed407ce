"""The training loop, the explorer, the reward pipeline and the schedule that ties them together."""

from __future__ import annotations

from jackfield.trainer.batches import BatchSource
from jackfield.trainer.checkpoint import Checkpointer
from jackfield.trainer.checkpoint_store import Checkpoint, CheckpointStore, open_checkpoint
from jackfield.trainer.distributed import (
    PublishedVersion,
    WeightSubscriber,
    publish_end,
    trainer_begun,
    trainer_finished,
)
from jackfield.trainer.evaluation import Evaluator
from jackfield.trainer.explorer import Answers, Explorer
from jackfield.trainer.log_prob_check import LogProbCheck
from jackfield.trainer.mixing import Source
from jackfield.trainer.reward_pipeline import RewardPipeline
from jackfield.trainer.role import Role, RoleName, RunWorkers
from jackfield.trainer.schedule import Progress, Schedule
from jackfield.trainer.stages import Stages
from jackfield.trainer.trainer import Step, Trainer, WeightPublisher

__all__ = [
    "Answers",
    "BatchSource",
    "Checkpoint",
    "CheckpointStore",
    "Checkpointer",
    "Evaluator",
    "Explorer",
    "LogProbCheck",
    "Progress",
    "PublishedVersion",
    "RewardPipeline",
    "Role",
    "RoleName",
    "RunWorkers",
    "Schedule",
    "Source",
    "Stages",
    "Step",
    "Trainer",
    "WeightPublisher",
    "WeightSubscriber",
    "open_checkpoint",
    "publish_end",
    "trainer_begun",
    "trainer_finished",
]
