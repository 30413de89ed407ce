"""Two ranks that have rows of each tensor send to two workers that keep halves, each in a process of its own.

Proxies in the test's process count what passes each link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt
from jackfield.clock import Clock
from jackfield.sdk.slices import part_of
from jackfield.weights import Replica, WeightSynchronizer
from jackfield_links import SECONDS, RankEnd, Remote, WorkerEnd, parallel, tensor, whole
from jackfield_proxy import Proxy
from jackfield_testing import in_loop

pytestmark = pytest.mark.timeout(180)

SETTINGS = {"transport": "tcp", "encrypted": False, "bucket_bytes": 1 << 18}


@attrs.define(eq=False)
class Proxied:
    """A replica of two workers, whose connections pass proxies that count."""

    workers: Sequence[Remote]
    proxies: dict[tuple[str, int], Proxy] = attrs.field(factory=dict)  #: by address of the sender, and worker
    loaded: list[dict[str, torch.Tensor]] = attrs.field(factory=list)

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        connect = [await self.proxied(worker, place) for worker, place in enumerate(request.connect)]
        behind = attrs.evolve(request, connect=tuple(connect))
        found = await asyncio.gather(*(worker.ask("update", behind) for worker in self.workers))
        self.loaded = [loaded for _, loaded in found]
        return WeightReceipt(version=request.version, replica=0, workers=tuple(receipt for receipt, _ in found))

    async def proxied(self, worker: int, place: Any) -> dict[str, Any]:
        links = []
        for link in place["links"]:
            proxy = self.proxies[link["arguments"]["data"], worker] = Proxy()
            links.append({**link, "arguments": {**link["arguments"], **await proxy.before(link["arguments"])}})
        return {**place, "links": links}

    async def carried(self) -> list[int]:
        """Bytes by link, of the last transfer."""
        found = sorted(sum(proxy.carried) for proxy in self.proxies.values())
        for proxy in self.proxies.values():
            await proxy.close()
        self.proxies.clear()
        return found


@in_loop
async def test_bytes_per_link_are_those_of_the_plan() -> None:
    """Each worker has exactly its halves; a link carries its pieces and nothing else, in a second version, too."""
    ranks = [Remote.spawn(RankEnd, number, "zmq", SETTINGS) for number in range(2)]
    workers = [Remote.spawn(WorkerEnd, number, "zmq", SETTINGS) for number in range(2)]
    try:
        replica = Proxied(workers)
        info = ServerInfo(replica=0, workers=2, weight_layouts=(parallel(0), parallel(1)))
        started: Any = Replica(replica, info)  # type: ignore[arg-type]
        senders: Any = ranks
        synchronizer = WeightSynchronizer(senders, [started], "zmq", Clock(), SETTINGS, deadline_seconds=SECONDS)
        up, down, norm = 4 * 2 * 1024 * 512, 4 * 2 * 512 * 1024, 2 * 512
        near, far = up // 2 + down // 4 + norm // 2, down // 4 + norm // 2
        for version in (1, 2):
            report = await synchronizer.sync(version)
            for worker, loaded in enumerate(replica.loaded):
                for own in parallel(worker):
                    wanted = part_of(tensor(own.name, version), whole(own.name), own)
                    assert torch.equal(wanted, loaded[own.name])
            wanted_bytes = {"0-0": near, "0-1": far, "1-0": far, "1-1": near}
            assert wanted_bytes == report.link_bytes
            for planned, carried in zip(sorted(wanted_bytes.values()), await replica.carried(), strict=True):
                assert planned <= carried < planned * 1.02 + 4096
    finally:
        for end in (*ranks, *workers):
            end.close()
