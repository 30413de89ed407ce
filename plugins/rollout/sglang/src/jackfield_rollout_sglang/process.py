"""SGLang's server as a child process, and the HTTP client that talks to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from jackfield.clock import Clock
from jackfield.errors import RolloutError

_POLL_SECONDS = 0.5  #: between two checks whether a starting server answers
_GRACE_SECONDS = 15.0  #: for a server to end by itself


class SglangProcess:
    """One server: its start, its requests and its end.

    All requests raise ``RolloutError`` (``rollout.failed``, with SGLang's message) if the status is not 200, and
    ``aiohttp.ClientError`` without an answer.
    """

    def __init__(self, clock: Clock, host: str, port: int) -> None:
        self._clock = clock
        bracketed = f"[{host}]" if ":" in host else host
        self.url = f"http://{bracketed}:{port}"
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def ended(self) -> str | None:
        """Return how the process ended; None while it runs."""
        if self._process is None or self._process.returncode is None:
            return None
        return f"SGLang's server has ended with code {self._process.returncode}"

    async def start(self, arguments: Sequence[str], seconds: float) -> None:
        """Start the server and wait until it answers; ``rollout.stopped`` if it ends instead."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sglang.launch_server", *arguments, stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        await self.connect(seconds)

    async def connect(self, seconds: float) -> None:
        """Wait until the server answers, started by :meth:`start` or before."""
        no_deadline = aiohttp.ClientTimeout(total=None, sock_connect=_GRACE_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)  # one connection per running request
        self._session = aiohttp.ClientSession(self.url, timeout=no_deadline, connector=connector)
        await self._clock.wait_for(self._ready(), seconds, "SGLang's server to load the model")

    async def _ready(self) -> None:
        assert self._session is not None
        while True:
            if self.ended is not None:
                raise RolloutError(self.ended, code="rollout.stopped", fix="see what SGLang has printed")
            with suppress(aiohttp.ClientError):
                async with self._session.get("/health") as answer:
                    if answer.status == 200:
                        return
            await self._clock.sleep(_POLL_SECONDS)

    async def post(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """Post a request and return the answer's JSON, if it is JSON."""
        return await self._clock.wait_for(self._post(path, body), seconds, f"SGLang to answer {path}")

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield answers of ``/generate``: one, or with ``stream`` several. Closing it aborts the request."""
        assert self._session is not None
        if not body["stream"]:
            yield await self._post("/generate", body)
            return
        async with self._session.post("/generate", json=body) as answer:
            await _check("/generate", answer)
            async for line in answer.content:
                text = line.strip().removeprefix(b"data: ")
                if text == b"[DONE]":
                    return
                if text:
                    yield json.loads(text)

    async def _post(self, path: str, body: Mapping[str, Any] | None) -> Any:
        assert self._session is not None
        async with self._session.post(path, json=body) as answer:
            await _check(path, answer)
            return await answer.json() if answer.content_type == "application/json" else None

    async def close(self) -> None:
        """Stop the server and its descendants; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        for each in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, each)
            with suppress(Exception):
                await self._clock.wait_for(process.wait(), _GRACE_SECONDS, "SGLang's server to end")
                return


async def _check(path: str, answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RolloutError(
            f"SGLang has refused {path}",
            code="rollout.failed",
            where=path,
            expected="status 200",
            found=f"{answer.status}: {(await answer.text())[:1000]}",
        )


def free_port(host: str) -> int:
    """Return a port that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
