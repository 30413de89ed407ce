"""Models that agents and rewards ask by name: at OpenAI-compatible addresses, or frozen in folders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from jackfield.abc.reward import GeneratedText, HttpClient, read_secret
from jackfield.abc.rollout import BaseRolloutServer
from jackfield.clock import Clock
from jackfield.errors import ConfigError, RewardError
from jackfield.sdk import option, structure

__all__ = ["ModelConfig", "NamedModels", "check_models"]

_OPENAI = {"max_new_tokens": "max_tokens"}  #: sampling parameters that have other names at an address
_Messages = Sequence[Mapping[str, Any]]


@attrs.frozen(kw_only=True)
class ModelConfig:
    """A model of the section ``models``."""

    url: str | None = option(None, "base URL of an OpenAI-compatible address, such as http://127.0.0.1:8000/v1")
    model: str | None = option(None, "the model's name at url")
    key: str | None = option(None, "environment variable with the key for url; null: no key")
    path: str | None = option(None, "Hugging Face folder that workers serve with the run's rollout plugin")
    seconds: float = option(120.0, "deadline of one answer", attrs.validators.gt(0.0))


def check_models(settings: Mapping[str, Any]) -> dict[str, ModelConfig]:
    """Return the section's models by name; raise a ``ConfigError`` for one that is nowhere, or in two places."""
    found = {}
    for name, given in settings.items():
        where = f"models.{name}"
        if name == "policy":
            what, fix = "policy is the name of the run's own replicas", "choose another name"
            raise ConfigError(what, where=where, expected="another name", found=name, fix=fix)
        found[name] = chosen = structure(ModelConfig, given, where)
        if (chosen.url is None) == (chosen.path is None):
            what, there = "a model is at an address or in a folder", "neither" if chosen.url is None else "both"
            raise ConfigError(what, where=where, expected="either url or path", found=there, fix="set one of them")
        at_address = [field for field in ("model", "key") if getattr(chosen, field) is not None]
        if chosen.url is not None and chosen.model is None:
            what, fix = "the address needs the model's name", "set model to a name that the address serves"
            raise ConfigError(what, where=where, expected="model", found="none", fix=fix)
        if chosen.path is not None and at_address:
            what, fix = f"{at_address[0]} has no effect on a model in a folder", f"remove {at_address[0]}"
            raise ConfigError(what, where=where, expected="path alone", found=at_address[0], fix=fix)
    return found


@attrs.define(eq=False, kw_only=True)
class NamedModels:
    """Answers conversations with the models of the section ``models``."""

    settings: Mapping[str, Any]
    http: HttpClient
    clock: Clock
    #: makes the server of the model in a folder, which is not started
    make: Callable[[str], BaseRolloutServer]
    #: has a started server answer a conversation: server, its folder, messages, sampling parameters
    ask: Callable[[BaseRolloutServer, str, _Messages, Mapping[str, Any]], Awaitable[GeneratedText]]
    start_seconds: float = 600.0  #: deadline of a server to start
    _chosen: dict[str, ModelConfig] = attrs.field(init=False)
    _servers: dict[str, asyncio.Task[BaseRolloutServer]] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._chosen = check_models(self.settings)

    async def answer(self, name: str, messages: _Messages, sampling: Mapping[str, Any]) -> GeneratedText:
        """Answer a conversation; ``reward.context`` for a name that the section does not have."""
        chosen = self._chosen.get(name)
        if chosen is None:
            what, expected = f"the run has no model {name!r}", ", ".join(["policy", *self._chosen])
            raise RewardError(what, code="reward.context", where="models", expected=expected, found=name)
        who = f"the model {name} to answer"
        if chosen.path is None:
            return await self.clock.wait_for(self._request(name, chosen, messages, sampling), chosen.seconds, who)
        if (loading := self._servers.get(name)) is None or (loading.done() and loading.exception() is not None):
            loading = self._servers[name] = asyncio.create_task(self._serve(name, chosen.path))
        server = await asyncio.shield(loading)
        return await self.clock.wait_for(self.ask(server, chosen.path, messages, sampling), chosen.seconds, who)

    async def close(self) -> None:
        """Stop the servers that were started."""
        servers, self._servers = self._servers, {}
        for loading in servers.values():
            loading.cancel()  # without effect on one that has started
        for found in await asyncio.gather(*servers.values(), return_exceptions=True):
            if not isinstance(found, BaseException):
                await found.stop()

    async def _serve(self, name: str, path: str) -> BaseRolloutServer:
        server = self.make(path)
        try:
            await self.clock.wait_for(server.start(), self.start_seconds, f"the model {name} to start")
        except BaseException:
            await server.stop()
            raise
        return server

    async def _request(
        self, name: str, chosen: ModelConfig, messages: _Messages, sampling: Mapping[str, Any]
    ) -> GeneratedText:
        headers = {} if chosen.key is None else {"Authorization": f"Bearer {read_secret(chosen.key)}"}
        body = {"model": chosen.model, "messages": [dict(message) for message in messages]}
        body |= {_OPENAI.get(key, key): value for key, value in sampling.items()}
        url = f"{str(chosen.url).rstrip('/')}/chat/completions"
        answer = await self.http.request("POST", url, body=body, headers=headers)
        try:
            told = msgspec.json.decode(answer.text)
            text = told["choices"][0]["message"]["content"]
            tokens = int((told.get("usage") or {}).get("total_tokens", 0))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            found = f"status {answer.status}: {answer.text[:200]}"
            what, expected = f"the model {name} gave no answer", "a chat completion with a text"
            raise RewardError(what, code="reward.http", where=chosen.url, expected=expected, found=found) from error
        return GeneratedText(text=str(text or ""), tokens=tokens)
