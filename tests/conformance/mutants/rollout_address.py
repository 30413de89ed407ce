"""Mutants of a rollout server whose OpenAI-compatible address is wrong."""

from __future__ import annotations

from functools import partial

import attrs

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from mutants import harness
from mutants.rollout_server import ReferenceServer


class AddressIgnoresSeeds(ReferenceServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.request_id.startswith("openai"):
            request = attrs.evolve(request, sampling=attrs.evolve(request.sampling, seed=8))
        return await super().generate(request)


class AddressRoundsLogProbs(ReferenceServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        if request.request_id.startswith("openai"):
            result = attrs.evolve(result, log_probs=tuple(round(value, 1) for value in result.log_probs))
        return result


class AddressStaysOpen(ReferenceServer):
    async def close_address(self) -> None:
        return None


mutant = partial(harness.mutant, "rollout")

MUTANTS = (
    mutant(AddressIgnoresSeeds, "requests to the address draw with another seed", "110"),
    mutant(AddressRoundsLogProbs, "the address rounds log-probabilities", "110"),
    mutant(AddressStaysOpen, "the address goes on listening after stop", "111"),
)
