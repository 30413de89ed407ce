"""How far the policy has moved from the initial model, on responses that the initial model gave."""

from __future__ import annotations

import math
from typing import Any

import attrs

from jackfield.runtime.engine import EngineGroup
from jackfield.trainer.role import Role
from jackfield.trainer.steps import Step

NAME = "policy/initial_kl"
_TOKENS = 512  #: maximum of a prompt, and of a response, of which the first tokens are used


@attrs.define(kw_only=True, eq=False)
class InitialKL:
    """Estimates the KL of the policy from the initial model, in nats per token, without a second model.

    Before the first update the engine computes log-probs of a few responses of the first batch, which the initial
    model gave. After each step it computes them again. With d the new log-prob minus the first one, the mean of
    exp(d) - 1 - d over the model's tokens estimates KL(initial || policy) without bias, and is never negative
    (Schulman's k3, http://joschu.net/blog/kl-approx.html). The responses stay the same, so new ones add no noise.
    """

    role: Role
    actor: EngineGroup
    #: by response: ids of prompt and response, mask, log-probs of the initial model; plain values for checkpoints
    kept: list[list[Any]] = attrs.field(factory=list)

    async def keep(self, step: Step) -> None:
        """Keep responses of the first step, before its first update."""
        role, begun = self.role, any(name == "actor" for name, _ in step.updates)
        if step.number or begun or self.kept or role.arrays or not role.schedule.explores:
            return
        fits = [at for at, tags in enumerate(step.rows.tags) if tags["prompt_tokens"] <= _TOKENS]
        initial = [at for at in fits if step.rows.tags[at].get("weight_version_min") == 0]
        if initial := initial[: role.config.algorithm.kl.initial_responses]:
            samples = await self.actor.tokens(step.rows.select(initial))
            samples = [[prompt, response[:_TOKENS], mask[:_TOKENS]] for prompt, response, mask in samples]
            log_probs = await self._score(samples)
            self.kept = [[*sample, each] for sample, each in zip(samples, log_probs, strict=True)]

    async def measure(self, step: Step) -> None:
        """Record the estimate with the weights of now."""
        if not self.kept:
            return
        async with self.role.measure("initial_kl", "trainer", step.number):
            found = []
            for (*_, mask, before), after in zip(self.kept, await self._score(self.kept), strict=True):
                moved = [new - old for new, old, counts in zip(after, before, mask, strict=True) if counts]
                found += [math.expm1(min(each, 50.0)) - each for each in moved]
            if found:
                self.role.note(NAME, sum(found) / len(found))

    async def _score(self, samples: list[list[Any]]) -> list[list[float]]:
        """Return log-probs of the responses; those of one prompt are computed together."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for at, (prompt, *_) in enumerate(samples):
            groups.setdefault(tuple(prompt), []).append(at)
        scored = dict[int, list[float]]()
        for prompt, places in groups.items():
            found = await self.actor.score(prompt, [samples[at][1] for at in places])
            scored |= dict(zip(places, found, strict=True))
        return [scored[at] for at in range(len(samples))]
