"""Mutants of a rollout server that are controlled, updated, put to sleep or stopped wrongly."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from contextlib import aclosing
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    HealthReport,
    PauseRequest,
    PauseResult,
    ResumeRequest,
    ResumeResult,
    ServerInfo,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WeightReceipt,
    WorkerReceipt,
)
from jackfield.errors import DeadlineExceeded, JackfieldError, RolloutError, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver
from jackfield.sdk.slices import SliceReceiver
from mutants import harness
from mutants.rollout_server import Job, Model, ReferenceServer


class ClosedStreamsGoOn(ReferenceServer):
    def close_stream(self, job: Job) -> None:
        return


class NamesTheUnknown(ReferenceServer):
    async def abort(self, request: AbortRequest) -> AbortResult:
        result = await super().abort(request)
        return AbortResult(request_ids=tuple({*result.request_ids, *request.request_ids}))


class AbortedHaveNothing(ReferenceServer):
    def end_early(self, job: Job) -> None:
        super().end_early(job)
        for values in (job.tokens, job.log_probs, job.versions):
            values.clear()


class AbortsLeaveWaiting(ReferenceServer):
    async def abort(self, request: AbortRequest) -> AbortResult:
        names = request.request_ids or tuple(self.admitted)
        return await super().abort(AbortRequest(request_ids=names)) if names else AbortResult(request_ids=())


class AbortedGoOn(ReferenceServer):
    """The caller has his result; the decode loop goes on with the request."""

    def end_early(self, job: Job) -> None:
        super().end_early(job)
        again = attrs.evolve(job, tokens=list(job.tokens), log_probs=[], versions=[])
        again.reason, again.chunks, again.ended = None, asyncio.Queue(), asyncio.Event()
        self.__dict__.setdefault("zombies", []).append(again)

    def step(self, job: Job) -> None:
        super().step(job)
        if job.request.request_id not in self.jobs:
            self.admitted.discard(job.request.request_id)

    def batch(self) -> list[Job]:
        zombies = [job for job in self.__dict__.get("zombies", []) if job.reason is None]
        return super().batch() + zombies

    async def abort(self, request: AbortRequest) -> AbortResult:
        result = await super().abort(request)
        self.work.set()
        return result


class CancelledGoOn(ReferenceServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        job = self.submit(request)
        await job.ended.wait()
        return self.result(job)


class PausesOneStepLate(ReferenceServer):
    late = False

    async def pause(self, request: PauseRequest) -> PauseResult:
        result = await super().pause(request)
        self.late = bool(self.admitted)
        self.work.set()
        return result

    def runnable(self) -> bool:
        if self.late and self.paused and self.admitted and not self.stopped:
            self.late = False
            return True
        return super().runnable()

    def batch(self) -> list[Job]:
        return [job for job in super().batch() if not self.paused or job.request.request_id in self.admitted]


class ResumesWithAFreshBudget(ReferenceServer):
    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.spent: dict[str, int] = {}

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        self.spent = {name: len(self.jobs[name].tokens) for name in self.admitted}
        return await super().resume(request)

    def budget(self, job: Job) -> int:
        return super().budget(job) + self.spent.get(job.request.request_id, 0)


class WaitsForNobody(ReferenceServer):
    async def pause(self, request: PauseRequest) -> PauseResult:
        return await super().pause(PauseRequest(mode="keep") if request.mode == "wait" else request)


class DrainsWithNewOnes(ReferenceServer):
    def batch(self) -> list[Job]:
        return list(self.jobs.values())


class KeepsWhatItShouldAbort(ReferenceServer):
    async def abort_running(self) -> None:
        return


class HidesWaiting(ReferenceServer):
    async def health(self) -> HealthReport:
        return attrs.evolve(await super().health(), waiting=0)


class CountsPauses(ReferenceServer):
    depth = 0

    async def pause(self, request: PauseRequest) -> PauseResult:
        self.depth += 1
        return await super().pause(request)

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        self.depth = max(self.depth - 1, 0)
        return ResumeResult() if self.depth else await super().resume(request)


class StaleWeightsReportedFresh(ReferenceServer):
    """Nothing is loaded; version and digests are what was sent."""

    def load(self, received: dict[str, Tensor], request: UpdateWeightsRequest) -> dict[str, str]:
        self.check_names(received, self.model.state)
        if any(tensor.shape != self.model.state[name].shape for name, tensor in received.items()):
            raise WeightsError("model.norm.weight has another shape")
        return {name: digest(tensor) for name, tensor in received.items()}


class PartsAreNotLoaded(ReferenceServer):
    async def receive_parts(self, receiver: SliceReceiver, request: UpdateWeightsRequest) -> dict[str, str]:
        async with aclosing(receiver.tensors(request.version)) as tensors:
            async for _ in tensors:
                pass
        return receiver.digests


class SignsForPartsAsAWhole(ReferenceServer):
    async def receive_parts(self, receiver: SliceReceiver, request: UpdateWeightsRequest) -> dict[str, str]:
        await super().receive_parts(receiver, request)
        return {name: digest(tensor) for name, tensor in self.model.state.items()}


class LosesATensorOfLaterUpdates(ReferenceServer):
    """The embedding, which is the output layer, too, is taken once."""

    def copy(self, target: Tensor, tensor: Tensor) -> None:
        if target is self.model.state["model.embed_tokens.weight"] and self.version > 0:
            return
        super().copy(target, tensor)


class SignsForAnother(ReferenceServer):
    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        return attrs.evolve(await super().update_weights(request), replica=0)


class SignsForLess(ReferenceServer):
    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        receipt = await super().update_weights(request)
        if request.kind != "full" or request.deltas_follow:
            return receipt
        digests = {name: value for name, value in receipt.workers[0].digests.items() if "layernorm" not in name}
        return attrs.evolve(receipt, workers=(WorkerReceipt(worker=0, digests=digests),))


class PausesLongerThanItUpdates(ReferenceServer):
    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        receipt = await super().update_weights(request)
        return attrs.evolve(receipt, paused_seconds=receipt.seconds + 1)


class RunningRequestsKeepTheirWeights(ReferenceServer):
    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.models: dict[int, Model] = {}

    def logits(self, job: Job) -> Tensor:
        if id(job) not in self.models:
            own = copy.copy(self.model)
            own.state = {name: tensor.clone() for name, tensor in self.model.state.items()}
            self.models[id(job)] = own
        logits: Tensor = self.models[id(job)]((*job.request.prompt_ids, *job.tokens))
        return logits

    def drop(self, job: Job) -> None:
        self.models.pop(id(job), None)
        super().drop(job)


class VersionsAreOfTheRequest(ReferenceServer):
    def chunk(self, job: Job, first: int) -> GenerateChunk:
        chunk = super().chunk(job, first)
        return attrs.evolve(chunk, weight_versions=tuple(job.versions[:1]) * len(chunk.token_ids))


class UpdatesResume(ReferenceServer):
    def enter(self, request: UpdateWeightsRequest) -> None:
        super().enter(request)
        self.paused = False


class IgnoresMinimumVersions(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        return super().submit(attrs.evolve(request, minimum_weight_version=None))


class WantsNewerThanTheMinimum(ReferenceServer):
    def submit(self, request: GenerateRequest) -> Job:
        minimum = request.minimum_weight_version
        return super().submit(attrs.evolve(request, minimum_weight_version=minimum and minimum + 1))


class DropsAdapters(ReferenceServer):
    def load_adapter(self, received: dict[str, Tensor], request: UpdateWeightsRequest) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in received.items()}


class DoesNotScaleAdapters(ReferenceServer):
    def scale(self, config: Any) -> float:
        return 1.0


class AddsAdaptersUp(ReferenceServer):
    def load_adapter(self, received: dict[str, Tensor], request: UpdateWeightsRequest) -> dict[str, str]:
        self.bases = {}
        return super().load_adapter(received, request)


class QuantisesAtTheStartAlone(ReferenceServer):
    def cast(self, name: str, tensor: Tensor) -> Tensor:
        return super().cast(name, tensor) if self.task is None else tensor


class QuantisesWithoutScales(ReferenceServer):
    def float8_scale(self, tensor: Tensor) -> Tensor:
        return torch.ones(())


class SignsForTheQuantised(ReferenceServer):
    def digests(self, received: dict[str, Tensor]) -> dict[str, str]:
        return {name: digest(self.model.state[name]) for name in received}


class LoadsNoDelta(ReferenceServer):
    async def receive_delta(self, receiver: WeightReceiver, request: UpdateWeightsRequest) -> dict[str, str]:
        changes = await receiver.changes(request.connect[0], request.version, request.base_version)
        digests = self.held.unchanged(changes)
        for _ in self.held.apply(changes, request.version, digests):
            pass
        return digests


class SignsForChangesAlone(ReferenceServer):
    async def receive_delta(self, receiver: WeightReceiver, request: UpdateWeightsRequest) -> dict[str, str]:
        digests = await super().receive_delta(receiver, request)
        names = [name for name in digests if "layernorm" not in name]
        return {name: digests[name] for name in names}


class TakesAnyBase(ReferenceServer):
    def check_base(self, request: UpdateWeightsRequest) -> None:
        self.held.version = request.base_version


class RefusesOnlyAfterwards(ReferenceServer):
    """A delta is refused when it has begun: what runs has failed by then."""

    def check_base(self, request: UpdateWeightsRequest) -> None:
        return


class GoesBack(ReferenceServer):
    async def receive(self, request: UpdateWeightsRequest) -> dict[str, str]:
        self.version = 0
        return await super().receive(request)


class MissesNothing(ReferenceServer):
    def check_names(self, received: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        super().check_names({**dict.fromkeys(state, torch.zeros(0)), **received}, state)


class DropsTheUnknown(ReferenceServer):
    def load(self, received: dict[str, Tensor], request: UpdateWeightsRequest) -> dict[str, str]:
        known = {name: tensor for name, tensor in received.items() if name in self.model.state}
        return super().load(known, request)


class BroadcastsTensors(ReferenceServer):
    def load(self, received: dict[str, Tensor], request: UpdateWeightsRequest) -> dict[str, str]:
        state = self.model.state
        for name, tensor in received.items():
            if name in state and tensor.shape == (1,):
                received[name] = tensor.expand(state[name].shape).clone()
        return super().load(received, request)


class SwallowsBrokenTransfers(ReferenceServer):
    async def receive(self, request: UpdateWeightsRequest) -> dict[str, str]:
        try:
            return await super().receive(request)
        except WeightsError as error:
            if "broke off" in str(error):
                return {}
            raise


class SwallowsDeadlines(ReferenceServer):
    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        try:
            return await super().update_weights(request)
        except DeadlineExceeded:
            return WeightReceipt(version=request.version, replica=self.context.replica, workers=())


class WaitsForEver(ReferenceServer):
    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        return await super().update_weights(attrs.evolve(request, deadline_seconds=1e6))


class ServesOn(ReferenceServer):
    def become_stale(self, reason: str) -> None:
        return


class SaysThatItIsHealthy(ReferenceServer):
    async def health(self) -> HealthReport:
        health = await super().health()
        return attrs.evolve(health, healthy=health.healthy or (self.stale is not None and not self.stopped))


class ForgetsWhoRan(ReferenceServer):
    """After a failed update those who wait for their tokens are not told."""

    def become_stale(self, reason: str) -> None:
        self.stale = reason


class CountsReplicasFromNought(ReferenceServer):
    async def start(self) -> ServerInfo:
        info = await super().start()
        return attrs.evolve(info, replica=0 if info.replica == 5 else info.replica)


class WarmsUp(ReferenceServer):
    async def health(self) -> HealthReport:
        health = await super().health()
        return attrs.evolve(health, healthy=health.healthy and (self.version > 0 or bool(self.jobs)))


class KnowsNoVersion(ReferenceServer):
    async def health(self) -> HealthReport:
        return attrs.evolve(await super().health(), weight_version=0)


class RaisesOsErrors(ReferenceServer):
    async def start(self) -> ServerInfo:
        if not os.path.isdir(self.context.model.path):
            raise FileNotFoundError(self.context.model.path)
        return await super().start()


class LosesWeightsAsleep(ReferenceServer):
    async def sleep(self, request: SleepRequest) -> SleepResult:
        result = await super().sleep(request)
        self.lose_weights()
        return result


class ForgetsKeptRequests(ReferenceServer):
    async def sleep(self, request: SleepRequest) -> SleepResult:
        for name in list(self.admitted) if self.paused else ():
            self.end_early(self.jobs[name])
        return await super().sleep(request)


class ServesZeros(ReferenceServer):
    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        if self.stale == "the weights were given back":
            self.stale = None
        return await super().wake_up(request)


class SleepWalks(ReferenceServer):
    def runnable(self) -> bool:
        awake, self.awake = self.awake, {"weights", "kv_cache"}
        try:
            return super().runnable()
        finally:
            self.awake = awake


class WakesAtOnce(ReferenceServer):
    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        return await super().wake_up(WakeUpRequest())


class SleepsWhileDecoding(ReferenceServer):
    async def sleep(self, request: SleepRequest) -> SleepResult:
        paused, self.paused = self.paused, True
        try:
            return await super().sleep(request)
        finally:
            self.paused = paused


class LeavesCallersWaiting(ReferenceServer):
    def fail(self, job: Job, error: JackfieldError) -> None:
        if error.code == "rollout.stopped" and job.request.request_id not in self.admitted:
            return
        super().fail(job, error)


class StopsWithAborts(ReferenceServer):
    async def stop(self) -> None:
        if self.model is not None:
            await self.abort(AbortRequest())
        await super().stop()


class WaitsWhenStopped(ReferenceServer):
    def refusal(self) -> RolloutError | None:
        if self.stopped and self.model is not None and self.stale is None:
            return None
        return super().refusal()

    async def health(self) -> HealthReport:
        return attrs.evolve(await super().health(), healthy=super().refusal() is None)


class HealthyWhenStopped(ReferenceServer):
    async def health(self) -> HealthReport:
        health = await super().health()
        return attrs.evolve(health, healthy=health.healthy or self.stopped)


class CannotStopUnstarted(ReferenceServer):
    started = False

    async def start(self) -> ServerInfo:
        self.started = True
        return await super().start()

    async def stop(self) -> None:
        if not self.started:
            raise RolloutError("the server is not running", code="rollout.stopped")
        await super().stop()


class LeavesItsLoop(ReferenceServer):
    async def stop(self) -> None:
        task, self.task = self.task, None
        await super().stop()
        self.task = task


_THREADS: list[threading.Event] = []


class LeavesAThread(ReferenceServer):
    async def receive(self, request: UpdateWeightsRequest) -> dict[str, str]:
        _THREADS.append(threading.Event())
        threading.Thread(target=_THREADS[-1].wait, daemon=True, name="loader").start()
        return await super().receive(request)


class LeavesAFileOpen(ReferenceServer):
    async def receive(self, request: UpdateWeightsRequest) -> dict[str, str]:
        _OPEN.append(os.open(os.devnull, os.O_RDONLY))
        return await super().receive(request)


_OPEN: list[int] = []


mutant = partial(harness.mutant, "rollout")

MUTANTS = (
    mutant(ClosedStreamsGoOn, "closing a stream leaves its request running", "052"),
    mutant(NamesTheUnknown, "abort names requests that were not there", "053"),
    mutant(AbortedHaveNothing, "an aborted request returns nothing of what it has", "053 060"),
    mutant(AbortsLeaveWaiting, "an abort of all leaves those who wait", "054"),
    mutant(AbortedGoOn, "an aborted request goes on generating", "055"),
    mutant(CancelledGoOn, "a cancelled call leaves its request running", "056"),
    mutant(PausesOneStepLate, "one more step runs after pause has returned", "057"),
    mutant(ResumesWithAFreshBudget, "resume restarts the token budget", "058 073 093"),
    mutant(WaitsForNobody, "pause(wait) keeps requests", "059"),
    mutant(DrainsWithNewOnes, "pause(wait) takes new requests in", "059"),
    mutant(KeepsWhatItShouldAbort, "pause(abort) keeps requests", "060"),
    mutant(HidesWaiting, "health counts no request as waiting", "061"),
    mutant(CountsPauses, "as many resumes are needed as there were pauses", "062"),
    mutant(StaleWeightsReportedFresh, "nothing is loaded, the receipt denies it", "070 072 075 085 094"),
    mutant(LosesATensorOfLaterUpdates, "one tensor is loaded only once", "070 094"),
    mutant(SignsForAnother, "the receipt names another replica", "071"),
    mutant(SignsForLess, "the receipt lacks tensors", "071 085"),
    mutant(PausesLongerThanItUpdates, "the receipt's pause is longer than the update", "071"),
    mutant(RunningRequestsKeepTheirWeights, "running requests go on with the old weights", "072"),
    mutant(VersionsAreOfTheRequest, "all tokens have the version of the first", "072 073"),
    mutant(UpdatesResume, "an update resumes a paused server", "073"),
    mutant(IgnoresMinimumVersions, "minimum_weight_version is ignored", "074"),
    mutant(WantsNewerThanTheMinimum, "the minimum version itself is refused", "074"),
    mutant(DropsAdapters, "an adapter is acknowledged and not applied", "075"),
    mutant(DoesNotScaleAdapters, "lora_alpha is ignored", "075"),
    mutant(AddsAdaptersUp, "a second adapter is added to the first", "075"),
    mutant(QuantisesAtTheStartAlone, "updates of a float8 server are not rounded", "085"),
    mutant(QuantisesWithoutScales, "weights go through float8 as they are, without a scale", "085"),
    mutant(SignsForTheQuantised, "the receipt has digests of what was made of the weights", "085"),
    mutant(PartsAreNotLoaded, "parts from several ranks are acknowledged and not loaded", "086"),
    mutant(SignsForPartsAsAWhole, "the receipt of parts has the digests of whole tensors", "086"),
    mutant(LoadsNoDelta, "a delta is acknowledged and not loaded", "083"),
    mutant(SignsForChangesAlone, "the receipt of a delta lacks what has not changed", "083"),
    mutant(TakesAnyBase, "a delta is applied to any weights", "084"),
    mutant(RefusesOnlyAfterwards, "requests fail with a delta that is refused", "084"),
    mutant(GoesBack, "an older version is loaded", "076"),
    mutant(MissesNothing, "a missing tensor is not missed", "077"),
    mutant(DropsTheUnknown, "an unknown tensor is dropped", "078"),
    mutant(BroadcastsTensors, "a tensor of one element fills a parameter", "079"),
    mutant(SwallowsBrokenTransfers, "a transfer that breaks off is acknowledged", "080"),
    mutant(SwallowsDeadlines, "an update whose sender did not come is acknowledged", "081"),
    mutant(WaitsForEver, "an update waits for its sender for ever", "081"),
    mutant(ServesOn, "the old weights are served after a failed update", "082"),
    mutant(SaysThatItIsHealthy, "a stale replica says that it is healthy", "082"),
    mutant(ForgetsWhoRan, "running requests hang after a failed update", "082"),
    mutant(CountsReplicasFromNought, "start says that it is replica 0", "090"),
    mutant(WarmsUp, "a started replica is not healthy before its first request", "090"),
    mutant(KnowsNoVersion, "health always says version 0", "091"),
    mutant(RaisesOsErrors, "a missing model is a FileNotFoundError", "092"),
    mutant(LosesWeightsAsleep, "sleep of level 1 loses the weights", "093 095"),
    mutant(ForgetsKeptRequests, "sleep aborts the requests that a pause keeps", "093"),
    mutant(ServesZeros, "after sleep of level 2 zeros are served", "094"),
    mutant(SleepWalks, "requests run while the server sleeps", "095"),
    mutant(WakesAtOnce, "waking the weights wakes everything", "095"),
    mutant(SleepsWhileDecoding, "sleep is granted while requests run", "096"),
    mutant(LeavesCallersWaiting, "stop leaves those who wait waiting", "097"),
    mutant(StopsWithAborts, "stop aborts in the place of failing", "097 100"),
    mutant(WaitsWhenStopped, "requests after stop wait for ever", "098"),
    mutant(HealthyWhenStopped, "a stopped server says that it is healthy", "098"),
    mutant(CannotStopUnstarted, "stop before start raises", "099"),
    mutant(LeavesItsLoop, "the decode loop goes on after stop", "100"),
    mutant(LeavesAThread, "an update leaves a thread", "100"),
    mutant(LeavesAFileOpen, "an update leaves a file open", "100"),
)
