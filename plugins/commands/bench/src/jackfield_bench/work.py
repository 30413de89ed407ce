"""The evaluations of a bench. An evaluation that is done is never done again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import SamplingParams
from jackfield.algorithms.settings import AlgorithmSettings, CriticSettings
from jackfield.clock import Clock
from jackfield.compose.builder import RunBuilder
from jackfield.config import RunConfig, as_plain
from jackfield.config.data import DataConfig, DataPaths, paths_of
from jackfield.config.schedule import ScheduleConfig
from jackfield.config.sections import MixingConfig, PluginSection, QueueConfig
from jackfield.errors import ConfigError, DataError, JackfieldError, RunError, did_you_mean
from jackfield.files import digest_of, replace_file, seal, unseal
from jackfield.observe import ObserveSettings
from jackfield.plugins import Registry
from jackfield.trainer.checkpoint import FINISHED_FILE, Checkpoint, CheckpointStore, open_checkpoint
from jackfield.trainer.trainer import Trainer
from jackfield_bench.models import BASE, Model, checkpoint_model
from jackfield_bench.tables import result_line, write_samples

_AUTO = PluginSection(name="auto")
_LOOK_SECONDS = 0.5  #: between two looks at the folder of a run that is followed
#: Sections that change what a model answers or how it is scored. Those of the model and the set are added.
_SECTIONS = ("seed", "agent", "reward", "rollout")


def bench_config(config: RunConfig, registry: Registry, out: Path, sets: Sequence[str], model: Model) -> RunConfig:
    """Return the configuration of a bench, which shares no file, lock, port or store with the run.

    ``sets`` are the names of the sets to evaluate; empty: all. Raise ``config.invalid-value`` for an unknown one,
    ``config.missing-key`` if there is none, and ``data.missing`` for a set without its file. Nothing is trained, so
    algorithm and training data are defaults.
    """
    data, evaluation = config.data, config.evaluation
    files = {} if data.eval is None else {"eval": data.eval}
    files |= {name: each.file for name, each in evaluation.sets.items()}
    if not files:
        fix = "name a file of held-out tasks, or several under evaluation.sets"
        raise config.refusal("data.eval", "there are no held-out tasks", "a file", code="config.missing-key", fix=fix)
    for name in sets:
        if name not in files:
            details = {"where": "--set", "expected": f"one of {', '.join(files)}", "found": name, "fix": "correct it"}
            raise ConfigError(f"the configuration has no set {name!r}{did_you_mean(name, files)}", **details)
    chosen = set(sets or files)
    for name, file in files.items():
        for path in paths_of(file) if name in chosen else ():
            if path.endswith(".jsonl") and not Path(path).is_file():
                what, fix = f"the task file of the set {name!r} does not exist", "check the path"
                raise DataError(
                    what, code="data.missing", where=path, expected="a JSONL file", found="no file", fix=fix
                )
    further = {name: each for name, each in evaluation.sets.items() if name in chosen}
    first = next(name for name in files if name in chosen)
    form = data.format if first == "eval" else further[first].format or data.format
    alone: dict[str, Any] = {}
    for kind, shared in {"transfer_queue": "durable", "checkpoint_engine": "retains_weights"}.items():
        if shared in registry.resolve(config.plugins[kind], kind).usable().capabilities:
            alone[kind] = _AUTO  # a database, or a folder of weights, is the run's
    weights: ModelSpec = config.model
    if not model.checkpoint and model.name != BASE:
        weights = attrs.evolve(weights, path=str(model.folder), lora=None)
    silent: dict[str, Any] = {field.name: False for field in attrs.fields(ObserveSettings) if field.default is True}
    return attrs.evolve(
        config,
        **alone,
        name=f"{config.name}-bench",
        folder=str(out),
        mode="online",
        model=weights,
        data=DataConfig(
            train=files[first],
            eval=data.eval if "eval" in chosen else None,
            format=form,
            chat_template=data.chat_template,
            max_prompt_tokens=data.max_prompt_tokens,
            prompt_overflow=data.prompt_overflow,
            tools=data.tools,
            template_options=data.template_options,
        ),
        sampling=config.sampling if config.mode == "online" else SamplingParams(),
        algorithm=AlgorithmSettings(),
        schedule=ScheduleConfig(),
        critic=CriticSettings(),
        mixing=MixingConfig(),
        evaluation=attrs.evolve(evaluation, every=1, sets=further),
        queue=QueueConfig(),
        cluster=attrs.evolve(config.cluster, metrics_port=None),
        observe=ObserveSettings(**silent),
        profile=None,
    )


@attrs.define(kw_only=True, eq=False)
class BenchBuilder(RunBuilder):
    """Starts actor and replicas as for a run, and evaluates in the place of training."""

    work: Work

    async def train(self, checkpoint: Checkpoint | None) -> int:
        """Do the work; return the number of evaluations."""
        trainer = await self.trainer()
        self.stop.begun = True
        return await self.work.evaluate(trainer)


@attrs.frozen(kw_only=True)
class Follow:
    """The run whose checkpoints are evaluated as they appear."""

    folder: Path
    seconds: float  #: how long to wait for the next checkpoint

    async def next(self, after: int, clock: Clock) -> list[Model]:
        """Return the checkpoints after a step, once there are any; none if the run has finished, or in time."""
        until, store = clock.time() + self.seconds, CheckpointStore(self.folder / "checkpoints")
        while True:
            finished, found = (self.folder / FINISHED_FILE).is_file(), list[Model]()
            for folder in (folder for step, folder in store.folders().items() if step > after):
                with suppress(RunError):  # the run has just removed it
                    found.append(checkpoint_model(folder))
            if found or finished or clock.time() >= until:
                return found
            await clock.sleep(_LOOK_SECONDS)


@attrs.define(kw_only=True, eq=False)
class Work:
    """Evaluates models on sets, and keeps each result in a file as soon as it is there."""

    config: RunConfig  #: of the bench
    models: list[Model]  #: with growing steps; it grows with :attr:`follow`
    say: Callable[[str], None]  #: shows a line of progress
    follow: Follow | None = None  #: None: only the models that there are

    @property
    def sets(self) -> dict[str, DataPaths]:
        """The sets of held-out tasks, by name."""
        files: dict[str, DataPaths] = {} if self.config.data.eval is None else {"eval": self.config.data.eval}
        return files | {name: each.file for name, each in self.config.evaluation.sets.items()}

    def results(self) -> dict[tuple[str, str], dict[str, Any] | None]:
        """Return the result of each model and set; None if it is not there, or was made with other settings."""
        return {(model.name, name): self._result(model, name) for model in self.models for name in self.sets}

    async def evaluate(self, trainer: Trainer) -> int:
        """Evaluate what has no result; return the number of evaluations."""
        count, models = 0, list(self.models)
        while models:
            for model in models:
                count += await self._evaluate_model(model, trainer)
            models = [] if self.follow is None else await self.follow.next(models[-1].step, trainer.role.clock)
            self.models += models
        return count

    async def _evaluate_model(self, model: Model, trainer: Trainer) -> int:
        missing = [name for name in self.sets if self._result(model, name) is None]
        try:
            if missing and model.checkpoint:
                await self._load(model, trainer)
        except RunError as error:
            if self.follow is None or error.code != "run.no-checkpoint":
                raise
            self.say(f"{model.name} is left out: the run has removed it")
            self.models.remove(model)
            return 0
        for name in missing:
            await self._evaluate(model, name, trainer)
        return len(missing)

    async def _load(self, model: Model, trainer: Trainer) -> None:
        """Read a checkpoint's model into the engine, and send its weights to the replicas."""
        assert trainer.sync is not None, "a bench has replicas"
        try:
            await asyncio.to_thread(open_checkpoint, model.folder, "actor/")
            async with trainer.role.train_devices.hold("train"):
                await trainer.actor.load(str((model.folder / "actor").absolute()), model_only=True)
                trainer.role.updated = model.step
                await trainer.sync(model.step)
        except JackfieldError as error:
            if model.folder.is_dir():
                raise
            what, fix = "a checkpoint was removed before it was read", "give the same command again: it goes on with "
            fix += "the checkpoints that are there then; the run keeps more with a larger checkpoint.keep"
            expected = "a checkpoint that stays until it is loaded"
            details = {"where": str(model.folder), "expected": expected, "found": "no folder", "fix": fix}
            raise RunError(what, code="run.no-checkpoint", **details) from error

    async def _evaluate(self, model: Model, name: str, trainer: Trainer) -> None:
        clock, settings = trainer.role.clock, self.config.evaluation
        started, file = clock.time(), self._file(model, name)
        metrics, samples = await trainer.evaluator.evaluate_set(name, model.step, 1 << 62)
        table = Path("samples") / f"{file.stem}.parquet"
        write_samples(Path(self.config.folder) / table, model, name, samples)
        own = settings.sets.get(name, settings)
        result = {
            "key": self._key(model, name),
            "model": model.name,
            "step": model.step,
            "folder": str(model.folder),
            "set": name,
            "rollouts": own.rollouts,
            "seconds": round(clock.time() - started, 3),
            "samples": str(table),
            "metrics": metrics,
        }
        replace_file(file, seal(json.dumps(result)))
        self.say(result_line(result))

    def _result(self, model: Model, name: str) -> dict[str, Any] | None:
        try:
            found = unseal(self._file(model, name).read_bytes())
        except (OSError, ValueError):
            return None
        return found if found["key"] == self._key(model, name) else None

    def _file(self, model: Model, name: str) -> Path:
        return Path(self.config.folder) / "results" / f"{model.name}-{name}.json"

    def _key(self, model: Model, name: str) -> str:
        """Return a digest of what determines a result."""
        plain, own = as_plain(self.config), self.config.evaluation.sets.get(name)
        settings = dict(plain["evaluation"] if own is None else plain["evaluation"]["sets"][name])
        settings = {key: value for key, value in settings.items() if key not in ("every", "sets", "file")}
        described = {section: plain[section] for section in _SECTIONS}
        described |= {"set": settings, "format": plain["data"]["format"], "file": _digests_of(self.sets[name])}
        described |= {key: plain["data"][key] for key in ("chat_template", "max_prompt_tokens")}
        described |= {"dtype": [plain["model"]["dtype"], plain["weights"]["dtype"]], "lora": plain["model"]["lora"]}
        described |= {"model": model.digest, "max_model_len": plain["cluster"]["max_model_len"]}
        return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


def _digests_of(given: DataPaths) -> str | list[str]:
    """Return the digest of a set's file; of several files, of a folder or of a name on the Hub, one of each."""
    found = list[str]()
    for path in map(Path, paths_of(given)):
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        found += [digest_of(each) if each.is_file() else str(each) for each in files]
    return found[0] if len(found) == 1 else found
