"""The check of a run's section ``tools``, before anything is started."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackfield_tools.settings import Tool, read_tools, refused
from jackfield_tools.toolbox import open_sources, unique_names


def check_tools(settings: Mapping[str, Any]) -> None:
    """Raise ``config.*`` if the section ``tools`` is wrong; nothing is started.

    Functions and classes are imported, unless they run in processes of their own.
    """
    for tool in read_tools(settings):
        if tool.kind in _CHECKS:
            _CHECKS[tool.kind](tool)
    unique_names(open_sources(settings))


def _check_function(tool: Tool) -> None:
    file, _, name = tool.target.rpartition(":")
    if tool.limits.process and (not name or (file.endswith(".py") and not Path(file).expanduser().is_file())):
        expected = "an existing file.py:name, or package.module:name"
        raise refused(f"{tool.where}.function", "there is no such function", expected=expected, found=tool.target)


def _check_mcp(tool: Tool) -> None:
    server, where = tool.target, f"{tool.where}.mcp"
    if (server.command is None) == (server.url is None):
        found = "neither" if server.url is None else "both"
        raise refused(where, "an MCP server has a command or a url", expected="one of command, url", found=found)
    useless = ("headers", "api_key_env") if server.url is None else ("env", "cwd")
    for name in useless:
        if getattr(server, name):
            other = "command" if server.url is None else "url"
            raise refused(f"{where}.{name}", f"{name} has no effect with {other}", fix=f"remove {name}")
    if server.command is not None:
        program = server.command[0] if server.command else ""
        folder = server.cwd or os.curdir
        if not program or (shutil.which(program) is None and shutil.which(os.path.join(folder, program)) is None):
            expected = "a program of this machine, and its arguments"
            raise refused(f"{where}.command", "the server's program is not found", expected=expected, found=program)
    elif not server.url.startswith(("http://", "https://")):
        raise refused(f"{where}.url", f"{server.url!r} is not an address", expected="http://host:port/mcp, or https")
    if importlib.util.find_spec("mcp") is None:
        raise refused(where, "the package mcp is not installed", fix="pip install 'jackfield-tools[mcp]'")


def _check_search(tool: Tool) -> None:
    if not Path(tool.target.corpus).expanduser().is_file():
        where = f"{tool.where}.search.corpus"
        raise refused(where, "there is no such file", expected="a JSONL file", found=tool.target.corpus)
    from jackfield_tools.search import read_corpus

    try:
        for _ in read_corpus(tool.target):
            pass
    except (OSError, ValueError) as error:
        expected = f"a JSON object with the text {tool.target.text!r} in each line"
        message = "the documents cannot be read"
        raise refused(f"{tool.where}.search.corpus", message, expected=expected, found=str(error)) from error


_CHECKS = {"function": _check_function, "mcp": _check_mcp, "search": _check_search}
