"""What a backend holds, compared with what the queue knows.

Backends that do not list their keys yet (:meth:`keys`) are asked for what they have lost; this second way goes with
the method ``lost`` of the backend's contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from jackfield.abc.transfer_queue import GetRequest, TransferQueueBackend
from jackfield.queue.meta import group_of
from jackfield.queue.state import State

__all__ = ["KeysRequest", "KeysResult", "lost_samples", "orphans"]


@attrs.frozen(kw_only=True)
class KeysRequest:
    """List the samples of a partition, or of all."""

    partition: str | None = None


@attrs.frozen(kw_only=True, eq=False)
class KeysResult:
    """What is kept: by partition and key, the columns that are there."""

    samples: Mapping[tuple[str, str], tuple[str, ...]]


async def _listed(backend: Any) -> Mapping[tuple[str, str], tuple[str, ...]] | None:
    if not hasattr(backend, "keys"):
        return None
    found: KeysResult = await backend.keys(KeysRequest())
    return found.samples


async def lost_samples(backend: TransferQueueBackend, state: State) -> set[str]:
    """Find the samples that the queue knows and whose values the backend does not have any more."""
    listed = await _listed(backend)
    if listed is not None:
        known = _known(state)
        return {key for name, key, columns in known if not set(columns) <= set(listed.get((name, key), ()))}
    places: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, key, columns in _known(state):
        places.setdefault((name, columns), []).append(key)
    lost: set[str] = set()
    for (name, columns), keys in places.items():
        lost |= set((await backend.lost(GetRequest(partition=name, keys=tuple(keys), columns=columns))).keys)
    return lost


async def orphans(backend: TransferQueueBackend, state: State) -> dict[str, list[str]]:
    """Find the keys, by partition, that the backend has and the queue does not know: of workers that died."""
    found: dict[str, list[str]] = {}
    for partition, key in await _listed(backend) or ():
        group = state.groups.get(group_of(key))
        if not state.knows(key) and (group is None or group.state != "open"):
            found.setdefault(partition, []).append(key)
    return found


def _known(state: State) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for group in state.groups.values():
        for sample in group.samples.values():
            yield group.partition.name, sample.key, group.partition.names(sample.columns)
