"""How far the policy has moved from the initial model, on responses that the initial model gave."""

from __future__ import annotations

import attrs

from jackfield.runtime.engine import EngineGroup
from jackfield.trainer.role import Role
from jackfield.trainer.steps import Step

NAME = "policy/initial_kl"


@attrs.define(kw_only=True, eq=False)
class InitialKL:
    """Measures the KL of the policy from the initial model, in nats per token, without a second model.

    Before the first update the engine's ranks keep a few samples of the first batch, with their log-probs by the
    initial model, also in checkpoints. After each step they compute them again. The samples stay the same, so new ones
    add no noise.
    """

    role: Role
    actor: EngineGroup

    async def keep(self, step: Step) -> None:
        """Keep samples of the first step, before its first update."""
        role, begun = self.role, any(name == "actor" for name, _ in step.updates)
        count = role.config.algorithm.kl.initial_responses
        if count and not (step.number or begun or role.arrays) and role.schedule.explores:
            await self.actor.keep_initial(step.rows, count)

    async def measure(self, step: Step) -> None:
        """Record the KL with the weights of now."""
        role = self.role
        if role.config.algorithm.kl.initial_responses and role.schedule.explores and not role.arrays:
            async with role.measure("initial_kl", "trainer", step.number):
                if (found := await self.actor.initial_kl()) is not None:
                    role.note(NAME, found)
