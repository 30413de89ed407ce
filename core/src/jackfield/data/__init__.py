"""Data: tasks in a seeded order that resumes, and text that becomes tokens once."""

from __future__ import annotations
