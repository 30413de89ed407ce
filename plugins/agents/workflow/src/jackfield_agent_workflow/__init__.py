"""Agents as plain Python classes."""

from __future__ import annotations

from jackfield_agent_workflow.conversations import Reply, RolloutEnded
from jackfield_agent_workflow.multi_turn import MultiTurnWorkflow, Turn
from jackfield_agent_workflow.synthesis import BestOfWorkflow, ReflectOnceWorkflow
from jackfield_agent_workflow.workflow import Models, OtherModel, Policy, Task, Tools, Workflow

__all__ = [
    "BestOfWorkflow",
    "Models",
    "MultiTurnWorkflow",
    "OtherModel",
    "Policy",
    "ReflectOnceWorkflow",
    "Reply",
    "RolloutEnded",
    "Task",
    "Tools",
    "Turn",
    "Workflow",
]
