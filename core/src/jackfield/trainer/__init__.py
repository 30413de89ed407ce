"""The training loop, the explorer, the reward pipeline and the schedule that ties them together."""

from __future__ import annotations

from jackfield.trainer.batches import BatchSource, Source
from jackfield.trainer.checkpoint import Checkpoint, Checkpointer, CheckpointStore, open_checkpoint
from jackfield.trainer.distributed import FINISHED, PublishedVersion, WeightSubscriber, trainer_begun, trainer_finished
from jackfield.trainer.evaluation import Evaluator
from jackfield.trainer.explorer import Answers, Explorer
from jackfield.trainer.log_prob_check import LogProbCheck
from jackfield.trainer.rewards import RewardPipeline
from jackfield.trainer.role import Progress, Role, RoleName, RunWorkers, Schedule
from jackfield.trainer.trainer import Step, Trainer

__all__ = [
    "FINISHED",
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
    "Step",
    "Trainer",
    "WeightSubscriber",
    "open_checkpoint",
    "trainer_begun",
    "trainer_finished",
]
