"""Checks of rollout servers: new weights, their versions and receipts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress

import torch

from jackfield.abc.rollout import BaseRolloutServer, GenerateResult, PauseRequest, ResumeRequest
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RolloutError, WeightsError
from jackfield.weights import Replica, WeightSynchronizer
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.expecting import refused
from jackfield_conformance.support.rollout import (
    LONG,
    PAGE,
    Pushed,
    Reader,
    breathe,
    checked,
    checkpoint_engine,
    ended,
    greedy,
    make_rank,
    make_sender,
    push,
    reading,
    request,
    serving,
    standing_still,
    started,
)
from jackfield_conformance.support.rollout_model import (
    Weights,
    Which,
    adapted_weights,
    adapter,
    assert_log_probs,
    assert_quantised,
    named_weights,
)

_LAST = "model.norm.weight"


def _assert_version(result: GenerateResult, version: int) -> None:
    assert {version} == set(result.weight_versions), (
        f"{result.request_id!r}: expected tokens of version {version}, found {sorted(set(result.weight_versions))}"
    )


def _assert_digests(pushed: Pushed) -> None:
    loaded = [dict(worker.digests) for worker in pushed.receipt.workers]
    wanted = [dict(pushed.digests)] * max(len(loaded), 1)
    assert wanted == loaded, "the receipt's digests are not those of the tensors that were sent"


async def _assert_heals(subject: Subject, server: BaseRolloutServer, version: int) -> None:
    """Require that a good update is accepted after a bad one, and its weights are served."""
    await push(subject, server, version)
    _assert_version(await server.generate(greedy("healed", 3)), version)
    health = await server.health()
    assert health.healthy, f"the server is not healthy after a good update: {health.detail}"


@check("ROL-070", page=PAGE + "weights", using=serving)
async def new_weights_are_used(subject: Subject, server: BaseRolloutServer) -> None:
    """After an update the next token comes from the new weights and has their version."""
    old, new = greedy("old", 8), greedy("new", 8)
    _assert_version(await checked(subject, server, old), 0)
    await push(subject, server, 3)
    _assert_version(await checked(subject, server, new, "other"), 3)
    await push(subject, server, 4, named_weights("base"))
    _assert_version(await checked(subject, server, old), 4)


@check("ROL-071", page=PAGE + "receipts")
async def receipts_prove(subject: Subject) -> None:
    """The receipt names version, replica and every worker, and has the digest of each tensor that was sent."""
    weights = named_weights()

    def source() -> tuple[Generator[tuple[str, torch.Tensor], None, None], None]:
        return ((name, tensor) for name, tensor in weights.items()), None

    async with started(subject, replica=3) as (server, info):
        name, settings = checkpoint_engine(subject)
        senders, replicas = [make_sender(subject, 0, source)], [Replica(server, info)]
        synchronizer = WeightSynchronizer(senders, replicas, name, Clock(), settings=settings, deadline_seconds=20.0)
        report = await synchronizer.sync(2)  # compares every digest, and raises
    receipt = report.receipts[0]
    assert 0 <= receipt.paused_seconds <= receipt.seconds, (
        f"an update of {receipt.seconds} s cannot have paused for {receipt.paused_seconds} s"
    )


@check("ROL-086", page=PAGE + "receipts")
async def parts_of_every_rank_are_loaded(subject: Subject) -> None:
    """A server that says what its workers have of each tensor gets it from two ranks at once: the next token comes from
    these weights, and the receipt has the digest of each piece."""
    async with started(subject) as (server, info):
        if not info.weight_layouts:
            return
        assert info.workers == len(info.weight_layouts), f"{len(info.weight_layouts)} layouts, {info.workers} workers"
        name, settings = checkpoint_engine(subject)
        senders, replicas = [make_rank(subject, rank, 2) for rank in range(2)], [Replica(server, info)]
        synchronizer = WeightSynchronizer(senders, replicas, name, Clock(), settings=settings, deadline_seconds=20.0)
        await synchronizer.sync(2)  # compares every digest, and raises
        new = greedy("new", 8)
        _assert_version(await checked(subject, server, new, "other"), 2)


@check("ROL-072", page=PAGE + "weights", using=serving)
async def running_requests_change_weights(subject: Subject, server: BaseRolloutServer) -> None:
    """A request that runs during an update continues with the new weights; each token has the version that made it."""
    readers = [Reader(server, greedy("greedy", LONG)), Reader(server, request("seeded", max_new_tokens=LONG, seed=2))]
    for reader in readers:
        await reader.at_least(4)
    await push(subject, server, 5)
    for reader in readers:
        result = await reader.result()
        versions, name = result.weight_versions, reader.sent.request_id
        before = versions.count(0)
        assert (0,) * before + (5,) * (LONG - before) == versions, f"{name!r}: versions {versions}"
        assert 4 <= before < LONG, f"{name!r}: {before} of {LONG} tokens have the version from before the update"
        old = GenerateResult(
            request_id=name,
            token_ids=result.token_ids[:before],
            log_probs=result.log_probs[:before],
            weight_versions=versions[:before],
            finish_reason="length",
        )
        assert_log_probs(subject, reader.sent, old, "base")
        assert_log_probs(subject, reader.sent, result, "other", first=before, old="base")


@check("ROL-073", page=PAGE + "weights", using=serving)
async def updates_do_not_resume(subject: Subject, server: BaseRolloutServer) -> None:
    """A paused server takes an update and stays paused; its kept requests continue with the new weights."""
    reader = await reading(server, greedy("kept", LONG), 3)
    await server.pause(PauseRequest())
    count = await reader.drained(server)
    await push(subject, server, 2)
    with standing_still("an update has started a paused server"):
        await breathe()
    assert count == len(reader.token_ids), "tokens came although the server is paused"
    await server.resume(ResumeRequest())
    result = await reader.result()
    before = result.weight_versions.count(0)  # some may have been made and not streamed
    expected = (0,) * before + (2,) * (LONG - before)
    assert expected == result.weight_versions, f"expected versions {expected}, found {result.weight_versions}"
    assert count <= before < LONG, f"{before} of {LONG} tokens have the version from before the update"


@check("ROL-074", page=PAGE + "weights", using=serving)
async def minimum_versions_are_kept(subject: Subject, server: BaseRolloutServer) -> None:
    """A request that needs newer weights than the replica's is refused with ``rollout.stale``; others are served."""
    with refused(RolloutError, "rollout.stale"):
        await server.generate(request("too new", max_new_tokens=2, minimum=1))
    await push(subject, server, 4)
    for minimum in (0, 3, 4):
        result = await server.generate(request(f"at least {minimum}", max_new_tokens=2, minimum=minimum))
        assert 2 == len(result.token_ids), f"minimum_weight_version={minimum} was not served by version 4"
    with refused(RolloutError, "rollout.stale"):
        await server.generate(request("newer", max_new_tokens=2, minimum=5))


@check("ROL-075", capability="weights_adapter", page=PAGE + "adapters", using=serving)
async def adapters_are_applied(subject: Subject, server: BaseRolloutServer) -> None:
    """A LoRA adapter changes log-probabilities to those of the adapted model, and the receipt has its digests."""
    for version in (1, 2):  # the second replaces the first, it is not added to it
        pushed = await push(subject, server, version, adapter(), kind="adapter")
        _assert_version(await checked(subject, server, greedy(f"adapted-{version}", 8), "adapted"), version)
        _assert_digests(pushed)
    await push(subject, server, 3, named_weights("base"))
    await checked(subject, server, greedy("plain again", 8))


@check("ROL-085", capability="weights_float8", page=PAGE + "weights")
async def weights_are_quantised(subject: Subject) -> None:
    """With the dtype ``float8_e4m3fn`` weights are rounded to it at the start and at updates, and receipts have the
    digests of the sent tensors."""
    async with serving(subject, dtype="float8_e4m3fn") as server:
        loaded = greedy("loaded", 24)
        assert_quantised(loaded, await server.generate(loaded), "base")
        pushed = await push(subject, server, 1)
        updated = greedy("updated", 24)
        assert_quantised(updated, await server.generate(updated), "other")
        _assert_digests(pushed)


@check("ROL-083", capability="weights_delta", page=PAGE + "deltas", using=serving)
async def deltas_are_applied(subject: Subject, server: BaseRolloutServer) -> None:
    """After a delta the next token comes from the new weights, and the receipt has the digests of all whole tensors."""
    sender = make_sender(subject)
    await push(subject, server, 1, named_weights("base"), sender=sender)
    models: tuple[Which, ...] = ("adapted", "adapted", "base")
    for version, which in enumerate(models, 2):
        weights = adapted_weights() if which == "adapted" else named_weights("base")
        pushed = await push(subject, server, version, weights, kind="delta", sender=sender, base=version - 1)
        assert sender.sent_bytes < sum(tensor.nbytes for tensor in weights.values()) / 2, "it was no delta"
        _assert_digests(pushed)
        _assert_version(await checked(subject, server, greedy(f"delta-{version}", 8), which), version)


@check("ROL-084", capability="weights_delta", page=PAGE + "deltas", using=serving)
async def deltas_need_their_base(subject: Subject, server: BaseRolloutServer) -> None:
    """A delta to weights that are not held is refused with ``weights.base``; the server keeps its weights."""
    sender = make_sender(subject)
    await _assert_base_refused(subject, server, 0, base=0)
    await push(subject, server, 1, sender=sender)
    await _assert_base_refused(subject, server, 1, base=0)
    await push(subject, server, 2)  # this update does not say that deltas follow
    await _assert_base_refused(subject, server, 2, base=1)
    with suppress(JackfieldError):
        await push(subject, server, 3, sender=sender, breaks_after=2)
    with refused(WeightsError, "weights.base"):
        await push(subject, server, 4, kind="delta", base=2)
    await _assert_heals(subject, server, 5)


async def _assert_base_refused(subject: Subject, server: BaseRolloutServer, version: int, base: int) -> None:
    reader = await reading(server, greedy(f"running-{version}", 24))
    with refused(WeightsError, "weights.base"):
        await push(subject, server, version + 1, kind="delta", base=base)
    _assert_version(await reader.result(), version)


@check("ROL-076", page=PAGE + "failures", using=serving)
async def versions_do_not_go_back(subject: Subject, server: BaseRolloutServer) -> None:
    """Weights of an older version are refused with ``weights.version``."""
    await push(subject, server, 5)
    with refused(WeightsError, "weights.version"):
        await push(subject, server, 3, named_weights("base"))
    await _assert_heals(subject, server, 6)


@check("ROL-077", page=PAGE + "failures", using=serving)
async def missing_tensors_are_missed(subject: Subject, server: BaseRolloutServer) -> None:
    """An update without a parameter of the model is refused with ``weights.missing``, which names it."""
    weights = {name: tensor for name, tensor in named_weights().items() if name != _LAST}
    with refused(WeightsError, "weights.missing", naming=_LAST):
        await push(subject, server, 1, weights)
    await _assert_heals(subject, server, 2)


@check("ROL-078", page=PAGE + "failures", using=serving)
async def unknown_tensors_are_refused(subject: Subject, server: BaseRolloutServer) -> None:
    """An update with a tensor that the model does not have is refused with ``weights.missing``, which names it."""
    name = "model.layers.9.self_attn.q_proj.weight"
    with refused(WeightsError, "weights.missing", naming=name):
        await push(subject, server, 1, {**named_weights(), name: torch.zeros(4, 4)})
    await _assert_heals(subject, server, 2)


@check("ROL-079", page=PAGE + "failures", using=serving)
async def shapes_are_compared(subject: Subject, server: BaseRolloutServer) -> None:
    """A tensor of another shape than the model's is refused by name, and never broadcast or cut."""
    for version, shape in enumerate(((1,), (33,)), 1):
        with refused(WeightsError, naming=_LAST):
            await push(subject, server, version, {**named_weights(), _LAST: torch.ones(shape)})
    await _assert_heals(subject, server, 3)


@check("ROL-080", page=PAGE + "failures", using=serving)
async def broken_transfers_raise(subject: Subject, server: BaseRolloutServer) -> None:
    """A sender that breaks off makes the update raise."""
    for version, count in enumerate((0, 5, len(named_weights()) - 1), 1):
        with refused(WeightsError):
            await push(subject, server, version, breaks_after=count)
    await _assert_heals(subject, server, 4)


@check("ROL-081", page=PAGE + "failures", using=serving)
async def deadlines_hold(subject: Subject, server: BaseRolloutServer) -> None:
    """An update without a sender raises at its deadline."""
    with refused((WeightsError, DeadlineExceeded), what="an update without a sender"):
        await push(subject, server, 1, never_comes=True, deadline_seconds=0.02)
    await _assert_heals(subject, server, 2)


@check("ROL-082", page=PAGE + "failures", using=serving)
async def a_failed_update_serves_nothing(subject: Subject, server: BaseRolloutServer) -> None:
    """From a failed update to the next good one the server is not healthy and refuses with ``rollout.stale``."""
    weights: Weights = {name.replace(_LAST, "model.last.weight"): tensor for name, tensor in named_weights().items()}
    reader = await reading(server, greedy("running", LONG))
    with refused(WeightsError):
        await push(subject, server, 1, weights)
    await _assert_not_served_on(reader)
    with refused(RolloutError, "rollout.stale"):
        await server.generate(greedy("next", 3))
    with refused(RolloutError, "rollout.stale"):
        async for _ in server.generate_stream(greedy("next streamed", 3)):
            pass
    health = await server.health()
    assert not health.healthy, "a replica whose update failed says that it is healthy"
    await _assert_heals(subject, server, 2)


async def _assert_not_served_on(reader: Reader) -> None:
    """Require that a request ended with the failure: by ``rollout.stale``, or aborted with the old weights' tokens."""
    try:
        result = await ended(reader.result(), "the end of a request that ran when an update failed")
    except RolloutError as error:
        if error.code == "rollout.stale":
            return
        raise
    assert "abort" == result.finish_reason, "a request went on being served after a failed update"
    _assert_version(result, 0)
