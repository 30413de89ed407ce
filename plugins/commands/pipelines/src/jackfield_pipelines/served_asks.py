"""What operators may ask in a pipeline service: what its file configures, and HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from jackfield.abc.operator import Operator, OperatorContext, Use
from jackfield.abc.reward import GeneratedText
from jackfield.compose.agents import Models
from jackfield.errors import ConfigError, RewardError
from jackfield.routing import Router
from jackfield_pipelines.pipeline import Step
from jackfield_pipelines.process_operators import end_processes
from jackfield_pipelines.services import Services

_SECTIONS: Mapping[Use, str] = {"policy": "model", "reward": "reward"}


@attrs.define(eq=False, kw_only=True)
class ServedAsks(Services):
    """Answers with what the service's file has, and refuses what a run alone has."""

    has: frozenset[str]  #: sections under ``asks`` in the service's file

    def check(self, steps: Sequence[Step], where: str) -> None:
        """Refuse operators that use what is not there, before anything is computed."""
        try:
            for number, step in enumerate(steps):
                operator: Operator = step.build(OperatorContext())
                for use in operator.uses:
                    self._need(use, f"{where}[{number}]", step.name)
        except BaseException:
            end_processes(step.record for step in steps)
            raise

    def _need(self, use: Use, where: str, found: str) -> None:
        if (section := _SECTIONS[use]) not in self.has:
            fix = f"configure asks.{section} in the service's file, or leave out data.pipeline.service"
            details: Any = {"where": where, "expected": f"an operator that does not ask the {use}", "found": found}
            raise ConfigError(
                f"an operator asks the {use}, which the pipeline service does not have", fix=fix, **details
            )

    async def generate(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        """Answer a conversation with a model of the service's file."""
        if model == "policy":
            self._need("policy", "data.pipeline", "context.generate")
        return await Services.generate(self, model, messages, **sampling)

    async def score(self, values: Mapping[str, Any], response: str) -> float:
        """Score a response to the task of a record by the reward of the service's file."""
        self._need("reward", "data.pipeline", "context.score")
        return await Services.score(self, values, response)

    async def score_experience(self, values: Mapping[str, Any], response: str) -> float:
        """Score a response to the task of an experience by the reward of the service's file."""
        self._need("reward", "data.pipeline", "context.score")
        score = await self._once("reward", self._scorer)
        found: float = await score(values, response)
        return found

    async def _models(self, serves: bool) -> Models:
        if "model" in self.has:
            return await Services._models(self, serves)
        router = Router(self.clock, str)  # nothing is asked of it: named models alone
        models = Models(self.config, self.registry, self.clock, router, cast(Any, None), "pipeline", RewardError)
        self._stack.push_async_callback(models.close)
        return models
