"""The promotion of a model that passed its evaluation, and replicas that load it one after another."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.rollout import SamplingParams
from jackfield.algorithms.settings import AlgorithmSettings, CriticSettings
from jackfield.cluster.pool import ReplicaPool
from jackfield.compose.builder import RunBuilder
from jackfield.compose.workers import WorkerFactory
from jackfield.config import RunConfig
from jackfield.config.data import DataConfig
from jackfield.config.evaluation import EvaluationConfig
from jackfield.config.schedule import ScheduleConfig
from jackfield.config.sections import (
    MixingConfig,
    PluginSection,
    QueueConfig,
    WeightsConfig,
)
from jackfield.errors import ConfigError, JackfieldError, RunError
from jackfield.files import replace_file
from jackfield.observe import ObserveSettings
from jackfield.routing import Replica
from jackfield.settings import structure
from jackfield.trainer.checkpoint import Checkpoint
from jackfield.trainer.trainer import Trainer
from jackfield.weights import WeightSender, WeightSynchronizer

if TYPE_CHECKING:
    import torch

_FILE = "promoted.json"  #: in the folder of the server
_LOOK_SECONDS = 0.5  #: between two looks at it
_AUTO = PluginSection(name="auto")


@attrs.frozen(kw_only=True)
class Promoted:
    """A promoted model."""

    version: int = 0  #: weight version in the replicas; 0: the model that they begin with
    model: str  #: a Hugging Face folder
    score: float | None = None  #: of its evaluation


def served_folder(folder: str | Path) -> Path:
    """Return the folder in which the server of a run's configuration writes."""
    return Path(folder) / "serve"


def promote(run: Path, served: Path, threshold: float) -> Promoted:
    """Name the model of a finished run as the one to serve.

    Raise ``run.not-promoted`` if the run has not finished, or its last evaluation, which has to be that of the last
    step, has a score below ``threshold``.
    """
    model, lines = (run / "model").resolve(), run / "metrics.jsonl"
    expected = f"a finished run whose last evaluation has a score of {threshold:g} at least"
    details = {"code": "run.not-promoted", "where": str(run), "expected": expected}
    if not (run / "finished.json").is_file() or not (model / "config.json").is_file() or not lines.is_file():
        raise RunError("the run has no model yet", found="no finished run", fix="let it finish", **details)
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    last = max((line["step"] for line in records if line["kind"] == "step"), default=0)
    scores = [line["score"] for line in records if line["kind"] == "evaluation" and line["step"] == last]
    if not scores or not scores[-1] >= threshold:
        found = f"score {scores[-1]:g} after step {last}" if scores else f"no evaluation after step {last}"
        raise RunError("the model is not good enough", found=found, fix="train on, or lower --score", **details)
    if not served.is_dir():
        what, fix = "there is no such folder", "give the folder of the run whose file `jackfield serve` has, or make it"
        raise RunError(what, code="run.not-promoted", where=str(served), expected="a run's folder", fix=fix)
    folder = served_folder(served)
    folder.mkdir(exist_ok=True)
    before = read_promoted(folder)
    version = 1 if before is None else before.version + 1
    promoted = Promoted(version=version, model=str(model), score=scores[-1])
    replace_file(folder / _FILE, json.dumps(attrs.asdict(promoted)))
    return promoted


def read_promoted(folder: Path) -> Promoted | None:
    """Return the promoted model that a server's folder names; None if none was promoted."""
    try:
        return structure(Promoted, json.loads((folder / _FILE).read_text(encoding="utf-8")), _FILE)
    except FileNotFoundError:
        return None


def serve_config(config: RunConfig) -> RunConfig:
    """Return the configuration of a server, which shares no file, lock or store with the run."""
    silent: dict[str, Any] = {field.name: False for field in attrs.fields(ObserveSettings) if field.default is True}
    data = config.data
    return attrs.evolve(
        config,
        name=f"{config.name}-serve",
        folder=str(served_folder(config.folder)),
        mode="explore",  # it has replicas and no engine
        model=attrs.evolve(config.model, lora=None),
        data=DataConfig(
            train=data.train or data.eval,
            format=data.format,
            chat_template=data.chat_template,
            tools=data.tools,
            template_options=data.template_options,
        ),
        sampling=SamplingParams(),
        algorithm=AlgorithmSettings(),
        critic=CriticSettings(),
        schedule=ScheduleConfig(),
        checkpoint=attrs.evolve(config.checkpoint, at_end=True, resume=True),
        weights=WeightsConfig(dtype=config.weights.dtype),
        evaluation=EvaluationConfig(),
        mixing=MixingConfig(),
        queue=QueueConfig(),
        transfer_queue=_AUTO,
        checkpoint_engine=_AUTO,
        cluster=attrs.evolve(config.cluster, placement=None, offload=False),
        observe=ObserveSettings(**silent),
        profile=None,
    )


def tensors(folder: str) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the weights of a model folder under their names."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


def shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model folder."""
    return {name: tuple(tensor.shape) for name, tensor in tensors(folder)}


@attrs.define(kw_only=True, eq=False)
class PromotedWeights:
    """Brings promoted models to replicas, one after another, so that the others serve meanwhile.

    A replica also goes on with its requests: it loads weights between two decode steps. It is the weight source of the
    pool, for replicas that join or are restarted.
    """

    config: RunConfig
    folder: Path  #: the server's
    factory: WorkerFactory
    replicas: Sequence[Replica]  #: the pool's own list
    say: Callable[[str], Any]
    takes_turns: bool = attrs.field(default=False, init=False)
    newest: Promoted = attrs.field(init=False)  #: what replicas are to serve
    _loading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with the model of the configuration."""
        self.newest = Promoted(model=self.config.model.path)

    async def follow(self) -> None:
        """Load each newly promoted model, until cancelled. One with other tensors is refused, and not loaded."""
        seen, expected = 0, await asyncio.to_thread(shapes, self.config.model.path)
        while True:
            found = await asyncio.to_thread(read_promoted, self.folder)
            if found is not None and found.version > seen:
                seen = found.version
                if await asyncio.to_thread(shapes, found.model) == expected:
                    await self._take(found)
                else:
                    what = "version %d is not served: %s has other tensors than %s"
                    logging.getLogger("jackfield").error(what, seen, found.model, self.config.model.path)
            await self.factory.clock.sleep(_LOOK_SECONDS)

    async def _take(self, promoted: Promoted) -> None:
        self.newest = promoted
        for replica in list(self.replicas):
            async with self._loading:
                try:
                    await self.load(replica)
                except JackfieldError as error:
                    if not await replica.is_lost(error):  # the pool restarts one that died
                        raise
        self.say(f"serving version {promoted.version}: {promoted.model}")

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Let no replica load a promoted model meanwhile."""
        async with self._loading:
            yield

    async def load(self, replica: Replica) -> None:
        """Load the newest model into a replica, whose receipt proves it."""
        if not self.newest.version:
            return  # it has started with it
        engine, seconds = self.config.checkpoint_engine, self.config.deadlines.sync
        context = CheckpointEngineContext(end="sender", deadline_seconds=seconds)
        plugin = self.factory.registry.load("checkpoint_engine", engine.name)
        sender = WeightSender(plugin.build(engine.settings, context, "checkpoint_engine"), self._source)
        options: Any = {"settings": engine.settings, "deadline_seconds": seconds, "clock": self.factory.clock}
        synchronizer = WeightSynchronizer(senders=[sender], replicas=[replica], name=engine.name, **options)
        await synchronizer.sync(self.newest.version)

    def _source(self) -> tuple[Generator[tuple[str, torch.Tensor], None, None], None]:
        return tensors(self.newest.model), None


@attrs.define(kw_only=True, eq=False)
class ServeBuilder(RunBuilder):
    """Starts the replicas of a run, and serves users in the place of training."""

    say: Callable[[str], Any]
    folder: Path  #: the server's
    explores: bool = False  #: whether it explores the tasks of the run, and ends with them

    async def train(self, checkpoint: Checkpoint | None) -> int:
        """Serve until a stop is requested, or explore; a rollout server without an address for users is refused."""
        if self.explores:
            return await super().train(checkpoint)
        pool = await self.start_replicas()
        assert pool is not None
        weights = self._promoted(pool)
        self.run_loops(pool.keep)
        await self.open_control()
        for replica in pool.members:
            if (address := replica.info.openai_base_url) is None:
                what, fix = "the replicas have no address for users", "set rollout.openai: {}"
                raise ConfigError(what, where="rollout.openai", expected="settings of the address", fix=fix)
            self.say(address)
        self.run_loops(weights.follow)
        with self.stop.boundary(lambda: "without further answers"):
            await self.stop.requested.wait()
        return 0

    async def trainer(self) -> Trainer:
        """Build what takes the explored batches; the replicas follow promoted models meanwhile."""
        trainer, pool = await super().trainer(), self._pool
        assert pool is not None
        self.run_loops(self._promoted(pool).follow)
        return trainer

    def _promoted(self, pool: ReplicaPool) -> PromotedWeights:
        """Return the new source of weights of the pool."""
        options: Any = {"config": self.role.config, "folder": self.folder, "factory": self.factory, "say": self.say}
        pool.source = weights = PromotedWeights(replicas=pool.members, **options)
        return weights
