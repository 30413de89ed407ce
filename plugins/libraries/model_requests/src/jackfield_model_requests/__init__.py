"""Asks language models for operators, with deadlines, repeated attempts, seeds, and counters of tokens and cost."""

from __future__ import annotations

from jackfield_model_requests.asking import Answer, AskingConfig, Model
from jackfield_model_requests.deadline import until_deadline
from jackfield_model_requests.ratings import check_scale, form_of, rated, read_rating

__all__ = [
    "Answer",
    "AskingConfig",
    "Model",
    "check_scale",
    "form_of",
    "rated",
    "read_rating",
    "until_deadline",
]
