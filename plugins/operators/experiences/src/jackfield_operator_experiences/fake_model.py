"""An OpenAI-compatible API of fixtures, on loopback until its standard input closes.

It rates a response by its number of words, up to 10, and says nothing of use about what is unratable.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

from aiohttp import web

_RESPONSE = re.compile(r"<response (\w+)>\n(.*?)\n</response \1>", re.DOTALL)


async def _complete(request: web.Request) -> web.Response:
    found = _RESPONSE.search((await request.json())["messages"][0]["content"])
    words = found[2].split() if found else []
    said = "I do not know." if words == ["unratable"] else json.dumps({"quality": min(max(len(words), 1), 10)})
    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})


async def _serve() -> None:
    api = web.Application(client_max_size=2**26)
    api.router.add_post("/v1/chat/completions", _complete)
    api.router.add_get("/v1/models", _models)
    runner = web.AppRunner(api, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve())
