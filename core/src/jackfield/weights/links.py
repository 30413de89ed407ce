"""Weights from every rank: a transfer for each link of a plan (:mod:`jackfield.sdk.slices`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from jackfield.abc.checkpoint_engine import Topology, TopologyRequest
from jackfield.abc.engine import Box
from jackfield.sdk.slices import Link, part_of

if TYPE_CHECKING:
    import torch

    from jackfield.weights import Tensors, WeightSender, WeightSource

#: A training engine's ``get_local_param``.
LocalSource: TypeAlias = Callable[[], "Generator[tuple[Box, torch.Tensor], None, None] | None"]


@attrs.define(eq=False)
class LinkSender:
    """Sends what one rank has of each tensor, with a sender of its own for each link."""

    _make: Callable[[WeightSource], WeightSender]  #: makes a sender that is the only rank
    _source: LocalSource
    _senders: dict[Link, WeightSender] = attrs.field(factory=dict, init=False)  #: kept between transfers
    _topologies: list[Topology] = attrs.field(factory=list, init=False)  #: of the transfer, by link

    def layout(self) -> tuple[Box, ...] | None:
        """Return what the rank has."""
        return None if (weights := self._source()) is None else tuple(box for box, _ in weights)

    def open(self, links: tuple[Link, ...]) -> None:
        """Use these links; those that were used before keep their senders."""
        before = self._senders
        self._senders = {link: before.get(link) or self._make(lambda link=link: self._parts(link)) for link in links}

    def _parts(self, link: Link) -> tuple[Tensors, None]:
        wanted: dict[str, list[Box]] = {}
        for piece in link.pieces:
            wanted.setdefault(piece.name, []).append(piece)

        def parts() -> Tensors:
            for box, tensor in self._source() or ():
                for piece in wanted.get(box.name, ()):
                    yield str(piece), part_of(tensor, box, piece)

        return parts(), None

    async def prepare(self) -> list[list[Mapping[str, Any]]]:
        """Listen with every link; return what workers connect with, by link and worker."""
        self._topologies = []
        for link, sender in self._senders.items():
            prepared = await sender.prepare()
            request = TopologyRequest(trainer_metadata=(prepared.metadata,), rollout_workers=len(link.workers))
            self._topologies.append(await sender.build_topology(request))
        return [list(topology.rollout) for topology in self._topologies]

    async def transfer(self, version: int) -> list[tuple[dict[str, str], int]]:
        """Send over all links; return digests and bytes by link. A failure of one ends all."""
        try:
            async with asyncio.TaskGroup() as group:
                places = zip(self._senders.values(), self._topologies, strict=True)
                running = [group.create_task(each.transfer(place.trainer[0], version, None)) for each, place in places]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others are consequences
        return [task.result() for task in running]

    async def finalize(self) -> None:
        """Release the resources of all links."""
        for sender in self._senders.values():
            await sender.finalize()


async def connect_links(
    senders: Sequence[WeightSender], links: Sequence[Link], workers: int
) -> tuple[Mapping[str, Any], ...]:
    """Let all ranks listen; return what each worker connects with."""
    found: list[list[Mapping[str, Any]]] = [[] for _ in range(workers)]
    for rank, sender in enumerate(senders):
        own = [link for link in links if link.rank == rank]
        for link, places in zip(own, await sender.prepare_links(), strict=True):
            for number, (worker, place) in enumerate(zip(link.workers, places, strict=True)):
                found[worker].append({"arguments": place, "worker": number, "workers": len(link.workers)})
    return tuple({"links": each} for each in found)


@attrs.frozen
class SentOver:
    """What ranks have sent over links."""

    digests: list[Mapping[str, str]]  #: of the pieces, by worker
    bytes: Mapping[str, int]  #: by link, such as ``0-1`` for rank 0 and worker 1

    @property
    def all(self) -> dict[str, str]:
        """The digests of all pieces."""
        return {name: found for digests in self.digests for name, found in digests.items()}

    @property
    def most(self) -> int:
        """Bytes sent to the worker that got the most."""
        totals = [0] * len(self.digests)
        for link, sent in self.bytes.items():
            totals[int(link.partition("-")[2])] += sent
        return max(totals)


def sent_over(links: Sequence[Link], results: Sequence[list[tuple[dict[str, str], int]]], workers: int) -> SentOver:
    """Sum up the results of :meth:`LinkSender.transfer`, by rank."""
    digests, sent = [dict[str, str]() for _ in range(workers)], dict[str, int]()
    for rank in sorted({link.rank for link in links}):
        for link, (found, size) in zip([each for each in links if each.rank == rank], results[rank], strict=True):
            for worker in link.workers:
                digests[worker] |= found
                sent[f"{rank}-{worker}"] = size
    return SentOver(list(digests), sent)
