import itertools

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, SamplingParams
from jackfield.errors import DataError

numbers = itertools.count()


@attrs.frozen(kw_only=True)
class Config:
    tries: int = 2


class PatientAgent(AgentLoopBase):
    """Asks until there is a final line, ``config.tries`` times at most, while tokens are left; the last counts."""

    async def run(self, sampling_params, **fields):
        prompt, sampling = self.context.tokenizer.encode_chat(fields["messages"]), SamplingParams(**sampling_params)
        if len(prompt) > (self.context.max_prompt_tokens or len(prompt)):
            raise DataError("the prompt is too long", code="data.prompt-too-long")
        stops, left = {*sampling.stop_token_ids, *self.context.tokenizer.end_token_ids}, sampling.max_new_tokens
        for attempt in range(self.config.tries):
            seed = None if sampling.seed is None else sampling.seed + attempt
            again = attrs.evolve(sampling, seed=seed, max_new_tokens=left, stop_token_ids=tuple(sorted(stops)))
            name = f"{self.context.request_prefix}/patient/{next(numbers)}"
            answer = await self.context.generate(GenerateRequest(request_id=name, prompt_ids=prompt, sampling=again))
            left -= len(answer.token_ids)
            if "####" in self.context.tokenizer.decode(answer.token_ids) or answer.finish_reason == "abort" or left < 1:
                break
        if not answer.token_ids:
            return AgentLoopOutput(sequences=())
        sequence = AgentSequence(
            prompt_ids=prompt,
            response_ids=answer.token_ids,
            response_mask=(1,) * len(answer.token_ids),
            response_log_probs=answer.log_probs,
            weight_versions=answer.weight_versions,
            finish_reason=answer.finish_reason,
        )
        return AgentLoopOutput(sequences=(sequence,), metrics={"tries": attempt + 1})
