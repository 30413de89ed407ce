"""The log-prob check of replicas: each generates a few tokens after an update, and the engine scores them.

Digests prove what lies in a replica's parameters. What it makes of them (packed copies, caches, kernels, numerics) only
shows in what it generates.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult, SamplingParams
from jackfield.clock import Clock
from jackfield.errors import WeightsError


@attrs.frozen
class ProbeAnswer:
    """What one replica generated with weights of ``version``."""

    replica: int
    version: int
    result: GenerateResult


@attrs.define(kw_only=True, eq=False)
class ReplicaProbe:
    """Has every replica generate a few tokens, and the engine score them."""

    prompt: Callable[[], Awaitable[Sequence[int]]]  #: its tokens; asked for once
    #: the engine's log-probs of each response's tokens, from a prompt and responses
    score: Callable[[Sequence[int], Sequence[Sequence[int]]], Awaitable[list[list[float]]]]
    clock: Clock
    tokens: int  #: that each replica generates
    temperature: float  #: of the engine's log-probs
    bound: float  #: of the mean distance of a replica's log-probs from the engine's, in nats
    stops: bool  #: whether a distance beyond the bound is an error; else it is a warning
    seconds: float  #: for all replicas to answer
    report: Callable[[float], None] = lambda _: None  #: gets the distance of the replica that is farthest away
    _prompt_ids: tuple[int, ...] = attrs.field(default=(), init=False)

    async def check(self, servers: Mapping[int, BaseRolloutServer], version: int) -> None:
        """Ask and compare, where engine and replicas can both work.

        Raises:
            WeightsError: as :meth:`compare`.
            DeadlineExceeded: a replica has not answered.
        """
        await self.compare(await self.ask(servers, version))

    async def ask(self, servers: Mapping[int, BaseRolloutServer], version: int) -> list[ProbeAnswer]:
        """Have every replica (by number) generate; one that has older weights refuses."""
        self._prompt_ids = self._prompt_ids or tuple(await self.prompt())
        sampling = SamplingParams(max_new_tokens=self.tokens, temperature=self.temperature, seed=0, ignore_eos=True)
        name, prompt = f"probe-{version}", self._prompt_ids
        request = GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling, minimum_weight_version=version)
        asked = asyncio.gather(*(server.generate(request) for server in servers.values()))
        results = await self.clock.wait_for(asked, self.seconds, f"replicas to answer the probe of version {version}")
        return [ProbeAnswer(number, version, result) for number, result in zip(servers, results, strict=True)]

    async def compare(self, answers: Sequence[ProbeAnswer]) -> None:
        """Score what replicas generated; the engine must have the weights that they had.

        Raises:
            WeightsError: ``weights.log-probs``, naming the replica that is farthest away, if it is beyond the bound.
        """
        scored = await self.score(self._prompt_ids, [answer.result.token_ids for answer in answers])
        compared = [
            (_distance(answer.result.log_probs, own), answer, own) for answer, own in zip(answers, scored, strict=True)
        ]
        distance, answer, own = max(compared, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
        self.report(distance)
        if distance <= self.bound:
            return
        error = WeightsError(
            f"replica {answer.replica} computes other log-probs than the engine, with weights of version "
            f"{answer.version}",
            code="weights.log-probs",
            where=f"replica {answer.replica}",
            expected=f"a mean distance of at most {self.bound:.3g} nats over {len(own)} tokens",
            found=f"{distance:.3g}: engine {_shown(own)}, replica {_shown(answer.result.log_probs)}",
            fix="raise log_prob_check.bound if these numerics are wanted, or set log_prob_check.on_mismatch: correct",
        )
        if self.stops:
            raise error
        logging.getLogger("jackfield").warning("%s (%s)", error.message, error.found)


def _distance(found: Sequence[float], expected: Sequence[float]) -> float:
    return sum(abs(one - other) for one, other in zip(found, expected, strict=True)) / len(expected)


def _shown(log_probs: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in log_probs[:4])
