"""Workflows that make a better answer out of several."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any, Literal

from jackfield_agent_workflow.conversations import Reply, RolloutEnded
from jackfield_agent_workflow.workflow import Task, Workflow


class _Scored(Workflow):
    """A workflow that scores answers."""

    async def score(self, task: Task, text: str) -> float:
        """Return the score of an answer: 1 if its last word is that of the ground truth, else 0.

        It may be a plain function.
        """
        said, right = text.split(), task.ground_truth.split()
        return float(bool(said and right) and said[-1] == right[-1])

    async def _scored(self, task: Task, reply: Reply) -> float:
        value: Any = self.score(task, reply.text)
        return float(await value if inspect.isawaitable(value) else value)


class ReflectOnceWorkflow(_Scored):
    """An answer, feedback on it, a reflection, and another answer.

    ``train`` says which answers are trained on: ``both``, the ``first``, the ``second``, or ``improved`` (both, if the
    second is better than the first; else the first). In ``same`` sequence the feedback is a further turn; otherwise the
    second answer has a prompt of its own, from :meth:`reflection_messages`.
    """

    def __init__(
        self,
        *,
        train: Literal["both", "first", "second", "improved"] = "both",
        same_sequence: bool = False,
        skip_if_right: bool = True,
        threshold: float = 1.0,
    ) -> None:
        if train not in ("both", "first", "second", "improved"):
            raise ValueError("train is both, first, second or improved")
        if same_sequence and train in ("first", "second"):
            raise ValueError("in the same sequence both answers are trained on: train: both or improved")
        self.train, self.same_sequence, self.skip_if_right = train, same_sequence, skip_if_right
        self.threshold = threshold

    def feedback(self, task: Task, text: str, score: float) -> str:
        """Return what is said about the first answer. It may be a coroutine function."""
        verdict = "right" if score >= self.threshold else "wrong"
        return f"Your answer is {verdict}. Think about it, and answer again."

    def reflection_messages(self, task: Task, text: str, feedback: str) -> list[dict[str, Any]]:
        """Return the prompt of the second answer, where it is another sequence."""
        return [*task.messages, {"role": "assistant", "content": text}, {"role": "user", "content": feedback}]

    async def run(self, task: Task) -> None:
        """Answer, reflect, and answer again."""
        first = await self.model.chat(task.messages)
        before = await self._scored(task, first)
        self.reward(before, first)
        self.metric("first_score", before)
        if self.skip_if_right and before >= self.threshold:
            self.metric("final_score", before)
            return
        said: Any = self.feedback(task, first.text, before)
        said = await said if inspect.isawaitable(said) else said
        if self.same_sequence:
            turn = [*task.messages, first.message, {"role": "user", "content": said}]
            second = await self.model.chat(turn)
        else:
            second = await self.agent("reflection").chat(self.reflection_messages(task, first.text, said))
        after = await self._scored(task, second)
        self.reward(after, second)
        self.metric("final_score", after)
        self._choose(first, second, after > before)

    def _choose(self, first: Reply, second: Reply, better: bool) -> None:
        if self.same_sequence:
            return
        if self.train == "second":
            self.leave_out(first)
        elif self.train == "first" or (self.train == "improved" and not better):
            self.leave_out(second)


class BestOfWorkflow(_Scored):
    """Several answers at a time, and with ``combine`` one more answer that is made of them.

    ``train`` says which sequences are trained on: ``all``, the ``best`` answer, or the ``last`` one.
    """

    def __init__(
        self, *, answers: int = 4, combine: bool = False, train: Literal["all", "best", "last"] = "all"
    ) -> None:
        if answers < 1 or train not in ("all", "best", "last"):
            raise ValueError("expected answers of 1 or more, and train: all, best or last")
        self.answers, self.combine, self.train = answers, combine, train

    def combining_messages(self, task: Task, replies: Sequence[Reply], scores: Sequence[float]) -> list[dict[str, Any]]:
        """Return the prompt of the answer that is made of the others."""
        listed = "\n".join(f"Answer {number}: {reply.text}" for number, reply in enumerate(replies, 1))
        [*head, last] = task.messages
        text = f"{last.get('content')}\n{listed}\nGive the best answer."
        return [*head, {"role": "user", "content": text}]

    async def run(self, task: Task) -> None:
        """Answer several times, and choose or combine."""
        share = max(1, self.model.tokens_left // (self.answers + self.combine))
        asked = [
            asyncio.ensure_future(self.model.chat(task.messages, max_new_tokens=share)) for _ in range(self.answers)
        ]
        try:
            replies = list(await asyncio.gather(*asked))
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        scores = [await self._scored(task, reply) for reply in replies]
        for reply, score in zip(replies, scores, strict=True):
            self.reward(score, reply)
        self.metric("mean_score", sum(scores) / len(scores))
        self.metric("best_score", max(scores))
        best = replies[scores.index(max(scores))]
        chosen = best
        if self.combine:
            try:
                chosen = await self.agent("combine").chat(self.combining_messages(task, replies, scores))
            except RolloutEnded:
                self.metric("final_score", max(scores))
                raise
            final = await self._scored(task, chosen)
            self.reward(final, chosen)
            self.metric("final_score", final)
        if self.train != "all":
            kept = best if self.train == "best" else chosen
            for reply in (*replies, chosen):
                if reply is not kept:
                    self.leave_out(reply)
