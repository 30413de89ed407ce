"""An MCP server with one tool: what something costs on a day. It talks over stdio."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

ITEMS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "toys", "cups")
DAYS = 90

server = MCPServer("prices")


def price_of(item: str, day: int) -> int:
    """Return a price of two digits that nothing but this function tells."""
    return 10 + (ITEMS.index(item) * 7919 + day * 104729 + ITEMS.index(item) * day * 31) % 90


@server.tool()
def price(item: str, day: int) -> str:
    """Look up what something costs on a day."""
    if item not in ITEMS or not 10 <= day < 10 + DAYS:
        raise ValueError(f"no price of {item!r} on day {day}")
    return str(price_of(item, day))


if __name__ == "__main__":
    server.run("stdio")
