"""Parsers of tool calls and reasoning in the answers of models, by the format of the model's family."""

from __future__ import annotations

from jackfield_tool_calls._certain import begins_thought, certain
from jackfield_tool_calls.parsing import FORMATS, Format, Parsed, format_of, parse, split_reasoning

__all__ = ["FORMATS", "Format", "Parsed", "begins_thought", "certain", "format_of", "parse", "split_reasoning"]
