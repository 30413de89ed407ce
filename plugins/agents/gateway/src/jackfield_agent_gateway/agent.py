"""The agent: it opens a rollout at the gateway, runs the program, and returns what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentWorkerContext
from jackfield.errors import AgentError, DeadlineExceeded
from jackfield_agent_gateway.programs import Programs, Shared
from jackfield_agent_gateway.rollouts import Rollout
from jackfield_agent_gateway.server import Gateway
from jackfield_agent_gateway.settings import GatewayConfig


class GatewayAgent(AgentLoopBase):
    """A program that speaks OpenAI's API is the agent; its requests become sequences with exact tokens."""

    config: GatewayConfig
    shows_images = False  #: that are parts of messages
    _rollout: Rollout | None = None

    @classmethod
    async def start(cls, config: GatewayConfig, context: AgentWorkerContext) -> Shared:
        """Start the server of the worker, and load the program."""
        gateway, programs = Gateway(config, context, cls.shows_images), Programs(config.program, context)
        try:
            await programs.start()
            await gateway.start()
        except BaseException:
            await cls.close(Shared(gateway, programs))
            raise
        return Shared(gateway, programs)

    @classmethod
    async def close(cls, shared: Shared) -> None:
        """Stop the server, and end the processes of programs."""
        await shared.gateway.close()
        await shared.programs.close()

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Run the program on a task, and return the sequences that its requests have made.

        All sequences get the program's reward; without one, the reward agent scores them. It raises ``agent.program``
        if the program fails, is late or asks the model nothing.
        """
        context, shared = self.context, self.context.shared
        assert isinstance(shared, Shared), "a host gives what start returned"
        rollout = self._rollout = shared.gateway.open(context, sampling_params, fields)
        reason = "answered"
        try:
            try:
                await self._program(rollout, shared)
            except AgentError as error:
                reason = self._reason(rollout)
                if not reason:
                    raise
                context.event("program", error=str(error))
            reason = "aborted" if rollout.recording.is_aborted else reason
            if rollout.reward is None and self.config.reward_seconds:
                await self._wait_for_reward(rollout)
        finally:
            await self.finish()
        return self._output(rollout, reason)

    async def finish(self) -> None:
        """Close the rollout, and cancel its requests that still run."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            await self.context.shared.gateway.end(rollout)

    async def _program(self, rollout: Rollout, shared: Shared) -> None:
        context, seconds = self.context, self.config.seconds
        if seconds is not None:
            context = attrs.evolve(
                context, deadline=min(context.clock.time() + seconds, context.deadline or float("inf"))
            )
        running = shared.programs.run(rollout, context, shared.gateway)
        if seconds is None:
            await running
            return
        try:
            await context.clock.wait_for(running, seconds, f"the program of rollout {rollout.name}")
        except DeadlineExceeded as error:
            raise AgentError(
                "the program was late", code="agent.program", where=f"task {rollout.task}", found=error.message
            ) from error

    def _reason(self, rollout: Rollout) -> str:
        """Return why a rollout whose program failed is kept; empty: it is not."""
        recording = rollout.recording
        if recording.is_aborted:
            return "aborted"
        if recording.is_full and recording.turns:
            return "budget"
        return "failed" if self.config.on_failure == "keep" and recording.turns else ""

    async def _wait_for_reward(self, rollout: Rollout) -> None:
        waiting = f"the reward of rollout {rollout.name}"
        try:
            await self.context.clock.wait_for(rollout.rewarded.wait(), self.config.reward_seconds, waiting)
        except DeadlineExceeded:
            self.context.event("no_reward", seconds=self.config.reward_seconds)

    def _output(self, rollout: Rollout, reason: str) -> AgentLoopOutput:
        recording = rollout.recording
        sequences = recording.sequences()
        if not sequences and not recording.is_aborted:
            raise AgentError(
                "the program has asked the model nothing",
                code="agent.program",
                where=f"task {rollout.task}",
                expected="a request to the address and with the key that the program got",
                fix="let the program read OPENAI_BASE_URL and OPENAI_API_KEY, as OpenAI's client does",
            )
        if rollout.reward is not None:
            sequences = tuple(attrs.evolve(each, reward=rollout.reward) for each in sequences)
        counts = {"repeats": recording.repeats, "restarts": rollout.restarts, "sequences": len(sequences)}
        return AgentLoopOutput(
            sequences=sequences,
            num_turns=max(1, recording.turns),
            metrics={**{name: float(count) for name, count in counts.items()}, **rollout.metrics},
            tool_calls=tuple(attrs.asdict(call) for call in recording.calls),
            end_reason=reason,
        )


class GatewayImagesAgent(GatewayAgent):
    """The same agent for a model that sees: messages may have images."""

    shows_images = True
