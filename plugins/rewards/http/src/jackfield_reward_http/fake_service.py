"""A service of fixtures, on loopback until its standard input closes: it scores sums exactly, and ranks by length."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web


async def _score(request: web.Request) -> web.Response:
    sample = await request.json()
    if sample["ground_truth"] == "slow":
        await asyncio.Event().wait()
    if sample["ground_truth"] == "broken":
        return web.json_response({"error": "the ground truth is broken"}, status=422)
    right = sample["solution_str"].strip().endswith(sample["ground_truth"])
    return web.json_response({"result": {"score": float(right), "why": "right" if right else "wrong"}})


async def _rank(request: web.Request) -> web.Response:
    lengths = [len(sample["solution_str"]) for sample in (await request.json())["answers"]]
    ranks = [sorted(lengths).index(length) for length in lengths]
    return web.json_response({"ranking": [{"result": {"score": rank, "why": "its length"}} for rank in ranks]})


async def _serve() -> None:
    service = web.Application(client_max_size=2**26)
    service.router.add_post("/score", _score)
    service.router.add_post("/rank", _rank)
    runner = web.AppRunner(service, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve())
