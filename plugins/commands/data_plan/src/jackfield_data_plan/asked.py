"""What operators may ask in a dry run: nothing, or models at addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.operator import OperatorContext
from jackfield.abc.reward import GeneratedText, HttpAnswer
from jackfield.clock import Clock
from jackfield.errors import OperatorError
from jackfield_models import NamedModels
from jackfield_reward_requests import AiohttpClient

PLANNER = "planner"  #: the name of the model that made the plan


@attrs.define(eq=False)
class Asked:
    """The services of operators, which note what was asked.

    ``models`` are by name as in the section ``models``, those at addresses; None: whatever is asked is refused.
    """

    models: Mapping[str, Any] | None
    what: str | None = None  #: what was asked and refused since it was last set to None
    _client: AiohttpClient = attrs.field(factory=AiohttpClient, init=False)
    _named: NamedModels | None = attrs.field(default=None, init=False)

    def context(self, names: Mapping[str, str], seed: int) -> OperatorContext:
        """Return a context with these services."""
        given: Any = {"http": self, "generate": self.generate, "score": self.score}
        return OperatorContext(clock=Clock(), seed=seed, columns=names, **given)

    async def request(self, method: str, url: str, **more: Any) -> HttpAnswer:
        """Send an HTTP request."""
        if self.models is None:
            raise self._refused("an address")
        return await self._client.request(method, url, **more)

    async def generate(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        """Have a model answer; the model that made the plan stands in for the policy, which a dry run does not have."""
        if self.models is None or (model == "policy" and PLANNER not in self.models):
            raise self._refused(f"the model {model}")
        if self._named is None:
            self._named = NamedModels(
                settings=self.models, http=self._client, clock=Clock(), make=_no_folders, ask=_no_answers
            )
        return await self._named.answer(PLANNER if model == "policy" else model, messages, sampling)

    async def score(self, values: Mapping[str, Any], response: str) -> float:
        """Refuse: a dry run has no reward."""
        raise self._refused("the reward")

    def _refused(self, what: str) -> OperatorError:
        self.what = what
        return OperatorError(f"a dry run does not ask {what}", code="operator.failed", fix="allow it with --ask")

    async def close(self) -> None:
        """Close all connections."""
        if self._named is not None:
            await self._named.close()
        await self._client.close()


def _no_folders(path: str) -> Any:
    raise OperatorError("a dry run serves no model of a folder", where=path, expected="a model with a url")


async def _no_answers(*_: Any) -> GeneratedText:
    raise OperatorError("a dry run serves no model of a folder")
