"""A server that speaks SGLang's protocol, for the logic of the client. What it does is no evidence of what SGLang does:
the requests that it is sent are compared with SGLang's own types in ``test_real_types.py``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from aiohttp import web
from safetensors.torch import load_file

SLOW = 7  #: a prompt that begins with this token is generated as steps are allowed


@attrs.define(eq=False)
class FakeSglang:
    """Draws token ``100 + version`` with log-probability ``-version`` in each place."""

    version: int = 0
    paused: bool = False
    adapter: str | None = None
    asked: list[tuple[str, Any]] = attrs.field(factory=list)  #: (path, body) of everything
    loaded: dict[str, Any] = attrs.field(factory=dict)  #: what it has read from files
    steps: asyncio.Queue[None] = attrs.field(factory=asyncio.Queue)  #: one for each token of a slow request
    refuses: dict[str, str] = attrs.field(factory=dict)  #: what it says to a path
    experts: tuple[int, int] = (3, 2)  #: numbers of layers and of experts per token
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)
    _aborts: dict[str, asyncio.Event] = attrs.field(factory=dict)
    _drawn: dict[str, int] = attrs.field(factory=dict)  #: tokens by request
    _runner: web.AppRunner | None = None

    async def start(self, port: int) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/{path}", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def bodies(self, path: str) -> list[Any]:
        """What it was asked at a path."""
        return [body for each, body in self.asked if each == path]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(("/generate", body))
        if "/generate" in self.refuses:
            return web.json_response({"error": {"message": self.refuses["/generate"]}}, status=400)
        assert not self.paused, "a request came during a pause"
        aborted, self._drawn[body["rid"]] = asyncio.Event(), 0
        self._aborts[body["rid"]] = aborted
        try:
            return await (self._streamed if body["stream"] else self._whole)(request, body, aborted)
        finally:
            del self._aborts[body["rid"]]

    async def _tokens(self, body: Any, aborted: asyncio.Event) -> Any:
        """The tokens one by one, then how it ended."""
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            if body["input_ids"][0] == SLOW:
                waits = [asyncio.ensure_future(each) for each in (self.steps.get(), aborted.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for each in waits:
                    each.cancel()
            if aborted.is_set():
                yield None, {"type": "abort", "message": "Abort"}
                return
            self._drawn[body["rid"]] += 1
            yield 100 + self.version, None
        yield None, {"type": "length", "length": body["sampling_params"]["max_new_tokens"]}

    def _answer(self, body: Any, tokens: list[int], finish: Any) -> dict[str, Any]:
        entries = [[-float(self.version), token, None] for token in tokens]
        meta: dict[str, Any] = {"id": body["rid"], "finish_reason": finish, "output_token_logprobs": entries}
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = [-0.25] * len(tokens)
        if body.get("return_routed_experts") and finish is not None:
            count = len(body["input_ids"]) + self._drawn[body["rid"]] - 1
            experts = np.arange(count * math.prod(self.experts), dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    async def _whole(self, _: web.Request, body: Any, aborted: asyncio.Event) -> web.Response:
        tokens: list[int] = []
        async for token, finish in self._tokens(body, aborted):
            if finish is not None:
                return web.json_response(self._answer(body, tokens, finish))
            tokens.append(token)
        raise AssertionError("it ends with a reason")

    async def _streamed(self, request: web.Request, body: Any, aborted: asyncio.Event) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for token, finish in self._tokens(body, aborted):
            answer = self._answer(body, [] if token is None else [token], finish)
            await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _control(self, request: web.Request) -> web.Response:
        path = f"/{request.match_info['path']}"
        text = await request.text()
        body = json.loads(text) if text else None
        self.asked.append((path, body))
        if path in self.refuses:
            return web.json_response({"success": False, "message": self.refuses[path]}, status=400)
        await self._actions()[path](body or {})
        return web.json_response({"success": True, "message": ""})

    def _actions(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/update_weights_from_disk": self._read_weights,
            "/load_lora_adapter": self._read_adapter,
            "/unload_lora_adapter": self._drop_adapter,
            "/flush_cache": self._nothing,
            "/release_memory_occupation": self._nothing,
            "/resume_memory_occupation": self._nothing,
        }

    async def _pause(self, body: Any) -> None:
        assert {"mode": "abort"} == body
        self.paused = True
        for aborted in self._aborts.values():
            aborted.set()

    async def _continue(self, body: Any) -> None:
        self.paused = False

    async def _abort(self, body: Any) -> None:
        if body["rid"] in self._aborts:
            self._aborts[body["rid"]].set()

    async def _read_weights(self, body: Any) -> None:
        assert self.paused
        self.loaded = {}
        for file in Path(body["model_path"]).glob("*.safetensors"):
            self.loaded |= load_file(file)
        self.version = int(body["weight_version"])

    async def _read_adapter(self, body: Any) -> None:
        assert self.paused
        folder = Path(body["lora_path"])
        self.loaded = load_file(folder / "adapter_model.safetensors")
        self.loaded["config"] = json.loads((folder / "adapter_config.json").read_text())
        self.adapter = body["lora_name"]

    async def _drop_adapter(self, body: Any) -> None:
        assert self.adapter == body["lora_name"]
        self.adapter = None

    async def _nothing(self, body: Any) -> None:
        pass
