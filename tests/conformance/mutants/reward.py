"""A correct reward agent, and agents with one fault each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, ClassVar

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import RewardError
from mutants import harness
from mutants.harness import Reference

#: What mutants leave behind on purpose; the meta-test clears it.
LEAKED: list[Any] = []


@attrs.frozen(kw_only=True)
class Config:
    """The score of a right answer."""

    correct: float = 1.0


class ReferenceReward(RewardAgent):
    """Compares the last line of the answer with the ground truth.

    A ground truth ``broken`` cannot be scored; with ``slow`` a process is waited for that takes a minute.
    """

    version = "1"
    takes_turns = True
    keeps_deadlines = True

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        right = self.is_right(request)
        if request.ground_truth == "broken":
            return self.broken(request)
        if request.ground_truth == "slow":
            try:
                await self.until(self.slow(), request)
            except TimeoutError:
                return ScoreResult(status="timeout", error="too slow")
        await self.ask()
        return self.result(self.config.correct if right else 0.0, request)

    async def until(self, work: Awaitable[None], request: ScoreRequest) -> None:
        async with asyncio.timeout(request.deadline_seconds):
            await work

    async def ask(self) -> None:
        async with self.context.turn():
            await asyncio.sleep(0)

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """The share of other answers of the group that are longer."""
        lengths = [len(each.solution_str) for each in requests]
        return [self.ranked(lengths, at, each) for at, each in enumerate(requests)]

    def ranked(self, lengths: Sequence[int], at: int, request: ScoreRequest) -> ScoreResult:
        others = len(lengths) - 1 or 1
        return ScoreResult(score=sum(each > lengths[at] for each in lengths) / others)

    def is_right(self, request: ScoreRequest) -> bool:
        return request.solution_str.rstrip().rpartition("\n")[2] == request.ground_truth

    def broken(self, request: ScoreRequest) -> ScoreResult:
        raise RewardError("the ground truth is broken", where=request.idempotency_key)

    async def slow(self) -> None:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def result(self, score: float, request: ScoreRequest) -> ScoreResult:
        tokens = len(request.response_ids)
        token_scores = (*(0.0,) * (tokens - 1), score) if tokens else None
        return ScoreResult(score=score, token_scores=token_scores, metrics={"right": float(score > 0)})

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        """Each score less the mean of its group."""
        return self.less(scores, self.mean(scores))

    def mean(self, scores: Sequence[ScoreResult]) -> float:
        known = [each.score for each in scores if each.score is not None]
        return sum(known) / len(known) if known else 0.0

    def less(self, scores: Sequence[ScoreResult], mean: float) -> list[ScoreResult]:
        return [
            attrs.evolve(each, score=each.score - mean, token_scores=None) if each.score is not None else each
            for each in scores
        ]


class UndeclaredTokenScores(ReferenceReward):
    """It has no fault but its declaration."""


class Lenient(ReferenceReward):
    def is_right(self, request: ScoreRequest) -> bool:
        return bool(request.solution_str.strip())


class NotANumber(ReferenceReward):
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        result = await super().compute_score(request)
        return result if request.solution_str else attrs.evolve(result, score=float("nan"))


class ShortTokenScores(ReferenceReward):
    def result(self, score: float, request: ScoreRequest) -> ScoreResult:
        whole = super().result(score, request)
        return attrs.evolve(whole, token_scores=whole.token_scores[1:] if whole.token_scores else None)


class SilentFailure(ReferenceReward):
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        try:
            return await super().compute_score(request)
        except RewardError:
            raise
        except Exception:
            return ScoreResult(score=0.0)


class ZeroForBroken(ReferenceReward):
    def broken(self, request: ScoreRequest) -> ScoreResult:
        return self.result(0.0, request)


class ScoreAndFailure(ReferenceReward):
    def broken(self, request: ScoreRequest) -> ScoreResult:
        return ScoreResult(status="failed", score=0.0, error="the ground truth is broken")


class DiscountedRetry(ReferenceReward):
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        result = await super().compute_score(request)
        return result if request.retry == 0 else self.result((result.score or 0.0) / 2, request)


class KeyHeldForEver(ReferenceReward):
    def __init__(self, config: Any, context: RewardContext) -> None:
        super().__init__(config, context)
        self.running: set[str] = set()

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        if request.idempotency_key in self.running and request.retry > 0:
            return ScoreResult(status="failed", error="this sample is being scored")
        self.running.add(request.idempotency_key)
        result = await super().compute_score(request)
        self.running.discard(request.idempotency_key)
        return result


class SharedState(ReferenceReward):
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        self.request = request
        await asyncio.sleep(0)
        result = await super().compute_score(request)
        if result.status != "ok":
            return result
        return self.result(float(self.is_right(self.request)) * self.config.correct, request)


class DeafToCancellation(ReferenceReward):
    async def slow(self) -> None:
        try:
            await super().slow()
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 1)
            raise


class WorkGoesOn(ReferenceReward):
    async def slow(self) -> None:
        await asyncio.shield(asyncio.create_task(asyncio.sleep(60), name="the work that goes on"))


class ProcessGoesOn(ReferenceReward):
    async def slow(self) -> None:
        LEAKED.append(subprocess.Popen(["sleep", "60"]))
        await asyncio.Event().wait()


class OrphanGoesOn(ReferenceReward):
    async def slow(self) -> None:
        with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as process:
            process.stdout.readline()  # type: ignore[union-attr]
            try:
                await asyncio.Event().wait()
            finally:
                process.kill()


class BlocksTheLoop(ReferenceReward):
    async def slow(self) -> None:
        threading.Event().wait(0.05)
        raise RewardError("the answer took too long")


class LeavesASocket(ReferenceReward):
    async def start(self) -> None:
        LEAKED.extend(socket.socketpair())


class LeavesAProcess(ReferenceReward):
    async def start(self) -> None:
        LEAKED.append(subprocess.Popen(["sleep", "60"]))


class LeavesATask(ReferenceReward):
    async def start(self) -> None:
        self.heartbeat = asyncio.create_task(asyncio.sleep(60), name="heartbeat")


class ClosesOnce(ReferenceReward):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RewardError("the agent is closed")
        self.closed = True


class NeedsStart(ReferenceReward):
    async def start(self) -> None:
        self.open = True

    async def close(self) -> None:
        assert self.open


class SharedPool(ReferenceReward):
    open: ClassVar[bool] = False

    async def start(self) -> None:
        SharedPool.open = True

    async def close(self) -> None:
        SharedPool.open = False

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        if not SharedPool.open:
            raise RewardError("the pool is closed")
        return await super().compute_score(request)


class TakesFieldsAway(ReferenceReward):
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        request.extra_info.pop("conformance", None)  # type: ignore[attr-defined]
        return await super().compute_score(request)


class RefusesFields(ReferenceReward):
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        if "conformance_unknown" in request.extra_info:
            raise RewardError("unknown field")
        return await super().compute_score(request)


class AnswersInOrder(ReferenceReward):
    """Hands out answers in the order of the requests, as a worker does whose answers have no id."""

    def __init__(self, config: Any, context: RewardContext) -> None:
        super().__init__(config, context)
        self.answers: list[ScoreResult] = []

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        if request.ground_truth in ("broken", "slow"):
            return await super().compute_score(request)
        self.answers.append(self.result(self.config.correct if self.is_right(request) else 0.0, request))
        await asyncio.sleep(0)
        return self.answers.pop(0)


class DropsFailed(ReferenceReward):
    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        return super().post_process_scores([each for each in scores if each.status == "ok"])


class SortsGroups(ReferenceReward):
    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        return sorted(super().post_process_scores(scores), key=lambda each: each.score or 0.0)


class ZeroForFailed(ReferenceReward):
    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        return [each if each.status == "ok" else attrs.evolve(each, score=0.0) for each in scores]


class BaselineOfTheFirstGroup(ReferenceReward):
    baseline: float | None = None

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        if self.baseline is None:
            self.baseline = self.mean(scores)
        return self.less(scores, self.baseline)


class NoTokenScores(ReferenceReward):
    def result(self, score: float, request: ScoreRequest) -> ScoreResult:
        return attrs.evolve(super().result(score, request), token_scores=None)


class RefusesWhatItDoesNotKnow(ReferenceReward):
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        assert not request.tool_calls, "no tools are known"
        return await super().compute_score(request)


class CountsItsScores(ReferenceReward):
    calls = 0

    @property
    def version(self) -> str:  # type: ignore[override]
        return str(self.calls)

    def result(self, score: float, request: ScoreRequest) -> ScoreResult:
        self.calls += 1
        return super().result(score, request)


class LeavesOneOut(ReferenceReward):
    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        return list(await super().score_group(requests))[1:]


class PrefersTheFirst(ReferenceReward):
    def ranked(self, lengths: Sequence[int], at: int, request: ScoreRequest) -> ScoreResult:
        return attrs.evolve(super().ranked(lengths, at, request), score=1.0 / (at + 1))


class TakesNoTurn(ReferenceReward):
    async def ask(self) -> None:
        await asyncio.sleep(0)


class KeepsItsTurn(ReferenceReward):
    async def ask(self) -> None:
        turn = self.context.turn()
        await turn.__aenter__()
        LEAKED.append(turn)  # or it would end with the turn
        for _ in range(9):
            await asyncio.sleep(0)
        await turn.__aexit__(None, None, None)


class HasNoDeadline(ReferenceReward):
    async def until(self, work: Awaitable[None], request: ScoreRequest) -> None:
        await work


class NegativeCost(ReferenceReward):
    def result(self, score: float, request: ScoreRequest) -> ScoreResult:
        return attrs.evolve(super().result(score, request), tokens=-1)


REFERENCE = Reference(
    cls=ReferenceReward,
    config_class=Config,
    settings={"correct": 2.0},
    capabilities=dict.fromkeys(("post_process", "token_scores", "compares", "turns", "keeps_deadlines"), "full"),
    fixture={
        "examples": [
            {"solution_str": "It is\n4", "ground_truth": "4", "score": 2.0},
            {"solution_str": "It is\n3", "ground_truth": "4", "score": 0.0},
            {"solution_str": "7", "ground_truth": "7", "score": 2.0, "extra_info": {"level": 3}},
        ],
        "failing": [{"solution_str": "4", "ground_truth": "broken"}],
        "slow": [{"solution_str": "4", "ground_truth": "slow"}],
    },
)

mutant = partial(harness.mutant, "reward")

MUTANTS = harness.named(
    mutant(Lenient, "every answer is right", "010"),
    mutant(NotANumber, "an empty answer scores NaN with status ok", "011"),
    mutant(ShortTokenScores, "the token scores lack the first token", "011 032"),
    mutant(
        UndeclaredTokenScores,
        "token scores come from an agent that does not declare them",
        "011",
        capabilities=dict.fromkeys(("post_process", "compares", "turns", "keeps_deadlines"), "full"),
    ),
    mutant(SilentFailure, "an exception becomes a score of 0", "012"),
    mutant(ZeroForBroken, "a broken task scores 0", "012"),
    mutant(ScoreAndFailure, "a failure carries a score of 0", "012"),
    mutant(DiscountedRetry, "a second attempt earns half the score", "013 014"),
    mutant(KeyHeldForEver, "a cancelled attempt keeps its idempotency key", "014"),
    mutant(SharedState, "the request is kept in the agent over a wait", "015 050"),
    mutant(DeafToCancellation, "a cancelled call waits on for a while", "016"),
    mutant(WorkGoesOn, "a shielded task outlives the cancelled call", "016"),
    mutant(ProcessGoesOn, "the deadline leaves the process alive", "017"),
    mutant(OrphanGoesOn, "the deadline kills the process and not what that had started", "017"),
    mutant(BlocksTheLoop, "a slow score blocks the event loop", "018"),
    mutant(LeavesASocket, "close leaves a socket open", "019"),
    mutant(LeavesAProcess, "close leaves a process running", "019"),
    mutant(LeavesATask, "close leaves a task running", "019"),
    mutant(ClosesOnce, "a second close raises", "020"),
    mutant(NeedsStart, "close without start raises", "020"),
    mutant(SharedPool, "closing one agent closes the other", "021"),
    mutant(TakesFieldsAway, "extra_info of a request is changed", "022"),
    mutant(RefusesFields, "an unknown field of the task is refused", "023"),
    mutant(AnswersInOrder, "the answer of a cancelled call is given to the next one", "024 050"),
    mutant(DropsFailed, "post-processing drops failed runs", "030"),
    mutant(SortsGroups, "post-processing sorts the group", "030"),
    mutant(ZeroForFailed, "a failed run gets a score of 0", "030"),
    mutant(BaselineOfTheFirstGroup, "the first group's mean is taken off all groups", "031"),
    mutant(NoTokenScores, "declared token scores never come", "032"),
    mutant(NegativeCost, "a score costs less than nothing", "011"),
    mutant(RefusesWhatItDoesNotKnow, "a rollout with tool calls has no score", "025"),
    mutant(CountsItsScores, "the version changes with each score", "026"),
    mutant(LeavesOneOut, "the first of a group has no result", "027 033"),
    mutant(PrefersTheFirst, "an answer wins because it comes first", "033"),
    mutant(TakesNoTurn, "no turn is taken", "034"),
    mutant(KeepsItsTurn, "a cancelled call keeps its turn", "034"),
    mutant(HasNoDeadline, "the deadline is left to the host", "035"),
)
