"""What a backend holds, compared with what the queue knows."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.abc.transfer_queue import KeysRequest, TransferQueueBackend
from jackfield.queue.meta import group_of
from jackfield.queue.state import State


async def lost_samples(backend: TransferQueueBackend, state: State) -> set[str]:
    """Find the samples that the queue knows and whose values the backend does not have any more."""
    there = (await backend.keys(KeysRequest())).samples
    return {key for name, key, columns in _known(state) if not set(columns) <= set(there.get((name, key), ()))}


async def orphans(backend: TransferQueueBackend, state: State) -> dict[str, list[str]]:
    """Find the keys, by partition, that the backend has and the queue does not know: of workers that died."""
    found: dict[str, list[str]] = {}
    for partition, key in (await backend.keys(KeysRequest())).samples:
        group = state.groups.get(group_of(key))
        if not state.knows(key) and (group is None or group.state != "open"):
            found.setdefault(partition, []).append(key)
    return found


def _known(state: State) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for group in state.groups.values():
        for sample in group.samples.values():
            yield group.partition.name, sample.key, group.partition.names(sample.columns)
