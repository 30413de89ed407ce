"""A workflow that acts in an environment, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import xxhash

from jackfield_agent_workflow.conversations import Reply, RolloutEnded
from jackfield_agent_workflow.workflow import Task, Workflow
from jackfield_environments import Observation, Step


@attrs.frozen(kw_only=True)
class Turn:
    """One turn of an episode."""

    observation: str  #: what the model was shown
    reply: Reply
    action: str
    step: Step  #: what followed


class MultiTurnWorkflow(Workflow):
    """Observation, answer, action, and so on, until the environment ends the episode or ``max_steps`` are done.

    With ``mode="concatenated"`` a rollout is one sequence, in which each turn of the model has its reward. With
    ``"steps"`` each turn is a sequence of its own with the number of its step, as GiGPO and step-wise GRPO need; its
    prompt is what :meth:`step_messages` returns, by default the observation after the last ``history`` turns.
    """

    def __init__(
        self,
        *,
        max_steps: int = 30,
        mode: Literal["concatenated", "steps"] = "concatenated",
        history: int = 0,
        stop: str | Sequence[str] = (),
    ) -> None:
        if max_steps < 1 or history < 0 or mode not in ("concatenated", "steps"):
            raise ValueError("expected max_steps of 1 or more, history of 0 or more, and mode concatenated or steps")
        self.max_steps, self.mode, self.history = max_steps, mode, history
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)

    # -- what subclasses may change

    def first_messages(self, task: Task, observation: Observation) -> list[dict[str, Any]]:
        """Return the prompt: the task's messages, with the first observation in or after the last of them.

        If the content of the task's last message has ``{observation}``, it takes its place.
        """
        messages = task.messages
        if messages and messages[-1].get("role") == "user" and isinstance(messages[-1].get("content"), str):
            text = messages.pop()["content"]
            if "{observation}" in text:
                text = text.replace("{observation}", observation.text)
            else:
                text = f"{text}\n{observation.text}" if observation.text and text else text or observation.text
            return [*messages, {"role": "user", "content": text}]
        return [*messages, {"role": "user", "content": observation.text}]

    def next_messages(self, step: Step) -> list[dict[str, Any]]:
        """Return what is said to the model after an action, in mode ``concatenated``."""
        return [{"role": "user", "content": step.text}]

    def step_messages(self, task: Task, turns: Sequence[Turn], observation: Observation | Step) -> list[dict[str, Any]]:
        """Return the prompt of one step, in mode ``steps``."""
        shown = turns[len(turns) - self.history :] if self.history else ()
        said = [part for turn in shown for part in ({"role": "user", "content": turn.observation}, turn.reply.message)]
        [*head, last] = self.first_messages(task, Observation(text=observation.text, info=observation.info))
        return [*head, *said, last]

    def parse_action(self, text: str) -> str:
        """Return the action in an answer: all of it."""
        return text.strip()

    def step_reward(self, step: Step, turn: int) -> float:
        """Return the reward of a turn, counted from 0: the environment's."""
        return step.reward

    def reset_fields(self, task: Task) -> dict[str, Any]:
        """Return what ``reset`` of the environment gets: the task's fields, and the ``seed`` of the task.

        It is the field ``seed``, or else made of the task's id: all rollouts of a task begin alike.
        """
        fields = {name: value for name, value in task.items() if name != "messages"}
        seed = fields.get("seed")
        fields["seed"] = seed if isinstance(seed, int) else xxhash.xxh3_64_intdigest(task.id.encode()) >> 33
        return fields

    # -- the loop

    async def run(self, task: Task) -> None:
        """Play one episode."""
        environment, turns = self.environment, list[Turn]()
        here: Observation | Step = await environment.reset(**self.reset_fields(task))
        messages: list[dict[str, Any]] = []
        try:
            while len(turns) < self.max_steps and not environment.ended:
                if self.mode == "steps":
                    previous = turns[-1].reply if turns else None
                    shown = self.step_messages(task, turns, here)
                    reply = await self.model.next_step(previous, shown, stop=self.stop)
                else:
                    messages = self._extended(task, messages, turns, here)
                    reply = await self.model.chat(messages, stop=self.stop)
                action = self.parse_action(reply.text)
                seen, here = here.text, await environment.step(action)
                self.event("environment", action=action, reward=here.reward, ended=here.ended)
                self.reward(self.step_reward(here, len(turns)), reply)
                turns.append(Turn(observation=seen, reply=reply, action=action, step=here))
        except RolloutEnded:
            self.reward(0.0)  # an answer that was cut has no action
            raise
        finally:
            self._note(turns, environment.total)

    def _extended(
        self, task: Task, messages: list[dict[str, Any]], turns: Sequence[Turn], here: Observation | Step
    ) -> list[dict[str, Any]]:
        if isinstance(here, Observation):
            return self.first_messages(task, here)
        return [*messages, turns[-1].reply.message, *self.next_messages(here)]

    def _note(self, turns: Sequence[Turn], total: float) -> None:
        last = turns[-1].step if turns else None
        self.metric("environment_steps", len(turns))
        self.metric("environment_reward", total)
        self.metric("environment_ended", float(last is not None and last.ended))
        if last is not None and isinstance(last.info.get("won"), bool):
            self.metric("won", float(last.info["won"]))
        elif not turns:
            self.metric("won", 0.0)
