"""Data: tasks, their seeded and resumable order, and tokenization."""

from __future__ import annotations
