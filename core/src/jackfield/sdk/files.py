"""Files for plugins: complete or absent, or of lines that survive the death of a process."""

from __future__ import annotations

from jackfield.files import AppendFile, encode_line, read_lines, replacing

__all__ = ["AppendFile", "encode_line", "read_lines", "replacing"]
