"""The OpenAI-compatible address of a rollout server that has one.

The plugin's fixture may say under ``openai`` which settings make the server listen; without it they are
``{"openai": {}}``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import BaseRolloutServer, RolloutContext, ServerInfo
from jackfield_conformance.registry import check
from jackfield_conformance.subject import Subject
from jackfield_conformance.support.rollout import PROMPT, request
from jackfield_conformance.support.rollout_model import model_folder, tolerance

_PAGE = "docs/plugins/rollout.md#the-openai-compatible-address"
_SECONDS = 20.0


@check("ROL-110", capability="openai", page=_PAGE)
async def the_address_serves_the_same_tokens(subject: Subject) -> None:
    """A request of token ids to the address yields the tokens and log-probabilities that generate yields."""
    server, info = await _listening(subject)
    try:
        sampling: dict[str, Any] = {"seed": 7, "temperature": 0.7, "top_k": 20}
        expected = await server.generate(request("direct", max_new_tokens=6, **sampling))
        models = await _ask(info, "/models")
        assert models["data"], "/models lists no model"
        answer = await _ask(
            info,
            "/completions",
            {
                "model": models["data"][0]["id"],
                "prompt": list(PROMPT),
                "max_tokens": 6,
                "logprobs": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                **sampling,
            },
        )
        [choice] = answer["choices"]
        found = choice.get("token_ids")
        assert found == list(expected.token_ids), f"generate: {list(expected.token_ids)}; the address: {found}"
        pairs = zip(expected.log_probs, choice["logprobs"]["token_logprobs"], strict=True)
        worst = max(abs(direct - told) for direct, told in pairs)
        assert worst <= tolerance(subject), f"log-probabilities of the address differ from generate's by {worst:.2g}"
        assert choice["finish_reason"] == "length", f"it ended at its limit, and says {choice['finish_reason']!r}"
    finally:
        await server.stop()


@check("ROL-111", capability="openai", page=_PAGE)
async def the_address_closes_with_the_server(subject: Subject) -> None:
    """After stop nothing listens at the address."""
    server, info = await _listening(subject)
    try:
        await _ask(info, "/models")
    finally:
        await server.stop()
    try:
        await _ask(info, "/models")
    except (URLError, OSError):
        return
    raise AssertionError(f"{info.openai_base_url} answers after stop")


async def _listening(subject: Subject) -> tuple[BaseRolloutServer, ServerInfo]:
    settings = subject.fixture.get("openai", {"openai": {}})
    server: BaseRolloutServer = subject.make(RolloutContext(model=ModelSpec(path=model_folder())), **settings)
    info = await server.start()
    if info.openai_base_url is None:
        await server.stop()
        raise AssertionError(f"start names no openai_base_url with the settings {settings}")
    return server, info


async def _ask(info: ServerInfo, path: str, body: Mapping[str, Any] | None = None) -> Any:
    def ask() -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = Request(f"{info.openai_base_url}{path}", data, {"Content-Type": "application/json"})
        with urlopen(asked, timeout=_SECONDS) as answer:
            return json.load(answer)

    return await asyncio.to_thread(ask)
