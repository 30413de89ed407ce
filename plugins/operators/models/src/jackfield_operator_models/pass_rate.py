"""Scores how hard tasks are by how often a model solves them."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, le

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row, Use
from jackfield.errors import WorkerLost
from jackfield.sdk import option
from jackfield_model_requests import AskingConfig, Model
from jackfield_operator_models.texts import messages_of


@attrs.frozen(kw_only=True)
class PassRateConfig(AskingConfig):
    """Settings of ``difficulty_pass_rate``."""

    prompt: str = option("prompt", "column with the problem: a text or a conversation")
    system: str | None = option(None, "system message before a problem; null: none")
    samples: int = option(8, "answers to each task", ge(1))
    temperature: float = option(1.0, "temperature of the answers", [ge(0.0), le(100.0)])
    max_tokens: int = option(1024, "longest answer, in tokens", ge(1))
    threshold: float = option(0.5, "score from which an answer passes")
    writes: str = option("difficulty", "column that gets 1 - pass rate")


class DifficultyPassRate(Operator):
    """Scores a task by the share of a model's answers that the reward of the run accepts.

    It writes ``pass_rate``, the difficulty (1 - pass rate), ``mean_score`` and ``mean_response_characters``. The seed
    of an answer is made of the stage's seed, the task's key and the answer's number, so that the same model gives the
    same answers, whatever is asked beside them.
    """

    type: ClassVar[OperatorType] = "scorer"

    def __init__(self, config: PassRateConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._prompt, self._model = context.column(config.prompt), Model(config, context)

    @property
    def reads(self) -> tuple[str, ...]:
        """All columns, as the reward may need any of them."""
        return ("*",)

    @property
    def writes(self) -> tuple[str, ...]:
        """Difficulty, pass rate, mean score and mean length."""
        return (self.config.writes, "pass_rate", "mean_score", "mean_response_characters")

    @property
    def uses(self) -> tuple[Use, ...]:
        """Return the run's reward, and its policy if that is asked."""
        return (*self._model.uses, "reward")

    @property
    def version(self) -> str:
        """The model's name."""
        return self._model.name

    async def start(self) -> None:
        """Reach the model."""
        await self._model.start()

    async def close(self) -> None:
        """Close the connections of the model."""
        await self._model.close()

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Have each task answered, and score the answers; a task with an answer or a score that fails is set aside."""
        found = await asyncio.gather(*map(self._row, request.rows))
        keyed = [(row.key, each) for row, each in zip(request.rows, found, strict=True)]
        return OperatorResult(
            updates={key: each for key, each in keyed if not isinstance(each, str)},
            set_aside={key: each for key, each in keyed if isinstance(each, str)},
        )

    async def _row(self, row: Row) -> dict[str, Any] | str:
        """Return the columns of a row, or why it has none."""
        try:
            messages = messages_of(row.values, self._prompt)
        except ValueError as error:
            return str(error)
        if self.config.system is not None:
            messages.insert(0, {"role": "system", "content": self.config.system})
        asked = [self._sample(row, messages, number) for number in range(self.config.samples)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        scores, lengths = list[float](), list[int]()
        for number, answer in enumerate(answers):
            if isinstance(answer, WorkerLost) or (
                isinstance(answer, BaseException) and not isinstance(answer, Exception)
            ):
                raise answer
            if isinstance(answer, BaseException):
                return f"answer {number}: {type(answer).__name__}: {answer}"
            scores.append(answer[0])
            lengths.append(answer[1])
        rate = sum(score >= self.config.threshold for score in scores) / len(scores)
        return {
            self.config.writes: 1.0 - rate,
            "pass_rate": rate,
            "mean_score": sum(scores) / len(scores),
            "mean_response_characters": sum(lengths) / len(lengths),
        }

    async def _sample(self, row: Row, messages: list[dict[str, Any]], number: int) -> tuple[float, int]:
        """Return the score of an answer and its length in characters."""
        config = self.config
        async with self._model.turn():
            answer = await self._model.ask(
                messages,
                temperature=config.temperature,
                max_tokens=config.max_tokens,
                seed=self._model.seed(row.key, number),
            )
            return float(await self.context.score(row.values, answer.text)), len(answer.text)
