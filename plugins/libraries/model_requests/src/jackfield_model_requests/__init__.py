"""Asks language models for operators, with deadlines, repeated attempts, seeds, and counters of tokens and cost."""

from __future__ import annotations

from jackfield_model_requests.asking import Answer, AskingConfig, Model

__all__ = ["Answer", "AskingConfig", "Model"]
