"""Runs from Python: ``GRPO(model=…, train=…, reward=…, steps=…).run()``, and what they leave."""

from __future__ import annotations

from jackfield_training.result import Curve, Result, Rows
from jackfield_training.trainings import DAPO, DPO, GRPO, PPO, RLOO, SFT, Training

__all__ = ["DAPO", "DPO", "GRPO", "PPO", "RLOO", "SFT", "Curve", "Result", "Rows", "Training"]
