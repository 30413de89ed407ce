"""Plugins that sleep for the times of a workload: an engine, a rollout server and a reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import attrs
from _schedules_bound import RECIPE, TRINITY, Workload

from jackfield.abc import ABI_VERSIONS, engine, rollout
from jackfield.abc.reward import RewardAgent, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.plugins import Manifest, Registry, installed
from jackfield.plugins.registry import PluginRecord
from jackfield.sdk.receiver import open_receiver
from jackfield.settings import option

NAME = "sleeping"  #: of the three plugins
SLOW_PROMPT = 10  #: tokens; longer prompts are those of stragglers
_WORKLOADS = {work.name: work for work in (RECIPE, *TRINITY)}


@attrs.frozen(kw_only=True)
class Settings:
    """The workload, and the scale of its seconds."""

    workload: str = option(help="its name")
    scale: float = option(help="seconds of the workload in one second")

    @property
    def work(self) -> Workload:
        """The workload in its own seconds."""
        return _WORKLOADS[self.workload]


@attrs.define(eq=False)
class RolloutDevice:
    """A device that works on rollouts one after the other, and stands still during a sync.

    It has a time of its own, which does not advance while it stands still. So what a late timer costs a rollout does
    not delay those after it.
    """

    clock: Clock
    work: Workload
    scale: float = 1.0
    _stood: float = 0.0  #: seconds of ended syncs
    _stands: float | None = None  #: when the present sync began
    _free: float = 0.0  #: the device's time at which all work that it has is done
    _moves: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._moves.set()

    @property
    def now(self) -> float:
        """The device's time."""
        return (self.clock.time() if self._stands is None else self._stands) - self._stood

    async def generate(self, *, slow: bool) -> None:
        """Take the time of a rollout, with the tail of a straggler if it is ``slow``."""
        work, now = self.work, self.now
        if work.at_once:
            until = now + work.generate / self.scale
        else:
            self._free = until = max(now, self._free) + work.generate / (work.groups * work.rollouts) / self.scale
        while (left := until - self.now) > 1e-6:
            await self._moves.wait()
            await self.clock.sleep(left)
        if slow:
            await self.clock.sleep(work.tail / self.scale)

    async def sync(self) -> None:
        """Stand still for the time of a sync."""
        self._stands = began = self.clock.time()
        self._moves.clear()
        await self.clock.sleep(self.work.sync / self.scale)
        self._stood += self.clock.time() - began
        self._stands = None
        self._moves.set()


class SleepingServer(rollout.BaseRolloutServer):
    """A replica whose answers are two tokens."""

    config: Settings

    def __init__(self, config: Settings, context: rollout.RolloutContext) -> None:
        super().__init__(config, context)
        self.version = 0

    async def start(self) -> rollout.ServerInfo:
        """Serve version 0."""
        self.device = RolloutDevice(self.context.clock, self.config.work, self.config.scale)
        return rollout.ServerInfo(replica=self.context.replica)

    async def generate(self, request: rollout.GenerateRequest) -> rollout.GenerateResult:
        """Answer after the time of a rollout."""
        before = self.version
        await self.device.generate(slow=len(request.prompt_ids) > SLOW_PROMPT)
        tokens = 5 + (request.sampling.seed or 0) % 2, 1
        logs: Any = {"log_probs": (-1.0, -1.0), "weight_versions": (before, self.version)}
        return rollout.GenerateResult(request_id=request.request_id, token_ids=tokens, finish_reason="stop", **logs)

    async def generate_stream(self, request: rollout.GenerateRequest) -> AsyncIterator[rollout.GenerateChunk]:
        """Answer in one piece."""
        yield await self.generate(request)

    async def update_weights(self, request: rollout.UpdateWeightsRequest) -> rollout.WeightReceipt:
        """Receive the weights, and take the time of a sync."""
        receiver, began = open_receiver(request), self.context.clock.time()
        async with aclosing(receiver.tensors(request.connect[0], request.version)) as tensors:
            async for _ in tensors:
                pass
        await self.device.sync()
        self.version, seconds = request.version, self.context.clock.time() - began
        worker = rollout.WorkerReceipt(worker=0, digests=dict(receiver.digests))
        took: Any = {"seconds": seconds, "paused_seconds": seconds}
        return rollout.WeightReceipt(version=self.version, replica=self.context.replica, workers=(worker,), **took)

    async def abort(self, request: rollout.AbortRequest) -> rollout.AbortResult:
        """Have nothing to end."""
        return rollout.AbortResult(request_ids=())

    async def pause(self, request: rollout.PauseRequest) -> rollout.PauseResult:
        """Have nothing to pause."""
        return rollout.PauseResult()

    async def resume(self, request: rollout.ResumeRequest) -> rollout.ResumeResult:
        """Have nothing to resume."""
        return rollout.ResumeResult()

    async def sleep(self, request: rollout.SleepRequest) -> rollout.SleepResult:
        """Have no memory to free."""
        return rollout.SleepResult()

    async def wake_up(self, request: rollout.WakeUpRequest) -> rollout.WakeUpResult:
        """Have no memory to allocate."""
        return rollout.WakeUpResult()

    async def health(self) -> rollout.HealthReport:
        """Report that the replica serves, with its weight version."""
        return rollout.HealthReport(healthy=True, weight_version=self.version)

    async def stop(self) -> None:
        """Have nothing to stop."""


class SleepingEngine(engine.BaseEngine):
    """A model of one tensor, whose passes sleep in proportion to their rows."""

    config: Settings

    def initialize(self) -> None:
        """Have no model to load."""

    @property
    def layout(self) -> engine.EngineLayout:
        """Return the place of the only rank."""
        return engine.EngineLayout()

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Have no mode to change."""
        yield

    eval_mode = disable_adapter = train_mode

    def optimizer_zero_grad(self) -> None:
        """Have no gradients."""

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> engine.EngineOutput:
        """Sleep for the share of these rows in the time of a batch."""
        import torch

        work, rows = self.config.work, int(data.batch_size[0])
        seconds = work.log_probs if forward_only else work.update
        time.sleep(seconds * rows / (work.groups * work.rollouts) / self.config.scale)
        log_probs = torch.nested.nested_tensor([torch.full((2,), -1.0)] * rows, layout=torch.jagged)
        return engine.EngineOutput(log_probs=log_probs, metrics={} if forward_only else {"policy/loss": 0.0})

    def optimizer_step(self) -> float:
        """Return a gradient norm."""
        return 1.0

    def lr_scheduler_step(self) -> float:
        """Return a learning rate."""
        return 1e-6

    def get_per_tensor_param(self) -> tuple[Generator[tuple[str, Any], None, None], Mapping[str, Any] | None]:
        """Export a small tensor."""
        import torch

        return ((name, torch.zeros(4)) for name in ("weight",)), None

    def get_per_tensor_grad(self) -> Generator[tuple[str, Any], None, None]:
        """Have no gradients."""
        yield from ()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Have nothing to move."""

    def save_checkpoint(self, request: engine.SaveCheckpointRequest) -> engine.SaveCheckpointResult:
        """Write an empty folder."""
        Path(request.folder).mkdir(parents=True, exist_ok=True)
        return engine.SaveCheckpointResult(folder=request.folder)

    def load_checkpoint(self, request: engine.LoadCheckpointRequest) -> engine.LoadCheckpointResult:
        """Have nothing to load."""
        return engine.LoadCheckpointResult(folder=request.folder)


class SleepingReward(RewardAgent):
    """A score that takes the time that the workload has drawn for its sample."""

    config: Settings

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score 0 or 1."""
        _, batch, group, _, number, _ = request.idempotency_key.rsplit("/", 5)
        seconds = self.config.work.reward_seconds(int(batch), int(group), int(number)) / self.config.scale
        if seconds:
            await self.context.clock.sleep(seconds)
        return ScoreResult(score=float(request.response_ids[0] % 2))


def registry() -> Registry:
    """Return the installed plugins and those of this file."""
    own, cls = [], {"engine": SleepingEngine, "rollout": SleepingServer, "reward": SleepingReward}
    for kind, each in cls.items():
        manifest = Manifest(
            name=NAME,
            kind=kind,  # type: ignore[arg-type]
            abi=ABI_VERSIONS[kind],
            object=f"{__name__}:{each.__name__}",
            config=f"{__name__}:{Settings.__name__}",
            capabilities={"engine_log_probs": "full"} if kind == "rollout" else {},
        )
        own.append(PluginRecord(name=NAME, kind=kind, distribution="benchmarks", version="0", manifest=manifest))
    return Registry((*installed().records(), *own))
