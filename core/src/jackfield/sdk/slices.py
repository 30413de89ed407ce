"""Weights from every rank: a plan of who sends what, and the receiver of a worker that has parts of tensors.

The plan follows from what ranks and workers have of each tensor, which does not change between weight versions. It
consists of links, each with a transfer of its own, so any checkpoint engine can move weights by it. A piece travels
under the name ``str(box)``, and so do digests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.abc.engine import Box
from jackfield.errors import WeightsError, some
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver, reopen_receiver

if TYPE_CHECKING:
    import torch

    from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest

__all__ = ["Link", "SliceReceiver", "part_of", "plan_links", "reopen_slice_receiver"]


@attrs.frozen(kw_only=True)
class Link:
    """What one rank sends to workers that have the same parts of tensors."""

    rank: int
    workers: tuple[int, ...]
    pieces: tuple[Box, ...]  #: each within one box of the rank


def plan_links(ranks: Sequence[Sequence[Box]], workers: Sequence[Sequence[Box]]) -> tuple[Link, ...]:
    """Plan from what ranks and workers have that each worker gets each of its elements once.

    Of several ranks that have an element, the one with the fewest elements to send so far is chosen. Each name may
    occur once in the layout of a rank or worker. Raises ``weights.missing``, with the tensor, if ranks lack elements.
    """
    audiences: dict[tuple[Box, ...], list[int]] = {}
    for number, boxes in enumerate(workers):
        audiences.setdefault(tuple(boxes), []).append(number)
    owners, _ = _owners(ranks, "engine rank"), _owners(workers, "server worker")
    loads, found = [0] * len(ranks), dict[tuple[int, tuple[int, ...]], list[Box]]()
    for wanted, members in audiences.items():
        for box in wanted:
            near = sorted(owners.get(box.name, ()), key=lambda owner: loads[owner[0]])
            for rank, piece in _cover(box, near, "engine rank"):
                loads[rank] += math.prod(piece.length) * len(members)
                found.setdefault((rank, tuple(members)), []).append(piece)
    return tuple(Link(rank=rank, workers=to, pieces=tuple(pieces)) for (rank, to), pieces in sorted(found.items()))


def check_layouts(info: ServerInfo, ranks: Sequence[Sequence[Box]]) -> None:
    """Refuse a replica whose workers together lack some of the weights: what they lack would silently stay old."""
    layouts, who = info.weight_layouts, f"replica {info.replica} worker"
    if layouts and len(layouts) != info.workers:
        raise WeightsError(f"there are {len(layouts)} layouts of {info.workers} {who}s", fix="give each one, or none")
    owners = _owners(layouts, who)
    for box in {box.name: box for boxes in (*ranks, *layouts) if layouts for box in boxes}.values():
        whole = attrs.evolve(box, start=(0,) * len(box.shape), length=box.shape)
        tuple(_cover(whole, owners.get(box.name, ()), who))  # raises if something is left


def _owners(layouts: Sequence[Sequence[Box]], who: str) -> dict[str, list[tuple[int, Box]]]:
    """Return boxes by name, each with the number of its layout; refuse layouts that cannot be."""
    found: dict[str, list[tuple[int, Box]]] = {}
    for number, box in ((number, box) for number, boxes in enumerate(layouts) for box in boxes):
        own, sides = found.setdefault(box.name, []), zip_longest(box.start, box.length, box.shape, fillvalue=-1)
        inside = all(0 <= start <= start + length <= size for start, length, size in sides)
        if not inside or (own and own[-1][0] == number):
            message = f"{who} {number} names {box.name!r} " + ("twice" if inside else "with a part that is not in it")
            raise WeightsError(message, where=box.name, found=repr(box))
        own.append((number, box))
    return found


def _cover(box: Box, owners: Sequence[tuple[int, Box]], who: str) -> Iterator[tuple[int, Box]]:
    """Yield pieces that make up a box, each with the number of an owner; earlier owners come first."""
    left = [box]
    for number, theirs in owners:
        if theirs.shape != box.shape:
            message = f"{who} {number} has {box.name!r} in another shape than others"
            raise WeightsError(message, where=str(box), expected=box.shape, found=theirs.shape)
        rest: list[Box] = []
        for part in left:
            piece = part if 0 in part.length else _common(part, theirs)
            if piece is None:
                rest.append(part)
            else:
                yield number, piece
                rest += _without(part, piece)
        left = rest
    if left:
        raise WeightsError(f"{who}s lack {left[0]}", code="weights.missing", where=box.name)


def _common(one: Box, other: Box) -> Box | None:
    """Return what is in both boxes of a tensor; None: nothing."""
    start = tuple(map(max, one.start, other.start))
    ends = ([first + length for first, length in zip(box.start, box.length, strict=True)] for box in (one, other))
    length = tuple(end - first for first, end in zip(start, map(min, *ends), strict=True))
    return attrs.evolve(one, start=start, length=length) if all(each > 0 for each in length) else None


def _without(box: Box, piece: Box) -> Iterator[Box]:
    """Yield boxes that make up the rest of a box without a piece of it."""
    start, length = list(box.start), list(box.length)
    for dim, (first, size) in enumerate(zip(piece.start, piece.length, strict=True)):
        for begin, end in ((start[dim], first), (first + size, start[dim] + length[dim])):
            if begin < end:
                starts, lengths = [*start], [*length]
                starts[dim], lengths[dim] = begin, end - begin
                yield attrs.evolve(box, start=tuple(starts), length=tuple(lengths))
        start[dim], length[dim] = first, size


def part_of(tensor: torch.Tensor, box: Box, piece: Box) -> torch.Tensor:
    """Return the view of ``piece`` in a tensor that has ``box``; refuse a tensor of another shape."""
    if tensor.shape != box.length:
        raise WeightsError(f"{box} comes in another shape", expected=box.length, found=tuple(tensor.shape))
    if 0 in piece.length:
        return tensor.new_empty(piece.length)
    sides = zip(piece.start, box.start, piece.length, strict=True)
    return tensor[tuple(slice(first - base, first - base + size) for first, base, size in sides)]


def reopen_slice_receiver(
    last: SliceReceiver | None, request: UpdateWeightsRequest, layout: Sequence[Box], worker: int = 0, **options: Any
) -> SliceReceiver:
    """Create the receiver of a full update for a worker that has ``layout``, as its ``ServerInfo`` says.

    ``worker`` is its number within the replica; ``options`` are those of
    :func:`~jackfield.sdk.receiver.open_receiver`. What the worker's ``last`` receiver has kept is used again.
    """
    if not 0 <= worker < (count := len(request.connect)):
        message = f"the update is for {count} workers of this replica, and there is no worker {worker} among them"
        raise WeightsError(message, fix="say the number of workers in ServerInfo.workers")
    arguments = request.connect[worker]
    links: Sequence[Mapping[str, Any]] = arguments.get("links", ())
    own = {"arguments": arguments, "worker": request.first_worker + worker, "workers": request.total_workers}
    ends, kept = [], [] if last is None else [receiver for receiver, _ in last._ends]
    for number, link in enumerate(links or [own]):
        fields = {"connect": (link["arguments"],), "first_worker": link["worker"], "total_workers": link["workers"]}
        before = kept[number] if number < len(kept) else None
        ends.append((reopen_receiver(before, attrs.evolve(request, **fields), **options), link["arguments"]))
    return SliceReceiver(ends, {box.name: box for box in layout}, bool(links))


@attrs.define(eq=False)
class SliceReceiver:
    """The receiving end of a worker, which has a part of each tensor."""

    _ends: Sequence[tuple[WeightReceiver, Mapping[str, Any]]]  #: by link, with what each connects with
    _layout: Mapping[str, Box]
    _sliced: bool  #: whether pieces come, and not whole tensors
    _pieces: dict[str, list[Box]] = attrs.field(factory=dict, init=False)  #: that have come, by name of the tensor

    @property
    def digests(self) -> dict[str, str]:
        """The digests of what was received: of pieces, or of whole tensors, by name."""
        return {name: found for receiver, _ in self._ends for name, found in receiver.digests.items()}

    def prove(self, name: str, loaded: torch.Tensor) -> dict[str, str]:
        """Return digests for a receipt: of the pieces where they are in a loaded part of a tensor.

        Of a tensor that came as a whole, the digest is that of what came.
        """
        if not self._sliced:
            return {name: self._ends[0][0].digests[name]}
        box = self._layout[name]
        return {str(piece): digest(part_of(loaded, box, piece)) for piece in self._pieces[name]}

    async def tensors(self, version: int) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Connect to all ranks, yield the worker's part of each tensor once all of it has come, then disconnect.

        A tensor is valid until the next one is drawn. Raises what :meth:`WeightReceiver.tensors` raises, and
        ``weights.missing`` for what does not make up the worker's layout.
        """
        coming: dict[str, torch.Tensor] = {}  # not complete
        self._pieces, complete = {}, set[str]()
        streams = [receiver.tensors(arguments, version) for receiver, arguments in self._ends]
        async with aclosing(_merged(streams)) as merged:
            async for label, tensor in merged:
                name, piece = self._place(label, tensor)
                box = self._layout[name]
                if not self._sliced or piece == box:
                    coming[name] = part_of(tensor, piece, box)
                else:
                    if name not in coming:
                        coming[name] = tensor.new_empty(box.length)
                    part_of(coming[name], box, piece).copy_(tensor)
                pieces = self._pieces.setdefault(name, [])
                pieces.append(piece)
                if not self._sliced or sum(math.prod(each.length) for each in pieces) == math.prod(box.length):
                    complete.add(name)
                    yield name, coming.pop(name)
        if lacking := [name for name in self._layout if name not in complete]:
            raise WeightsError(f"parts of tensors did not arrive: {some(lacking)}", code="weights.missing")

    def _place(self, label: str, tensor: torch.Tensor) -> tuple[str, Box]:
        """Return the name of a tensor, and the box of what came of it."""
        name, bracket, ranges = label.rpartition("[") if self._sliced else (label, "", "")
        box, shape = self._layout.get(name), tuple(tensor.shape)
        if box is None:
            raise WeightsError(f"{label!r} came, of which this worker has nothing", code="weights.missing", where=label)
        starts = (each.partition(":")[0] for each in ranges.rstrip("]").split(", ") if each)
        start = tuple(int(each) if each.isdecimal() else -1 for each in starts) if bracket else (0,) * len(shape)
        piece = Box(name=name, shape=box.shape, start=start, length=shape)
        fits = len(start) == len(shape) == len(box.shape) and (shape == box.shape or self._sliced)
        if not fits or (self._sliced and not (str(piece) == label and (0 in shape or _common(piece, box) == piece))):
            raise WeightsError(f"{label!r} does not fit what this worker has", expected=str(box), found=shape)
        return name, piece


async def _merged(
    streams: Iterable[AsyncGenerator[tuple[str, torch.Tensor], None]],
) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
    """Yield from streams that run at once; one that fails ends all. An item is valid until the next one is drawn."""
    waiting = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    kept = list(waiting.values())
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream, item = waiting.pop(task), task.result()
                if item is not None:
                    yield item
                    waiting[asyncio.ensure_future(anext(stream, None))] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in kept:
            await stream.aclose()
