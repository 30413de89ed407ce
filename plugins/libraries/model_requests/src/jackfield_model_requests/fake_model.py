"""An OpenAI-compatible API of fixtures, for programs that ``jackfield_reward_requests.loopback_server`` starts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web


def serve(answer: Callable[[str], str]) -> None:
    """Serve the model ``fake`` on loopback until standard input closes; the first line printed is the address.

    ``answer`` gets the text of the first message. 90 tokens were read and 10 generated for it.
    """
    asyncio.run(_serve(answer))


async def _serve(answer: Callable[[str], str]) -> None:
    async def complete(request: web.Request) -> web.Response:
        body: Mapping[str, Any] = await request.json()
        message = {"role": "assistant", "content": answer(body["messages"][0]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    api = web.Application(client_max_size=2**26)
    api.router.add_post("/v1/chat/completions", complete)
    api.router.add_get("/v1/models", models)
    runner = web.AppRunner(api, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()
