"""Raw data as typed, versioned rows that a run reads: tasks, supervised answers, preferences, experiences."""

from __future__ import annotations

from jackfield_formatter.context import FormatContext, FormatSettings
from jackfield_formatter.examples import Example
from jackfield_formatter.experience import ExperienceRow
from jackfield_formatter.files import FormatReport, format_file, read_rows
from jackfield_formatter.models import DataModel, DpoRow, SftRow, TaskRow
from jackfield_formatter.shapes import Shape

__all__ = [
    "DataModel",
    "DpoRow",
    "Example",
    "ExperienceRow",
    "FormatContext",
    "FormatReport",
    "FormatSettings",
    "SftRow",
    "Shape",
    "TaskRow",
    "format_file",
    "read_rows",
]
