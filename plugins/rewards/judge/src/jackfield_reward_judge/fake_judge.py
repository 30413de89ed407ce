"""An OpenAI-compatible API of fixtures, on loopback until its standard input closes.

It grades sums exactly, and prefers the longer of two responses.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

from aiohttp import web

_REFERENCE = re.compile(r"The reference answer:\n(.*?)\n\n", re.DOTALL)
_RESPONSE = re.compile(r"<response \w+>\n(.*?)\n</response", re.DOTALL)


async def _complete(request: web.Request) -> web.Response:
    asked = (await request.json())["messages"][0]["content"]
    reference, response = _REFERENCE.search(asked), _RESPONSE.search(asked)
    truth = reference[1] if reference else ""
    if truth == "slow":
        await asyncio.Event().wait()
    if len(pair := _RESPONSE.findall(asked)) == 2:
        longer = len(pair[0]) - len(pair[1])
        winner = "tie" if pair[0] == pair[1] or not longer else "AB"[longer < 0]
        return _answer(json.dumps({"explanation": "the longer one", "winner": winner}))
    score = float(response is not None and response[1].strip().endswith(truth))
    said = "I do not know." if truth == "broken" else json.dumps({"explanation": "the last word", "score": score})
    return _answer(said)


def _answer(said: str) -> web.Response:
    message = {"role": "assistant", "content": said}
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
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
