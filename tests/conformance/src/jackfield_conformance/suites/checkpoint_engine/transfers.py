"""Checks of checkpoint engines: one transfer after the other, and side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import torch

from jackfield_conformance.registry import check
from jackfield_conformance.subject import Subject
from jackfield_conformance.support import checkpoint_engine as support

_ORDER = "docs/plugins/checkpoint_engine.md#order-of-calls"

Weights = Generator[tuple[str, torch.Tensor], None, None]


@check("CKE-020", page=_ORDER)
async def transfers_repeat(subject: Subject) -> None:
    """The same objects make one transfer after the other, each with its own version and values."""
    async with support.ends(subject, workers=2) as made:
        for version in (1, 2, 5):
            tensors = support.numbers(4, seed=version)
            for found in await support.sync(made, tensors, version):
                support.assert_received(tensors, found, f"version {version}")


@check("CKE-021", page=_ORDER)
async def workers_may_change_between_transfers(subject: Subject) -> None:
    """A sender meets another number of workers, new ones, at its next transfer."""
    tensors = support.numbers(4)
    async with support.ends(subject, workers=3) as made:
        await support.sync(made, tensors, 1)
        for version, count in ((2, 1), (3, 4)):
            async with support.ends(subject, workers=count) as others:
                made.workers = others.workers
                for found in await support.sync(made, tensors, version):
                    support.assert_received(tensors, found, f"one of {count} new workers")


@check("CKE-022", page=_ORDER)
async def an_empty_transfer_ends(subject: Subject) -> None:
    """A transfer without any tensor ends at both sides."""
    async with support.ends(subject, workers=2) as made:
        assert await support.sync(made, {}) == [{}, {}], "tensors arrived that were not sent"


@check("CKE-023", page=_ORDER)
async def every_rank_exhausts_its_generator(subject: Subject) -> None:
    """Every trainer rank exhausts its generator, and still each tensor arrives once."""
    tensors, drawn = support.numbers(), [0, 0]

    def counting(rank: int) -> Weights:
        for pair in support.source(tensors):
            yield pair
            drawn[rank] += 1

    async with support.ends(subject, workers=2, ranks=2) as made:
        topology = await made.prepare()
        found = await made.together(
            support.send(made, topology, [counting(0), counting(1)]), support.receive_all(made, topology)
        )
    for each in found:
        support.assert_received(tensors, each, "from two trainer ranks")
    assert drawn == [len(tensors)] * 2, f"of {len(tensors)} tensors the ranks have drawn {drawn}"


@check("CKE-024", page=_ORDER)
async def transfers_side_by_side_do_not_mix(subject: Subject) -> None:
    """Two transfers at the same time, of an actor and a critic, do not mix."""
    one = support.numbers(5, seed=1)
    other = {f"critic.{name}": tensor for name, tensor in support.numbers(9, seed=2).items()}
    async with support.ends(subject) as actor, support.ends(subject) as critic:
        (first,), (second,) = await asyncio.gather(support.sync(actor, one), support.sync(critic, other))
    support.assert_received(one, first, "of the first of two transfers")
    support.assert_received(other, second, "of the second of two transfers")


@check("CKE-025", page=_ORDER)
async def another_version_is_refused(subject: Subject) -> None:
    """A receiver of another version than its sender's raises WeightsError rather than take the tensors."""
    async with support.impatient_ends(subject) as made:
        topology = await made.prepare()
        made.start(support.send(made, topology, [support.source(support.numbers())], 2))
        receiving = support.receive(made.workers[0], topology.rollout[0], 1)
        await support.broken(receiving, "receiving version 1 from a sender of version 2")
        await made.finalize()


@check("CKE-026", page=_ORDER)
async def finalize_can_be_repeated(subject: Subject) -> None:
    """``finalize`` can be repeated, and comes before anything else without harm."""
    async with support.ends(subject) as made:
        for _ in range(2):
            await made.trainers[0].finalize()
            await made.workers[0].finalize()
        await made.prepare()
        for _ in range(2):
            await made.trainers[0].finalize()
        (found,) = await support.sync(made, support.numbers())
        for _ in range(2):
            await made.trainers[0].finalize()
            await made.workers[0].finalize()
    support.assert_received(support.numbers(), found, "after several finalize")
