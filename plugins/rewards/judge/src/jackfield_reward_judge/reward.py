"""The reward ``judge``: a language model as a judge, or several."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from typing import Any

import attrs
import msgspec

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import RewardError
from jackfield_reward_judge.asking import Judge, Verdict
from jackfield_reward_judge.combining import Vote, result_of
from jackfield_reward_judge.pairs import Comparison, pairs_of, results_of
from jackfield_reward_judge.parsing import PARSER_VERSION, Judgement
from jackfield_reward_judge.rubrics import Rubric
from jackfield_reward_judge.settings import JudgeRewardConfig
from jackfield_reward_requests import failed

_MOST_KEPT = 16_384  #: verdicts of samples that have no score yet


class JudgeReward(RewardAgent):
    """A reward that asks language models for scores, or compares the responses of a group in pairs.

    An answer that cannot be read is asked for once more, and then ``failed``, never a score. If some of several
    verdicts fail, a retry asks only for those. Metrics: the shares of ``repaired`` answers and ``inconsistent``
    comparisons, the ``spread`` between judges, and the numbers of failures.
    """

    def __init__(self, config: JudgeRewardConfig, context: RewardContext) -> None:
        super().__init__(config, context)
        self._judges = list[Judge]()
        for number, judge in enumerate(config.resolved):
            assert judge.rubric is not None
            rubric = Rubric.of(judge.rubric, config.pairwise is not None, context.seed, config.response_characters)
            name = str(judge.model) if len(config.resolved) == 1 else f"{number}-{judge.model}"
            self._judges.append(Judge(name, rubric, judge, config, context))
        self._kept = dict[str, Verdict]()
        self._version = None if any(judge.url is None for judge in config.resolved) else self._digest()

    @property
    def takes_turns(self) -> bool:
        """Each request takes a turn of its own."""
        return True

    @property
    def compares(self) -> bool:
        """Return whether responses are compared with their siblings."""
        return self.config.pairwise is not None

    @property
    def version(self) -> str | None:
        """A digest of rubrics, models and parser. A judge that is trained itself has none."""
        return self._version

    async def start(self) -> None:
        """Read the secrets and ask each API for its models."""
        await _all([judge.start() for judge in self._judges])

    async def close(self) -> None:
        """Close the connections."""
        for judge in self._judges:
            await judge.close()

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one response."""
        if self.compares:
            return (await self.score_group([request]))[0]
        places = [(judge, sample) for judge in self._judges for sample in range(self.config.samples)]
        asked = [self._verdict(judge, request, f"{judge.name}/{sample}") for judge, sample in places]
        verdicts = await _all(asked)
        votes = []
        for (judge, sample), verdict in zip(places, verdicts, strict=True):
            name = judge.name if self.config.samples == 1 else f"{judge.name}/{sample}"
            judgement = verdict.judgement
            votes.append(Vote(name, verdict, None if judgement is None else judge.rubric.total(judgement.scores)))
        result = result_of(votes, self.config)
        if result.status == "ok":
            self._forget(request, [f"{judge.name}/{sample}" for judge, sample in places])
        return result

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Score the responses of a group, by comparisons in pairs if the setting ``pairwise`` is given.

        A response without siblings is compared with the ground truth.
        """
        config: JudgeRewardConfig = self.config
        if config.pairwise is None or not requests:
            return await super().score_group(requests)
        texts = [request.solution_str for request in requests]
        if len(texts) == 1:
            if not requests[0].ground_truth:
                return [failed(_alone(requests[0]))]
            texts.append(requests[0].ground_truth)
        seed = f"{self.context.seed}/{requests[0].group_id}"
        asked = [
            (pair, judge, sample)
            for pair in pairs_of(len(texts), config.pairwise, seed)
            for judge in self._judges
            for sample in range(config.samples)
        ]
        verdicts = await _all([each for place in asked for each in self._both(requests, texts, *place)])
        comparisons = [
            Comparison(pair=pair, forwards=verdicts[2 * n], backwards=verdicts[2 * n + 1])
            for n, (pair, _, _) in enumerate(asked)
        ]
        results = results_of(len(texts), comparisons, config)[: len(requests)]
        if all(result.status == "ok" for result in results):
            for pair, judge, sample in asked:
                self._forget(requests[pair[0]], _keys(pair, judge, sample))
        return results

    def _both(
        self, requests: Sequence[ScoreRequest], texts: Sequence[str], pair: tuple[int, int], judge: Judge, sample: int
    ) -> list[Awaitable[Verdict]]:
        """Ask for a pair in both orders."""
        first, second = texts[pair[0]], texts[pair[1]]
        orders = zip(_keys(pair, judge, sample), [(first, second), (second, first)], strict=True)
        return [self._verdict(judge, requests[pair[0]], key, order) for key, order in orders]

    async def _verdict(
        self, judge: Judge, request: ScoreRequest, key: str, pair: tuple[str, str] | None = None
    ) -> Verdict:
        """Return the verdict of an earlier try that failed or was cancelled, if the same was asked, or ask."""
        if pair is not None and pair[0] == pair[1]:
            return Verdict(judgement=Judgement(scores={}, winner="tie", explanation="both are the same text"))
        place = self._place(request, key)
        kept = self._kept.get(place) if request.retry > 0 else None
        if kept is not None and kept.messages == judge.rubric.messages(request, pair):
            return attrs.evolve(kept, tokens=0, seconds=0.0)  # it was paid for by that try
        verdict = await judge.verdict(request, f"{request.idempotency_key}/{key}", pair)
        if verdict.error is None:
            self._kept[place] = verdict
            if len(self._kept) > _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))  # the oldest
        return verdict

    def _forget(self, request: ScoreRequest, keys: Sequence[str]) -> None:
        for key in keys:
            self._kept.pop(self._place(request, key), None)

    @staticmethod
    def _place(request: ScoreRequest, key: str) -> str:
        return f"{request.idempotency_key}\n{key}"

    def _digest(self) -> str:
        texts = [judge.rubric.text for judge in self._judges]
        content = msgspec.json.encode(
            [PARSER_VERSION, texts, self.context.seed, attrs.asdict(self.config)], order="sorted"
        )
        return hashlib.sha256(content).hexdigest()[:16]


def _keys(pair: tuple[int, int], judge: Judge, sample: int) -> list[str]:
    first, second = pair
    return [f"{judge.name}/{sample}/{first}-{second}", f"{judge.name}/{sample}/{second}-{first}"]


async def _all(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all of them; an error, or a cancellation, ends the others before it is raised."""
    if len(awaitables) == 1:
        return [await awaitables[0]]
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if unfinished := [task for task in tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)


def _alone(request: ScoreRequest) -> RewardError:
    return RewardError(
        "a response has no siblings and no ground truth to be compared with",
        code="reward.template",
        where=request.idempotency_key or None,
        expected="a group, or a ground truth",
        found="neither",
        fix="give the task a ground truth, or score single responses with a rubric without pairwise",
    )
