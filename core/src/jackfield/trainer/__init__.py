"""The training loop, the explorer, the reward pipeline and the schedule that ties them together."""

from __future__ import annotations

from jackfield.trainer.batches import BatchSource
from jackfield.trainer.checkpoint import Checkpoint, Checkpointer, CheckpointStore, open_checkpoint
from jackfield.trainer.distributed import FINISHED, WEIGHTS, WeightSubscriber, noticed
from jackfield.trainer.log_prob_check import LogProbCheck
from jackfield.trainer.rewards import RewardPipeline
from jackfield.trainer.role import Progress, Role, RoleName, RunWorkers, Schedule
from jackfield.trainer.rollouts import Evaluator, Explorer
from jackfield.trainer.trainer import Trainer

__all__ = [
    "FINISHED",
    "WEIGHTS",
    "BatchSource",
    "Checkpoint",
    "CheckpointStore",
    "Checkpointer",
    "Evaluator",
    "Explorer",
    "LogProbCheck",
    "Progress",
    "RewardPipeline",
    "Role",
    "RoleName",
    "RunWorkers",
    "Schedule",
    "Trainer",
    "WeightSubscriber",
    "noticed",
    "open_checkpoint",
]
