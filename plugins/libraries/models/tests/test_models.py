"""Tests of models that are asked by name, with a real address on loopback and a fake server of a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from aiohttp import web

from jackfield.abc.reward import GeneratedText
from jackfield.abc.rollout import BaseRolloutServer
from jackfield.clock import Clock
from jackfield.errors import ConfigError, DeadlineExceeded, JackfieldError
from jackfield_models import NamedModels, check_models
from jackfield_reward_requests import AiohttpClient

CLIENTS: list[AiohttpClient] = []


class Server:
    """A server that counts its starts, and fails at the first ones."""

    def __init__(self, log: list[str], fails: int = 0) -> None:
        self.log, self.fails = log, fails

    async def start(self) -> None:
        self.log.append("start")
        if self.log.count("start") <= self.fails:
            raise OSError("no memory")

    async def stop(self) -> None:
        self.log.append("stop")


def models(settings: dict[str, Any], log: list[str] | None = None, fails: int = 0) -> NamedModels:
    async def ask(server: object, path: str, messages: Any, sampling: Any) -> GeneratedText:
        return GeneratedText(text=f"{path}: {messages[-1]['content']} {sampling['temperature']}", tokens=3)

    make = lambda path: cast(BaseRolloutServer, Server([] if log is None else log, fails))  # noqa: E731
    http: Any = CLIENTS[-1] if CLIENTS else None
    return NamedModels(settings=settings, http=http, clock=Clock(), make=make, ask=ask)


async def at_address(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], work: Callable[[str], Awaitable[Any]]
) -> Any:
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    CLIENTS.append(AiohttpClient())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        return await work(f"http://{host}:{port}/v1")
    finally:
        await CLIENTS.pop().close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"policy": {"path": "a"}}, "models.policy"),
        ({"one": {}}, "models.one"),
        ({"one": {"url": "http://127.0.0.1", "path": "a"}}, "models.one"),
        ({"one": {"url": "http://127.0.0.1"}}, "models.one"),
        ({"one": {"path": "a", "model": "m"}}, "models.one"),
        ({"one": {"path": "a", "key": "K"}}, "models.one"),
        ({"one": {"path": "a", "seconds": 0}}, "models.one.seconds"),
        ({"one": {"folder": "a"}}, "models.one.folder"),
    ],
    ids=str,
)
def test_a_model_that_is_nowhere_or_in_two_places_is_refused(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_models(settings)
    assert str(caught.value.where).startswith(where)


def test_an_address_is_asked_with_its_key_and_the_names_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setenv("JUDGE_KEY", "secret")

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers["Authorization"], await request.json()))
        told = {"choices": [{"message": {"role": "assistant", "content": "4"}}], "usage": {"total_tokens": 9}}
        return web.json_response(told)

    async def work(url: str) -> GeneratedText:
        asked = models({"judge": {"url": url, "model": "big", "key": "JUDGE_KEY"}})
        return await asked.answer(
            "judge", [{"role": "user", "content": "2+2"}], {"max_new_tokens": 5, "temperature": 0}
        )

    assert GeneratedText(text="4", tokens=9) == asyncio.run(at_address(answer, work))
    messages = [{"role": "user", "content": "2+2"}]
    assert [("Bearer secret", {"model": "big", "messages": messages, "max_tokens": 5, "temperature": 0})] == seen


@pytest.mark.parametrize("how", ["status", "form", "silence"])
def test_an_address_without_an_answer_is_named(how: str) -> None:
    released = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if how == "silence":
            await released.wait()
        return web.json_response({"error": "no"} if how == "form" else {}, status=503 if how == "status" else 200)

    async def work(url: str) -> None:
        asked = models({"judge": {"url": url, "model": "big", "seconds": 0.2}})
        try:
            await asked.answer("judge", [{"role": "user", "content": "2+2"}], {})
        finally:
            released.set()

    with pytest.raises(JackfieldError) as caught:
        asyncio.run(at_address(answer, work))
    assert (caught.value.code == "reward.http") != isinstance(caught.value, DeadlineExceeded)
    assert "judge" in caught.value.message


def test_a_folder_is_served_once_for_all_who_ask_and_stopped_at_the_end() -> None:
    log: list[str] = []

    async def main() -> list[str]:
        asked = models({"before": {"path": "start"}}, log)
        questions = [
            asked.answer("before", [{"role": "user", "content": str(n)}], {"temperature": 1}) for n in range(3)
        ]
        found = [each.text for each in await asyncio.gather(*questions)]
        await asked.close()
        return found

    assert ["start: 0 1", "start: 1 1", "start: 2 1"] == asyncio.run(main())
    assert ["start", "stop"] == log


def test_a_folder_that_did_not_start_is_tried_again_by_the_next_who_asks() -> None:
    log: list[str] = []

    async def main() -> str:
        asked = models({"before": {"path": "start"}}, log, fails=1)
        message = [{"role": "user", "content": "a"}]
        with pytest.raises(OSError, match="no memory"):
            await asked.answer("before", message, {"temperature": 1})
        found = await asked.answer("before", message, {"temperature": 1})
        await asked.close()
        return found.text

    assert "start: a 1" == asyncio.run(main())
    assert ["start", "stop", "start", "stop"] == log


def test_a_name_that_the_section_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(JackfieldError) as caught:
        asyncio.run(models({"judge": {"path": "a"}}).answer("juge", [], {}))
    assert ("reward.context", "policy, judge") == (caught.value.code, caught.value.expected)
