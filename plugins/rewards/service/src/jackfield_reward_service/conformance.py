"""Fixtures for ``jackfield plugins check``: a small service, and someone who pushes rewards.

Both are processes of their own, which end with the process that asked for them.
"""

from __future__ import annotations

import asyncio
import atexit
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.sdk.rpc import Contract, Server, Service
from jackfield_reward_service.store import Reward, Store

_EXAMPLES = [
    {"solution_str": "4", "ground_truth": "4", "score": 1.0},
    {"solution_str": "5", "ground_truth": "4", "score": 0.0},
]
_LOOK_SECONDS, _END_SECONDS = 0.005, 10.0


def service(folder: Path) -> dict[str, Any]:
    """Return settings of a service with the reward ``equal``, which compares texts."""
    _start("serve", folder)
    return {
        "settings": {"address": str(folder / "address.json"), "served": "equal"},
        "examples": _EXAMPLES,
        "failing": [{"solution_str": "4", "ground_truth": "broken"}],
        "slow": [{"solution_str": "4", "ground_truth": "slow"}],
    }


def lagged(folder: Path) -> dict[str, Any]:
    """Return settings of a folder in which rewards arrive soon.

    There is no slow request: the deadline of a sample that waits is ``wait_seconds``, whatever its request says.
    """
    store = Store(folder)
    store.open(create=True)
    store.close()
    _start("push", folder)
    return {
        "settings": {"folder": str(folder), "poll_seconds": _LOOK_SECONDS},
        "examples": _EXAMPLES,
    }


def _start(what: str, folder: Path) -> None:
    command = [sys.executable, "-m", __name__, what, str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, child)
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise RuntimeError(f"the process for the check of {what} has not started")


def _end(child: subprocess.Popen[str]) -> None:
    with child:  # closes its input, at whose end it ends
        child.communicate(timeout=_END_SECONDS)


class EqualReward(RewardAgent):
    """The reward of the small service: whether the response is the ground truth."""

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Compare the texts."""
        if request.ground_truth == "broken":
            return ScoreResult(status="failed", error="the ground truth is broken", is_final=True)
        if request.ground_truth == "slow":
            await self.context.clock.sleep(request.deadline_seconds)
            return ScoreResult(status="timeout", error="this one takes too long")
        return ScoreResult(score=float(request.solution_str == request.ground_truth))


class _About:
    async def describe(self) -> dict[str, Any]:
        return {"compares": False, "finishes": False, "version": "1"}


async def _serve(folder: Path) -> None:
    scoring = Contract(RewardAgent, ["compute_score", "finish_group", "score_group"])
    services = {
        "reward equal": Service(target=EqualReward(None, RewardContext()), contract=scoring),
        "about equal": Service(target=_About(), contract=Contract(_About, ["describe"])),
    }
    server = Server("a small service", services, Clock(), 30.0, watches=False)
    (await server.listen()).write(folder / "address.json")
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


def _push(folder: Path) -> None:
    ended = threading.Thread(target=sys.stdin.read, daemon=True)
    ended.start()
    store = Store(folder)
    store.open(create=False)
    print("ready", flush=True)
    while ended.is_alive():
        if store.has_changed():
            there = store.pending(10_000)
            store.add([Reward(key=each.key, score=float(each.response == each.ground_truth)) for each in there])
        time.sleep(_LOOK_SECONDS)
    store.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(_serve(Path(sys.argv[2])))
    else:
        _push(Path(sys.argv[2]))
