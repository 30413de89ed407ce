"""Mutants of a rollout server that draw, report or end wrongly, or let pass what is to be refused."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from jackfield.abc.rollout import (
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    UpdateWeightsRequest,
    WeightReceipt,
)
from jackfield.errors import RolloutError
from mutants import harness
from mutants.rollout_server import Job, ReferenceServer


class CutsIds(ReferenceServer):
    def result(self, job: Job) -> GenerateResult:
        result = super().result(job)
        return attrs.evolve(result, request_id=result.request_id.partition(" ")[0])


class GreedyIsNearlyGreedy(ReferenceServer):
    def draw(self, job: Job, logits: Tensor) -> tuple[int, float]:
        sampling = job.request.sampling
        if sampling.temperature or len(job.request.prompt_ids) < 30:
            return super().draw(job, logits)
        token = self.invert((logits / 0.5).softmax(-1), random.Random(f"{job.tokens}").random())
        return token, float(logits.log_softmax(-1)[token])


class TokenisesPromptsAgain(ReferenceServer):
    def prompt(self, request: GenerateRequest) -> tuple[int, ...]:
        return tuple(self.tokenizer()(self.text(list(request.prompt_ids)))["input_ids"])


class ShiftsLogProbs(ReferenceServer):
    """Each sampled token has the log-probability of the one before."""

    def draw(self, job: Job, logits: Tensor) -> tuple[int, float]:
        token, log_prob = super().draw(job, logits)
        sampling, last = job.request.sampling, self.__dict__.setdefault("last", {})
        before, last[job] = last.get(job, log_prob), log_prob
        plain = sampling.temperature == 1 and sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0
        return token, before if plain and sampling.log_probs == "processed" else log_prob


class LogProbsIgnoreTemperature(ReferenceServer):
    def draw(self, job: Job, logits: Tensor) -> tuple[int, float]:
        sampling = job.request.sampling
        token, log_prob = super().draw(job, logits)
        if sampling.temperature and sampling.log_probs == "processed":
            unscaled = attrs.evolve(sampling, temperature=1.0)
            if (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0):
                log_prob = float(self.processed(logits, unscaled)[token])
        return token, log_prob


class RawIsProcessed(ReferenceServer):
    def draw(self, job: Job, logits: Tensor) -> tuple[int, float]:
        token, log_prob = super().draw(job, logits)
        sampling = job.request.sampling
        return token, float(self.processed(logits, sampling)[token]) if sampling.temperature else log_prob


class IgnoresTopK(ReferenceServer):
    def top_k(self, logits: Tensor, k: int) -> Tensor:
        return logits


class TopKOfOneIsOff(ReferenceServer):
    def top_k(self, logits: Tensor, k: int) -> Tensor:
        return super().top_k(logits, k) if k > 1 else logits


class IgnoresTopP(ReferenceServer):
    def top_p(self, logits: Tensor, p: float) -> Tensor:
        return logits


class TopPLeavesLess(ReferenceServer):
    """The token that crosses the threshold is left out, unless it is the only one."""

    def top_p(self, logits: Tensor, p: float) -> Tensor:
        ordered, order = logits.softmax(-1).sort(descending=True)
        dropped = ordered.cumsum(-1) >= p
        dropped[0] = False
        return logits.index_fill(0, order[dropped], -torch.inf)


class IgnoresMinP(ReferenceServer):
    def min_p(self, logits: Tensor, p: float) -> Tensor:
        return logits


class MinPIsAbsolute(ReferenceServer):
    def min_p(self, logits: Tensor, p: float) -> Tensor:
        probabilities = logits.softmax(-1)
        return logits.masked_fill(probabilities < min(p, float(probabilities.max())), -torch.inf)


class FiltersBeforeTemperature(ReferenceServer):
    def processed(self, logits: Tensor, sampling: SamplingParams) -> Tensor:
        filtered = super().processed(logits, attrs.evolve(sampling, temperature=1.0))
        return (filtered / sampling.temperature).log_softmax(-1)


class TopPBeforeTopK(ReferenceServer):
    def processed(self, logits: Tensor, sampling: SamplingParams) -> Tensor:
        if sampling.top_k and sampling.top_p < 1:
            scaled = self.top_p(logits / sampling.temperature, sampling.top_p) * sampling.temperature
            sampling = attrs.evolve(sampling, top_p=1.0)
            return super().processed(scaled, sampling)
        return super().processed(logits, sampling)


class DrawsSharper(ReferenceServer):
    def invert(self, probabilities: Tensor, uniform: float) -> int:
        return super().invert(probabilities**1.6, uniform)


class HasOneRandomNumber(ReferenceServer):
    def uniform(self, job: Job) -> float:
        return random.Random(f"{job.seed}").random()


class IgnoresSeeds(ReferenceServer):
    def seed_of(self, sampling: SamplingParams) -> int:
        return super().seed_of(attrs.evolve(sampling, seed=None))


class MixesTheReplicaIn(ReferenceServer):
    def seed_of(self, sampling: SamplingParams) -> int:
        return super().seed_of(sampling) + self.context.replica


class SeedsDependOnNeighbours(ReferenceServer):
    def uniform(self, job: Job) -> float:
        return random.Random(f"{job.seed} {len(job.tokens)} {len(self.jobs)}").random()


class SeedsHave32Bits(ReferenceServer):
    def seed_of(self, sampling: SamplingParams) -> int:
        return super().seed_of(sampling) & 0xFFFFFFFF if sampling.seed is not None else super().seed_of(sampling)


class UnseededRepeats(ReferenceServer):
    def seed_of(self, sampling: SamplingParams) -> int:
        return self.context.seed if sampling.seed is None else sampling.seed


class IgnoresTheReplicasSeed(ReferenceServer):
    def seed_of(self, sampling: SamplingParams) -> int:
        self.count += 1
        return self.count if sampling.seed is None else sampling.seed


class DrawsAfresh(ReferenceServer):
    def seed_of(self, sampling: SamplingParams) -> int:
        return random.SystemRandom().getrandbits(60) if sampling.seed is None else sampling.seed


class PaddingIsSeen(ReferenceServer):
    """Where six run together, shorter prompts are padded, and nothing masks that."""

    def logits(self, job: Job) -> Tensor:
        lengths = [len(other.request.prompt_ids) for other in self.jobs.values()]
        padding = max(lengths) - len(job.request.prompt_ids) if len(lengths) > 5 else 0
        logits: Tensor = self.model((0,) * padding + (*job.request.prompt_ids, *job.tokens))
        return logits


class DropsTheStopToken(ReferenceServer):
    def end(self, job: Job) -> None:
        if job.reason == "stop" and job.tokens[-1] in job.request.sampling.stop_token_ids:
            for values in (job.tokens, job.log_probs, job.versions):
                values.pop()
        super().end(job)


class KnowsOneStopToken(ReferenceServer):
    def reason(self, job: Job) -> Literal["stop", "length"] | None:
        first = job.request.sampling.stop_token_ids[:1]
        sampling = attrs.evolve(job.request.sampling, stop_token_ids=first)
        return super().reason(attrs.evolve(job, request=attrs.evolve(job.request, sampling=sampling)))


class IgnoresTheEnd(ReferenceServer):
    def reason(self, job: Job) -> Literal["stop", "length"] | None:
        sampling = attrs.evolve(job.request.sampling, ignore_eos=True)
        return super().reason(attrs.evolve(job, request=attrs.evolve(job.request, sampling=sampling)))


class NeverIgnoresTheEnd(ReferenceServer):
    """Greedy decoding ends with the model's end token whatever the request says."""

    def reason(self, job: Job) -> Literal["stop", "length"] | None:
        greedy = job.request.sampling.temperature == 0
        return "stop" if greedy and job.tokens[-1] == self.model.settings.eos_token_id else super().reason(job)


class IgnoringTheEndIgnoresStops(ReferenceServer):
    def reason(self, job: Job) -> Literal["stop", "length"] | None:
        sampling = job.request.sampling
        if sampling.ignore_eos and self.model.settings.eos_token_id in job.tokens:
            sampling = attrs.evolve(sampling, stop_token_ids=())
        return super().reason(attrs.evolve(job, request=attrs.evolve(job.request, sampling=sampling)))


class OneIsTwo(ReferenceServer):
    def budget(self, job: Job) -> int:
        return min(max(job.request.sampling.max_new_tokens, 2), self.limit - len(job.request.prompt_ids))


class LongerThanTheModel(ReferenceServer):
    def budget(self, job: Job) -> int:
        return job.request.sampling.max_new_tokens


class IgnoresStopStrings(ReferenceServer):
    def text(self, tokens: list[int]) -> str:
        return ""


class StopStringsAreTokens(ReferenceServer):
    def text(self, tokens: list[int]) -> str:
        return super().text(tokens[-1:])


class StopsInThePrompt(ReferenceServer):
    def reason(self, job: Job) -> Literal["stop", "length"] | None:
        reason = super().reason(job)
        text = super().text(list(job.request.prompt_ids))
        return "stop" if any(string in text for string in job.request.sampling.stop) else reason


class TakesEmptyPrompts(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        return super().submit(attrs.evolve(request, prompt_ids=request.prompt_ids or (0,)))


class CutsLongPrompts(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        if self.model is None:
            return super().submit(request)
        return super().submit(attrs.evolve(request, prompt_ids=request.prompt_ids[1 - self.limit :]))


class WrapsIds(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        return super().submit(attrs.evolve(request, prompt_ids=tuple(token % 64 for token in request.prompt_ids)))


class RefusalsEndAll(ReferenceServer):
    def refuse(self, name: str, found: str) -> None:
        for job in list(self.jobs.values()):
            if job.request.request_id != name:
                self.end_early(job)
        super().refuse(name, found)


class RefusesWithoutAName(ReferenceServer):
    def refuse(self, name: str, found: str) -> None:
        raise RolloutError("a request cannot be generated", code="rollout.request", found=found)


class BendsSampling(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        sampling = request.sampling
        with attrs.validators.disabled():
            bent = attrs.evolve(sampling, top_p=min(sampling.top_p, 1.0), min_p=max(sampling.min_p, 0.0))
        return super().submit(attrs.evolve(request, sampling=bent))


class TakesNegativeTemperatures(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        sampling = request.sampling
        if sampling.temperature < 0:
            sampling = attrs.evolve(sampling, temperature=0.0)
        return super().submit(attrs.evolve(request, sampling=sampling))


class TakesTinyTemperatures(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        if 0 < request.sampling.temperature < 0.01:
            request = attrs.evolve(request, sampling=attrs.evolve(request.sampling, temperature=0.0))
        return super().submit(request)


class SharesTheTemperature(ReferenceServer):
    def step(self, job: Job) -> None:
        if job.request.sampling.temperature >= 50:
            for other in list(self.jobs.values()):
                if other is not job:
                    self.end_early(other)
        super().step(job)


class ReplacesRequests(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        running = self.jobs.get(request.request_id)
        if running is not None:
            self.end_early(running)
        return super().submit(request)


class IgnoresImages(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        return super().submit(attrs.evolve(request, multi_modal_data={}))


class TakesDeltas(ReferenceServer):
    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        return await super().update_weights(attrs.evolve(request, kind=request.kind.replace("delta", "full")))


class StreamsDrawAnew(ReferenceServer):
    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        sampling = request.sampling
        if sampling.seed is not None and not self.jobs:
            with attrs.validators.disabled():  # out of range: the reference refuses it by name
                request = attrs.evolve(request, sampling=attrs.evolve(sampling, seed=sampling.seed + 1))
        async for chunk in super().generate_stream(request):
            yield chunk


class StreamsEndSilently(ReferenceServer):
    def chunk(self, job: Job, first: int) -> GenerateChunk:
        chunk = super().chunk(job, first)
        return attrs.evolve(chunk, finish_reason=None) if chunk.finish_reason == "length" else chunk


class StreamsInLumps(ReferenceServer):
    def emit(self, job: Job) -> None:
        if job.reason is not None or len(job.tokens) % 12 == 0:
            sent: Any = self.__dict__.setdefault("sent", {})
            job.chunks.put_nowait(self.chunk(job, sent.get(id(job), 0)))
            sent[id(job)] = len(job.tokens)

    def end(self, job: Job) -> None:
        self.__dict__.get("sent", {}).pop(id(job), None)
        super().end(job)

    def end_early(self, job: Job) -> None:
        job.reason = "abort"
        self.emit(job)
        self.end(job)


mutant = partial(harness.mutant, "rollout")

MUTANTS = (
    mutant(CutsIds, "the result's request id ends at the first space", "010"),
    mutant(GreedyIsNearlyGreedy, "after long prompts, greedy decoding draws at temperature 0.5", "011"),
    mutant(TokenisesPromptsAgain, "the prompt is turned into text and tokenised again", "012"),
    mutant(ShiftsLogProbs, "a token has the log-probability of the one before", "013 072"),
    mutant(LogProbsIgnoreTemperature, "processed log-probabilities are those of temperature 1", "014"),
    mutant(RawIsProcessed, "raw log-probabilities are processed", "015"),
    mutant(IgnoresTopK, "top_k is ignored", "016 019"),
    mutant(TopKOfOneIsOff, "top_k=1 is taken for off", "016"),
    mutant(IgnoresTopP, "top_p is ignored", "017 019"),
    mutant(TopPLeavesLess, "top_p leaves the token out that crosses the threshold", "017 019"),
    mutant(IgnoresMinP, "min_p is ignored", "018 019"),
    mutant(MinPIsAbsolute, "min_p is not relative to the most probable token", "018 019"),
    mutant(FiltersBeforeTemperature, "the temperature is applied after the filters", "019"),
    mutant(TopPBeforeTopK, "top-p is applied before top-k", "019"),
    mutant(DrawsSharper, "tokens are drawn from a sharper distribution than is reported", "020"),
    mutant(HasOneRandomNumber, "all tokens of a request are drawn with one random number", "020"),
    mutant(IgnoresSeeds, "seeds are ignored", "021 022 050 058 110"),
    mutant(MixesTheReplicaIn, "a seed yields other tokens on another replica", "021"),
    mutant(SeedsDependOnNeighbours, "random numbers depend on how many requests run", "022"),
    mutant(SeedsHave32Bits, "seeds are cut to 32 bits", "023"),
    mutant(UnseededRepeats, "requests without a seed all draw the same", "023"),
    mutant(IgnoresTheReplicasSeed, "the replica's seed is ignored", "024"),
    mutant(DrawsAfresh, "requests without a seed cannot be repeated", "024"),
    mutant(PaddingIsSeen, "shorter prompts of a batch see padding", "025"),
    mutant(DropsTheStopToken, "the stop token is left out", "030 032"),
    mutant(KnowsOneStopToken, "all stop tokens but the first are ignored", "030"),
    mutant(IgnoresTheEnd, "the model's end token does not end", "031"),
    mutant(NeverIgnoresTheEnd, "ignore_eos is ignored", "011 025 032 059"),
    mutant(IgnoringTheEndIgnoresStops, "past an ignored end token, stop tokens do not end", "032"),
    mutant(OneIsTwo, "a limit of one token yields two", "033"),
    mutant(LongerThanTheModel, "max_model_len does not end a request", "034"),
    mutant(IgnoresStopStrings, "stop strings are ignored", "035"),
    mutant(StopStringsAreTokens, "a stop string is found only within one token", "035"),
    mutant(StopsInThePrompt, "a stop string in the prompt ends the response", "035"),
    mutant(TakesEmptyPrompts, "an empty prompt is padded", "036"),
    mutant(CutsLongPrompts, "a prompt that is too long is cut", "036"),
    mutant(WrapsIds, "ids out of the vocabulary are wrapped", "037"),
    mutant(RefusalsEndAll, "a refused request ends the running ones", "037"),
    mutant(RefusesWithoutAName, "refusals do not name the request", "036 037 038 039"),
    mutant(BendsSampling, "sampling parameters are bent into range", "038"),
    mutant(TakesNegativeTemperatures, "a negative temperature is taken for greedy", "038"),
    mutant(TakesTinyTemperatures, "a temperature that no float32 holds is taken for greedy", "038"),
    mutant(SharesTheTemperature, "a high temperature ends the requests beside it", "041"),
    mutant(ReplacesRequests, "a request with the id of a running one replaces it", "039"),
    mutant(IgnoresImages, "inputs beside tokens are ignored", "040"),
    mutant(
        TakesDeltas,
        "a delta is loaded as if it were the weights",
        "040",
        capabilities={"sleep": "full", "stop_strings": "full", "weights_adapter": "full", "openai": "full"},
    ),
    mutant(StreamsDrawAnew, "a stream draws other tokens than generate", "050"),
    mutant(StreamsEndSilently, "the last chunk has no finish reason", "050"),
    mutant(StreamsInLumps, "a stream yields 12 tokens at a time", "051"),
)
