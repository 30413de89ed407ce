"""Tools that models call: Python functions and classes, MCP servers, isolated code, and search over a local corpus."""

from __future__ import annotations

from jackfield_tools.checks import check_tools
from jackfield_tools.toolbox import Toolbox

__all__ = ["Toolbox", "check_tools"]
