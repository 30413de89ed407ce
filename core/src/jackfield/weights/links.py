"""Weights from every rank: a transfer for each link of a plan (:mod:`jackfield.sdk.slices`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from jackfield.abc.checkpoint_engine import Topology, TopologyRequest
from jackfield.abc.engine import Box
from jackfield.errors import EngineError, JackfieldError
from jackfield.sdk.slices import Link, part_of

if TYPE_CHECKING:
    import torch

    from jackfield.weights import Tensors, WeightSender, WeightSource

    #: A training engine's ``get_local_param``.
    LocalSource: TypeAlias = Callable[[], Generator[tuple[Box, torch.Tensor], None, None] | None]


@contextmanager
def engine_errors(what: str, where: str | None = None) -> Iterator[None]:
    """Turn what an engine raises into an ``EngineError`` that says so, unless it is a ``JackfieldError``."""
    try:
        yield
    except JackfieldError:
        raise
    except Exception as error:
        raise EngineError(f"{what} raised {type(error).__name__}: {error}", where=where) from error


@attrs.define(eq=False, kw_only=True)
class LinkSender:
    """Sends what one rank has of each tensor, with a sender of its own for each link."""

    _local: LocalSource = lambda: None
    _make: Callable[[WeightSource], WeightSender] | None = None  #: makes a sender that is the only rank
    _links: dict[Link, WeightSender] = attrs.field(factory=dict, init=False)  #: kept between transfers
    _topologies: list[Topology] = attrs.field(factory=list, init=False)  #: of the transfer, by link

    async def layout(self) -> tuple[Box, ...] | None:
        """Return what this rank has of each tensor; None: it sends whole tensors only."""
        with engine_errors("the actor engine's get_local_param"):
            return None if (weights := self._local()) is None else tuple(box for box, _ in weights)

    async def open_links(self, links: tuple[Link, ...]) -> None:
        """Use these links of this rank; those that were used before keep their senders."""
        assert self._make is not None, "it has a layout"
        self._links = {link: self._links.get(link) or self._make(self._source_of(link)) for link in links}

    def _source_of(self, link: Link) -> WeightSource:
        wanted: dict[str, list[Box]] = {}
        for piece in link.pieces:
            wanted.setdefault(piece.name, []).append(piece)

        def parts() -> Tensors:
            for box, tensor in self._local() or ():
                for piece in wanted.get(box.name, ()):
                    yield str(piece), part_of(tensor, box, piece)

        return lambda: (parts(), None)

    async def prepare_links(self) -> list[list[Mapping[str, Any]]]:
        """Listen for workers; return what they connect with, by link and worker."""
        self._topologies = []
        for link, sender in self._links.items():
            prepared = await sender.prepare()
            request = TopologyRequest(trainer_metadata=(prepared.metadata,), rollout_workers=len(link.workers))
            self._topologies.append(await sender.build_topology(request))
        return [list(topology.rollout) for topology in self._topologies]

    async def transfer_links(self, version: int) -> list[tuple[dict[str, str], int]]:
        """Send over all links at once; return digests of pieces by name, and bytes, by link. A failure ends all."""
        try:
            async with asyncio.TaskGroup() as group:
                places = zip(self._links.values(), self._topologies, strict=True)
                running = [group.create_task(each.transfer(place.trainer[0], version, None)) for each, place in places]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others are consequences
        return [task.result() for task in running]


async def connect_links(
    senders: Sequence[LinkSender], links: Sequence[Link], workers: int
) -> tuple[Mapping[str, Any], ...]:
    """Let all ranks listen; return what each worker connects with."""
    found: list[list[Mapping[str, Any]]] = [[] for _ in range(workers)]
    for rank, sender in enumerate(senders):
        own = [link for link in links if link.rank == rank]
        for link, places in zip(own, await sender.prepare_links(), strict=True):
            for number, (worker, place) in enumerate(zip(link.workers, places, strict=True)):
                found[worker].append({"arguments": place, "worker": number, "workers": len(link.workers)})
    return tuple({"links": each} for each in found)


def sent_over(
    links: Sequence[Link], results: Sequence[list[tuple[dict[str, str], int]]], workers: int
) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Sum up what ranks return: digests of pieces by worker, and bytes by link, such as ``0-1``: rank 0, worker 1."""
    digests, ranks = [dict[str, str]() for _ in range(workers)], [iter(each) for each in results]
    sent: dict[str, int] = {}
    for link in links:
        found, size = next(ranks[link.rank])
        for worker in link.workers:
            digests[worker] |= found
            sent[f"{link.rank}-{worker}"] = size
    return digests, sent
