"""An MCP server for tests: over stdio, or with a port over HTTP. ``die`` ends its process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("tests")
calls = 0


@server.tool()
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def process() -> int:
    """Return the server's process, which ends at every second call of this tool."""
    global calls
    calls += 1
    if calls % 2 == 0:
        os._exit(5)
    return os.getpid()


@server.tool()
async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@server.tool()
async def freeze(file: str = "") -> str:
    """Block the event loop for ever; first, write the process into a file."""
    if file:
        with open(f"{file}.new", "w", encoding="utf-8") as out:
            out.write(str(os.getpid()))
        os.rename(f"{file}.new", file)
    while True:
        time.sleep(1000)


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
def secret() -> str:
    """Return an environment variable."""
    return os.environ.get("TOOL_SETTING", "none")


if __name__ == "__main__":
    logging.disable()
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
