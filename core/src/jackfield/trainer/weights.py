"""Weights of the engine for replicas of this and other processes, and comparisons of their log-probs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import attrs

from jackfield.abc.rollout import (
    GenerateRequest,
    GenerateResult,
    PauseRequest,
    ResumeRequest,
    SamplingParams,
    SleepRequest,
    UpdateWeightsRequest,
    WakeUpRequest,
)
from jackfield.cluster.pool import ReplicaPool
from jackfield.errors import DeadlineExceeded, JackfieldError, RunError, WeightsError
from jackfield.queue import BatchMeta
from jackfield.routing import LOST, Replica
from jackfield.runtime.comparison import Comparison, Distance, Distances
from jackfield.runtime.engine import EngineGroup
from jackfield.runtime.workers import resubmitted
from jackfield.settings import structure
from jackfield.trainer.role import WEIGHTS, Role
from jackfield.weights import WeightsSynced, WeightSynchronizer, verify

_NOTHING = WeightsSynced(version=-1)
_METRICS = "log_prob_check"  #: prefix of the metrics
_PROBE_PROMPT = 32  #: maximum number of tokens of the probe's prompt

#: Default bounds on the mean distance between two passes of the engine with the same weights, in nats.
_EXACT_BOUND, _ROUNDED_BOUND = 0.001, 0.1
_SAMPLE_FACTOR = 10.0  #: a single sample's mean distance may exceed the bound of the batch by this factor
_NEARLY_ALL = 0.99  #: sampling filters are suspected when this share of the distance has one sign

_TRAIN_MODE_CAUSES = (
    "dropout in train mode (a model's own, an adapter's), or noise in the routing of experts",
    "kernels or a dtype that the engine has in train mode alone",
    "positions (dynamic or long rope) that depend on how rows are split into micro-batches",
)
_FILTERS = (
    "tokens drawn from a sharper or filtered distribution (top_p, top_k, min_p, a lower temperature, in the agent "
    "or the server), or log-probs that are not of the distribution that was drawn from"
)
_ROLLOUT_CAUSES = (
    "sampling parameters other than the run's: temperature, filters, raw log-probs",
    "token ids: prompt or response ids that an agent returns are not those that were sent and generated (a chat "
    "template rendered again, text tokenised again)",
    "numerics of the server: dtype, rope settings, routing of experts",
)


async def publish(role: Role, report: WeightsSynced | None, version: int) -> None:
    """Tell explorers in other processes how to load the trainer's weights of ``version``.

    ``report`` comes from the newest weight sync. None means that the weights are those of the model's folder. A
    checkpoint engine that keeps no weights for workers that join later is refused (``weights.transfer``).
    """
    if report is not None and (report.retained is None or report.kind == "delta"):
        message = "the checkpoint engine keeps no weights for explorers that come and go"
        expected = "one with the capability 'retains_weights' (file)"
        fix = "choose checkpoint_engine: {name: file, folder: …}"
        raise WeightsError(message, where="checkpoint_engine", expected=expected, fix=fix)
    await role.queue.post(WEIGHTS, attrs.asdict(attrs.evolve(report or _NOTHING, version=version, receipts=())))


@attrs.define(kw_only=True, eq=False)
class WeightSubscriber:
    """Loads each published version into this process's replicas, verifies the receipts, and lets the explorer go on.

    It is the weight source of an explorer.
    """

    role: Role
    pool: ReplicaPool
    takes_turns: bool = attrs.field(default=False, init=False)
    newest: WeightsSynced = attrs.field(default=_NOTHING, init=False)  #: the newest weights that all replicas have
    loading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: held while replicas load weights

    async def run(self) -> None:
        """Follow the trainer until cancelled.

        Errors are ``weights.version`` if the trainer's version went back, and those of a weight sync.
        """
        number, queue = 0, self.role.queue
        while True:
            try:
                notice = await queue.wait_notice(WEIGHTS, number, self.role.config.deadlines.batch)
            except DeadlineExceeded:
                continue  # consumers of newer weights have their own deadlines
            number, published = notice.number, structure(WeightsSynced, notice.value, WEIGHTS, WeightsError)
            try:
                async with self.role.measure("load_weights", "weights", published.version):
                    await self.load_all(published)
            except WeightsError:
                with suppress(DeadlineExceeded):
                    await queue.wait_notice(WEIGHTS, number, 0.0)
                    continue  # newer weights exist, and these may have been removed
                raise
            await self.role.version.advance(published.version)

    async def load_all(self, published: WeightsSynced) -> None:
        """Load published weights into all replicas. It raises the errors of :meth:`run`."""
        async with self.loading:
            found, newest, fix = published.version, self.newest.version, "start this explorer again"
            if found < newest:
                what = "the trainer went back to earlier weights, which replicas do not take"
                raise WeightsError(what, code="weights.version", expected=f"at least {newest}", found=found, fix=fix)
            if published != self.newest:  # a restored trainer may publish a version again

                async def send(_: int, replicas: Sequence[Replica], *, last: bool) -> WeightsSynced:
                    await asyncio.gather(*(self._load(replica, published) for replica in replicas))
                    return published

                await self.pool.sync(found, send)
            self.newest = published

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold newer versions back, and the devices for replicas."""
        async with self.role.rollout_devices.hold("rollout", joins=True), self.loading:
            yield

    async def load(self, replica: Replica) -> None:
        """Load the newest weights into a replica that joins, inside :meth:`hold`."""
        async with self.role.measure("load_weights", "weights", max(self.newest.version, 0)):
            await self._load(replica, self.newest)

    async def _load(self, replica: Replica, published: WeightsSynced) -> None:
        if published.retained is None:
            return  # the replica has the weights of the model's folder
        engine, seconds = self.role.config.checkpoint_engine, self.role.config.deadlines.sync
        request = UpdateWeightsRequest(
            version=published.version,
            checkpoint_engine=engine.name,
            checkpoint_engine_config=engine.settings,
            connect=(published.retained,) * replica.info.workers,
            first_worker=0,
            total_workers=replica.info.workers,
            kind="full" if published.peft_config is None else "adapter",
            peft_config=published.peft_config,
            deadline_seconds=seconds,
        )
        who = f"replica {replica.number} to take weights {published.version}"
        receipt = await self.role.clock.wait_for(replica.server.update_weights(request), seconds, who)
        verify(replica.info, receipt, published.version, [published.digests] * replica.info.workers)


@attrs.define(kw_only=True, eq=False)
class EngineWeights:
    """Brings the weights of this process's engine to replicas: new versions, and the current one to those that join.

    It is the weight source of a process that trains. If engines and replicas take turns on a device, it also moves
    them off and on, and interrupts requests.
    """

    role: Role
    engines: Mapping[str, EngineGroup]  #: the loaded models: actor, and reference and critic once they are loaded
    pool: ReplicaPool | None = None  #: replicas of this process, if it has any
    takes_turns: bool = attrs.field(init=False)
    interrupts: bool = attrs.field(init=False)  #: whether replicas stop while the engine has the device
    probe: ReplicaProbe | None = attrs.field(default=None, init=False)
    synchronizer: WeightSynchronizer = attrs.field(init=False)
    _unasked: int | None = attrs.field(default=None, init=False)  #: the version that the probe was not asked about
    _answers: list[tuple[Replica, GenerateResult]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        """Compare replicas at hand-overs if they take turns with the engine, otherwise after each transfer."""
        role, config, shares = self.role, self.role.config, self.pool is not None and self.role.workers.shares_devices
        self.synchronizer = WeightSynchronizer(
            senders=[rank.sender for rank in role.workers.ranks["actor"] if rank.sender is not None],
            replicas=[] if self.pool is None else self.pool.members,
            name=config.checkpoint_engine.name,
            clock=role.clock,
            settings=config.checkpoint_engine.settings,
            deadline_seconds=config.deadlines.sync,
            kind=config.weights.kind,
            on_missing_base=config.weights.on_missing_base,
        )
        if config.log_prob_check.probe_tokens:
            self.probe = ReplicaProbe(role=role, actor=self.engines["actor"])
        self.takes_turns = shares and config.cluster.offload
        self.interrupts = shares and config.schedule.partial_rollout
        if self.takes_turns or self.interrupts:
            role.train_devices.hand_over = self.hand_over
        elif self.probe is not None:
            self.synchronizer.check = self.probe.check

    async def sync(self, version: int) -> WeightsSynced:
        """Send a version to all replicas; those that take turns with engines allocate only their weights."""
        if self.pool is None:
            return await self.synchronizer.sync(version)
        if self.takes_turns:
            await self.pool.each("wake up", lambda server: server.wake_up(WakeUpRequest(tags=("weights",))))
        self._unasked = version
        return await self.pool.sync(version, self._send)

    async def _send(self, version: int, replicas: Sequence[Replica], *, last: bool) -> WeightsSynced:
        if not replicas and self.role.name != "train":  # otherwise it also sends for other processes
            return WeightsSynced(version=version)
        return await self.synchronizer.sync(version, replicas, last=last)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Block training and weight syncs, and give replicas the device; between two steps, if another one serves."""
        role, others, held = self.role, self.pool.members if self.pool else [], False
        while not held:
            if others:  # without them a step that has made updates may wait for rollouts
                who = f"the trainer to make all updates of step {role.updated + 1}"
                await role.clock.wait_for(role.whole.wait(), role.config.deadlines.batch, who)
            async with role.train_devices.hold("rollout", joins=True):
                if held := role.whole.is_set() or not others:
                    yield

    async def load(self, replica: Replica) -> None:
        """Send the current weights to a replica that joins or was restarted, inside :meth:`hold`."""
        version = self.role.updated
        async with self.role.measure("load_weights", "weights", version):
            if version:  # version 0 is the model's folder, which the replica has loaded
                async with self.engines["actor"].reading:
                    await self.synchronizer.catch_up(replica, version)
                self.synchronizer.last = self.synchronizer.last if self.role.whole.is_set() else None  # no delta's base
            if self.takes_turns or self.interrupts:
                await self._ask([replica], version)

    async def hand_over(self, before: str | None, role: str) -> None:
        """Move engines off or back, let replicas sleep or wake up, stop or go on, when the lease's role changes."""
        assert self.pool is not None
        if self.interrupts and before == "rollout":  # a server that cannot keep requests ends them; routers go on
            await self.pool.each("interrupt its requests", lambda server: server.pause(PauseRequest()))
        if self.takes_turns and role == "train":  # also the first time: replicas start awake, and engines offloaded
            await self.pool.each("sleep", lambda server: server.sleep(SleepRequest(level=1)))
        if self.takes_turns and "train" in (role, before):
            device = self.role.config.cluster.device if role == "train" else "cpu"
            await asyncio.gather(*(engine.to(device) for engine in self.engines.values()))
        if role == "train":
            answers, self._answers = self._answers, []
            if self.probe is not None and answers:
                await self.probe.compare(answers)
        else:
            if self.takes_turns:
                await self.pool.each("wake up", lambda server: server.wake_up(WakeUpRequest()))
            if self.interrupts:
                await self.pool.each("go on", lambda server: server.resume(ResumeRequest()))
            version, self._unasked = self._unasked, None
            if version is not None:
                await self._ask(self.pool.members, version)

    async def _ask(self, replicas: Sequence[Replica], version: int) -> None:
        """Let live replicas with ``version`` answer the probe, while they have the device."""
        try:
            self._answers += await self.probe.ask(replicas, version) if self.probe else []
        except JackfieldError as error:
            if error.code not in LOST:
                raise


@attrs.define(kw_only=True, eq=False)
class LogProbCheck:
    """Compares log-probs of training, inference and rollout in the first step, the first after a sync and every few."""

    role: Role
    _begun: bool = attrs.field(default=False, init=False)
    _passed: int | None = attrs.field(default=None, init=False)  #: the newest weight version that passed the check

    def comparison(self, step: int) -> Comparison | None:
        """Return what the first update of ``step`` (from 0) is compared with; None: no check is due."""
        role, config = self.role, self.role.config
        if not config.log_prob_check.every or (self._begun and not self._is_scheduled(step)):
            return None
        known = role.algorithm.recompute_old_log_probs and role.algorithm.old_log_probs == "old_log_probs"
        engine = "old_log_probs" if known else "log_probs"  # in bypass mode the loss has the rollout's by that name
        active, dropout = config.sampling_filters, config.trains_with_dropout
        # filters may raise the log-probs of the remaining tokens: top-p by a known amount, others by one of the batch
        slack = -math.log(active["top_p"]) if active.keys() == {"top_p"} else math.inf if active else 0.0
        return Comparison(engine=engine, version=role.updated if role.explores else None, slack=slack, dropout=dropout)

    def _is_scheduled(self, step: int) -> bool:
        config, schedule = self.role.config, self.role.schedule
        first = config.critic.warmup_steps if self.role.algorithm.critic else 0  # the first step that trains the policy
        return step in (first, schedule.sync_interval) or schedule.is_due(config.log_prob_check.every, step)

    def judge(self, found: Distances, batch: BatchMeta, step: int) -> None:
        """Refuse distances beyond their bounds with the likely causes (``run.log-probs``).

        Distances become metrics at scheduled steps only, so that a resumed run has the same metrics as one that was not
        interrupted.
        """
        self._begun = True
        mean, shown = dict[str, float](), dict[str, str]()
        for name in ("train_mode", "rollout"):
            samples = found.get(name, {}).values()
            tokens, most = sum(each.tokens for each in samples), max((each.max for each in samples), default=0.0)
            mean[name] = sum(each.sum for each in samples) / max(tokens, 1)
            shown[name] = f"{mean[name]:.3g} over {tokens} tokens, at most {most:.3g}"
            if tokens and self._is_scheduled(step):
                for kind, value in (("mean", mean[name]), ("max", most), ("tokens", float(tokens))):
                    self.role.note(f"{_METRICS}/{name}/{kind}", value)
        means = {key: each.sum / each.tokens for key, each in found.get("rollout", {}).items()}
        farthest = max(means, key=lambda key: (math.isnan(means[key]), means[key]), default="")
        config, distance, where = self.role.config, means.get(farthest, 0.0), f"step {step + 1}"
        bound, on_mismatch = config.rollout_bound, config.log_prob_check.on_mismatch
        most = _SAMPLE_FACTOR * bound
        engine_bound = config.log_prob_check.bound or (_ROUNDED_BOUND if config.engine_rounds else _EXACT_BOUND)
        if not config.trains_with_dropout and not mean["train_mode"] <= engine_bound:
            message = "the pass that is trained on computes other log-probs than an inference pass of the same weights"
            expected, seen = f"a mean distance of at most {engine_bound:.3g} nats", shown["train_mode"]
            causes, stops = list(_TRAIN_MODE_CAUSES), on_mismatch != "warn"
        elif not mean["rollout"] <= bound or not distance <= most:
            message = "the rollout's log-probs are not those of the policy that is trained, with weights of one version"
            expected = f"a mean distance of at most {bound:.3g} nats, {most:.3g} in any sample"
            seen = f"{shown['rollout']}; farthest: sample {farthest}, {distance:.3g}"
            causes, stops = self._rollout_causes(found["rollout"], batch), on_mismatch == "stop"
        else:
            self._passed = self.role.updated if means else self._passed
            return
        listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
        fix = f"likely causes: {listed}. log_prob_check.bound and log_prob_check.on_mismatch set what is let through"
        _refuse(RunError(message, code="run.log-probs", where=where, expected=expected, found=seen, fix=fix), stops)

    def _rollout_causes(self, found: Mapping[str, Distance], batch: BatchMeta) -> list[str]:
        """List the possible causes of a mismatch, the likeliest first."""
        causes, version = list(_ROLLOUT_CAUSES), self.role.updated
        if sum(each.signed_sum for each in found.values()) >= _NEARLY_ALL * sum(each.sum for each in found.values()):
            causes.insert(0, _FILTERS)
        weights = "weights of the replicas: another model folder, or a cast (weights.dtype)"
        if version:
            weights = f"weights that were published as version {version}: exported names or values, a replica's copies"
        if self._passed is not None and self._passed < version:
            causes.insert(0, f"{weights} (version {self._passed} was right)")
        else:
            causes.append(weights)
        if own := [tags["own_sampling"] for tags in batch.tags if "own_sampling" in tags]:
            causes.insert(0, f"the agent's own sampling parameters in {len(own)} of {len(batch)} samples: {own[0]}, …")
        return causes


def _refuse(error: RunError | WeightsError, stops: bool) -> None:
    """Raise an error, or log it as a warning if the run goes on."""
    if stops:
        raise error
    logging.getLogger("jackfield").warning("%s at %s (%s); %s", error.message, error.where, error.found, error.fix)


@attrs.define(kw_only=True, eq=False)
class ReplicaProbe:
    """Lets replicas generate a few tokens, and compares log-probs with the engine's.

    Raises ``weights.log-probs`` if a distance exceeds the bound (the worst replica is named).
    """

    role: Role
    actor: EngineGroup
    _prompt_ids: tuple[int, ...] = attrs.field(default=(), init=False)

    async def check(self, replicas: Sequence[Replica], version: int) -> None:
        """Ask the replicas and compare, if the engine and the replicas can run at the same time."""
        await self.compare(await self.ask(replicas, version))

    async def ask(self, replicas: Sequence[Replica], version: int) -> list[tuple[Replica, GenerateResult]]:
        """Let every replica generate; one with older weights refuses."""
        config, agents, task = self.role.config, self.role.workers.agents, next(iter(self.role.tasks.values()))[0]
        if not self._prompt_ids:
            ask = lambda: agents.of(0).prompt_ids(task, _PROBE_PROMPT)  # noqa: E731
            self._prompt_ids = tuple(await resubmitted(ask, "the probe's prompt is made"))
        tokens, temperature = config.log_prob_check.probe_tokens, config.engine_temperature
        sampling = SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=0, ignore_eos=True)
        name, prompt = f"probe-{version}", self._prompt_ids
        request = GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling, minimum_weight_version=version)
        asked = asyncio.gather(*(replica.server.generate(request) for replica in replicas))
        who = f"replicas to answer the probe of version {version}"
        results = await self.role.clock.wait_for(asked, config.deadlines.rollout, who)
        return list(zip(replicas, results, strict=True))

    async def compare(self, answers: Sequence[tuple[Replica, GenerateResult]]) -> None:
        """Compare the replicas' log-probs with the engine's at the same weight version."""
        scored = await self.actor.score(self._prompt_ids, [answer.token_ids for _, answer in answers])
        compared = []
        for (replica, answer), own in zip(answers, scored, strict=True):
            pairs = zip(answer.log_probs, own, strict=True)
            distance = sum(abs(found - expected) for found, expected in pairs) / len(own)
            compared.append((distance, replica.number, answer, own))
        distance, number, answer, own = max(compared, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
        self.role.note(f"{_METRICS}/replica/mean", distance)
        if distance <= (bound := self.role.config.rollout_bound):
            return
        what = f"replica {number} computes other log-probs than the engine with version {answer.weight_versions[0]}"
        expected = f"a mean distance of at most {bound:.3g} nats over {len(own)} tokens"
        found = f"{distance:.3g}: engine {own[:4]}, replica {list(answer.log_probs[:4])}"
        fix = "raise log_prob_check.bound if these numerics are wanted, or set log_prob_check.on_mismatch: correct"
        where = f"replica {number}"
        error = WeightsError(what, code="weights.log-probs", where=where, expected=expected, found=found, fix=fix)
        _refuse(error, self.role.config.log_prob_check.on_mismatch == "stop")
