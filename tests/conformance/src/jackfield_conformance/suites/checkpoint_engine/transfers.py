"""Checks of checkpoint engines: repeated, concurrent and broken transfers, and what they leave."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing, suppress
from pathlib import Path

import torch

from jackfield.errors import DeadlineExceeded
from jackfield.sdk.receiver import WeightReceiver
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import checkpoint_engine as support
from jackfield_conformance.support.expecting import within
from jackfield_conformance.support.processes import assert_nothing_left

_ORDER = "docs/plugins/checkpoint_engine.md#order-of-calls"


@check("CKE-020", page=_ORDER)
async def transfers_repeat(subject: Subject) -> None:
    """The same objects make one transfer after another, each with its own version and values."""
    async with support.ends(subject, workers=2) as made:
        for version in (1, 2, 5):
            tensors = support.numbers(4, seed=version)
            for found in await made.sync(tensors, version):
                support.assert_received(tensors, found, f"version {version}")


@check("CKE-021", page=_ORDER)
async def workers_may_change_between_transfers(subject: Subject) -> None:
    """A sender can serve another number of new workers at its next transfer."""
    tensors = support.numbers(4)
    async with support.ends(subject, workers=3) as made:
        await made.sync(tensors, 1)
        for version, count in ((2, 1), (3, 4)):
            async with support.ends(subject, workers=count) as others:
                made.workers = others.workers
                for found in await made.sync(tensors, version):
                    support.assert_received(tensors, found, f"one of {count} new workers")


@check("CKE-022", page=_ORDER)
async def an_empty_transfer_ends(subject: Subject) -> None:
    """A transfer without any tensor ends at both sides."""
    async with support.ends(subject, workers=2) as made:
        assert await made.sync({}) == [{}, {}], "tensors arrived that were not sent"


@check("CKE-023", page=_ORDER)
async def every_rank_exhausts_its_generator(subject: Subject) -> None:
    """Every trainer rank exhausts its generator, and each tensor still arrives once."""
    tensors, drawn = support.numbers(), [0, 0]

    def counting(rank: int) -> support.Weights:
        for pair in support.source(tensors):
            yield pair
            drawn[rank] += 1

    async with support.ends(subject, workers=2, ranks=2) as made:
        await made.prepare()
        found = await made.together(made.send(counting(0), counting(1)), made.receive_all())
    for each in found:
        support.assert_received(tensors, each, "from two trainer ranks")
    assert drawn == [len(tensors)] * 2, f"of {len(tensors)} tensors the ranks have drawn {drawn}"


@check("CKE-024", page=_ORDER)
async def transfers_side_by_side_do_not_mix(subject: Subject) -> None:
    """Two transfers at the same time, of an actor and a critic, do not mix."""
    one = support.numbers(5, seed=1)
    other = {f"critic.{name}": tensor for name, tensor in support.numbers(9, seed=2).items()}
    async with support.ends(subject) as actor, support.ends(subject) as critic:
        (first,), (second,) = await asyncio.gather(actor.sync(one), critic.sync(other))
    support.assert_received(one, first, "of the first of two transfers")
    support.assert_received(other, second, "of the second of two transfers")


@check("CKE-025", page=_ORDER)
async def another_version_is_refused(subject: Subject) -> None:
    """A receiver of another version than its sender's raises WeightsError instead of taking the tensors."""
    async with support.impatient_ends(subject) as made:
        await made.prepare()
        made.start(made.send(support.numbers(), version=2))
        receiving = made.receive(0)
        await support.broken(receiving, "receiving version 1 from a sender of version 2")
        await made.finalize()


@check("CKE-026", page=_ORDER)
async def finalize_can_be_repeated(subject: Subject) -> None:
    """``finalize`` can be repeated, and may be called before anything else."""
    async with support.ends(subject) as made:
        for _ in range(2):
            await made.trainers[0].finalize()
            await made.workers[0].finalize()
        await made.prepare()
        for _ in range(2):
            await made.trainers[0].finalize()
        (found,) = await made.sync(support.numbers())
        for _ in range(2):
            await made.trainers[0].finalize()
            await made.workers[0].finalize()
    support.assert_received(support.numbers(), found, "after several finalize")


_BREAKS = "docs/plugins/checkpoint_engine.md#failures"
_LEFT = "docs/plugins/checkpoint_engine.md#what-is-left"


class _Broken(Exception):
    """The error of a training engine that fails while it exports."""


def _breaking(tensors: dict[str, torch.Tensor]) -> support.Weights:
    yield from list(tensors.items())[:3]
    raise _Broken("the export fails")


@check("CKE-030", page=_BREAKS)
async def a_failing_sender_ends_its_receivers(subject: Subject) -> None:
    """If the weights' generator raises, the sender and every receiver raise within the deadline."""
    for settings in support.bucket_settings(subject)[:2]:
        async with support.impatient_ends(subject, 2, **settings) as made:
            await made.prepare()
            receiving = made.receiving()
            sending = made.send(_breaking(support.numbers()))
            await support.broken(sending, "a sender whose generator raises", Exception)
            await made.finalize()
            for worker, task in enumerate(receiving):
                await support.broken(task, f"worker {worker} of a sender whose generator raises")


@check("CKE-031", page=_BREAKS)
async def a_receiver_that_leaves_breaks_the_transfer(subject: Subject) -> None:
    """If a receiver fails half-way and finalizes, the sender raises within the deadline."""

    async def fail(engine: object, arguments: object) -> None:
        receiver = WeightReceiver(engine)  # type: ignore[arg-type]
        async with aclosing(receiver.tensors(arguments, 1)) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                raise OSError("the worker's disk is full")

    async with support.impatient_ends(subject, 2) as made:
        await made.prepare()
        failing = made.start(fail(made.workers[1], made.topology.rollout[1]))
        other = made.start(made.receive(0))
        sending = made.send(support.numbers(60))
        await support.broken(sending, "sending to a receiver that fails")
        await support.broken(failing, "the receiver that fails", OSError)
        await made.finalize()
        with suppress(AssertionError):
            await support.broken(other, "the receiver beside the one that fails", Exception)


def _names(error: BaseException, worker: int) -> bool:
    """Return whether a message names a worker by its number; times and numbers of transfers do not count."""
    return re.search(rf"(?<![\w.-]){worker}(?![\w.]|-\w)", re.sub(r"[\d.]+ s\b", "", str(error))) is not None


@check("CKE-032", page=_BREAKS)
async def a_silent_receiver_is_named(subject: Subject) -> None:
    """If a receiver connects and then takes nothing, the sender raises within the deadline and gives its number."""
    seconds = support.silence_seconds(subject)
    async with support.ends(subject, 3, seconds=seconds) as made:
        await made.prepare()
        for worker in (0, 1):
            made.start(made.receive(worker))
        silent = WeightReceiver(made.workers[2]).tensors(made.topology.rollout[2], 1)
        drawing = made.start(anext(silent))
        sending = made.send(support.numbers(60))
        error = await support.broken(sending, "sending to a receiver that takes nothing", seconds=seconds)
        assert _names(error, 2), f"the error does not name worker 2: {error}"
        await made.finalize()
        await support.ended([drawing])
        await silent.aclose()


@check("CKE-033", page=_BREAKS)
async def a_receiver_that_never_comes_is_named(subject: Subject) -> None:
    """If a receiver never connects, the sender raises DeadlineExceeded within the deadline and gives its number."""
    seconds = support.silence_seconds(subject)
    async with support.ends(subject, 3, seconds=seconds) as made:
        await made.prepare()
        for worker in (0, 1):
            made.start(made.receive(worker))
        sending = made.send(support.numbers())
        what = "sending to a receiver that never comes"
        error = await support.broken(sending, what, DeadlineExceeded, seconds=seconds)
        assert _names(error, 2), f"the error does not name worker 2: {error}"
        await made.finalize()


@check("CKE-034", page=_BREAKS)
async def a_silent_sender_is_named(subject: Subject) -> None:
    """If a sender never sends, its receivers raise DeadlineExceeded within the deadline and name the sender."""
    seconds = support.silence_seconds(subject)
    async with support.ends(subject, worker_seconds=seconds) as made:
        await made.prepare()
        receiving = made.receive(0)
        what = "receiving from a sender that never sends"
        error = await support.broken(receiving, what, DeadlineExceeded, seconds=seconds)
    named = re.search(r"sender|trainer|rank", str(error))
    assert named, f"the error does not name the sender (or trainer, or rank): {error}"


@check("CKE-035", page=_BREAKS)
async def a_sender_that_goes_ends_its_receivers(subject: Subject) -> None:
    """If a sender finalizes without having sent everything, its receivers raise within the deadline."""
    async with support.impatient_ends(subject, 2) as made:
        await made.prepare()
        receiving = made.receiving()
        await _settle()
        await made.finalize()
        for worker, task in enumerate(receiving):
            await support.broken(task, f"worker {worker} of a sender that goes")


@check("CKE-036", page=_BREAKS)
async def transfers_go_on_after_a_failure(subject: Subject) -> None:
    """After a transfer broke off and both ends finalized, the same objects can make the next one."""
    async with support.ends(subject) as made:
        await made.prepare()
        receiving = made.start(made.receive(0))
        with suppress(Exception):
            sending = made.send(_breaking(support.numbers()))
            await within(support.BREAK_SECONDS, sending, "a sender that raises")
        await made.finalize()
        await support.ended([receiving])
        (found,) = await made.sync(support.numbers(seed=9), 2)
    support.assert_received(support.numbers(seed=9), found, "after a transfer that broke off")


@check("CKE-050", page=_LEFT)
def transfers_leave_nothing(subject: Subject) -> None:
    """After ``finalize`` no task, thread, process, open file, socket or shared memory is left."""

    async def life(folder: Path) -> None:
        async with support.ends(subject, workers=2) as made:
            await made.sync(support.numbers())
        await _settle()

    assert_nothing_left(life, subject.folder)


@check("CKE-051", page=_LEFT)
def failures_leave_nothing(subject: Subject) -> None:
    """After a transfer that broke off and ``finalize``, nothing is left, either."""

    async def life(folder: Path) -> None:
        async with support.impatient_ends(subject, 2) as made:
            await made.prepare()
            made.receiving()
            with suppress(Exception):
                sending = made.send(_breaking(support.numbers()))
                await within(support.BREAK_SECONDS + support.GRACE_SECONDS, sending, "a sender that raises")
        await _settle()

    assert_nothing_left(life, subject.folder)


async def _settle() -> None:
    """Let pending callbacks run: closing a connection takes a few turns of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)
