"""The training loop, the explorer, the reward pipeline and their schedule."""

from __future__ import annotations

from jackfield.trainer.checkpoint import Checkpoint, Checkpointer, CheckpointStore, open_checkpoint
from jackfield.trainer.log_prob_check import LogProbCheck
from jackfield.trainer.role import FINISHED, WEIGHTS, Progress, Role, RoleName, RunWorkers, Schedule, WeightSubscriber
from jackfield.trainer.rollouts import Evaluator, Explorer, RewardPipeline
from jackfield.trainer.trainer import BatchSource, Trainer

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
    "open_checkpoint",
]
