"""An OpenAI-compatible API for tests, on loopback until its standard input closes: its answer is always ``So 5.``."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web


async def _complete(request: web.Request) -> web.Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": "So 5."}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})


async def _serve() -> None:
    api = web.Application()
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
