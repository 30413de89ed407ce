"""A run that a Python program describes and starts: one class, and a short name for each well-known algorithm."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import attrs
import yaml

from jackfield.abc.engine import ModelSpec
from jackfield.compose import run
from jackfield.compose.builder import Stop
from jackfield.config import RunConfig, explain, make_config
from jackfield.config.data import DataSet
from jackfield.errors import ConfigError, did_you_mean
from jackfield.files import replace_file
from jackfield_training.records import Records
from jackfield_training.result import Result

#: What TRL's names are here, where no setting ends with the same name.
_TRL = {
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "args": "settings as keywords",
    "beta": "algorithm.kl.coefficient",
    "bf16": "engine.mixed_precision",
    "callbacks": "run(hooks=[...])",
    "chat_template_kwargs": "data.template_options",
    "delta": "algorithm.loss.options.clip_dual",
    "disable_dropout": "model.dropout",
    "epsilon": "algorithm.loss.options.clip_low",
    "epsilon_high": "algorithm.loss.options.clip_high",
    "eval_dataset": "eval",
    "eval_steps": "evaluation.every",
    "gradient_accumulation_steps": "data.groups_per_batch",
    "learning_rate": "optimizer.lr",
    "log_completions": "observe.sample_table",
    "loss_type": "algorithm.aggregation",
    "lr_scheduler_type": "optimizer.scheduler",
    "max_completion_length": "sampling.max_new_tokens",
    "max_grad_norm": "optimizer.clip_grad",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "steps",
    "num_generations": "data.rollouts_per_group",
    "num_iterations": "algorithm.epochs",
    "output_dir": "folder",
    "peft_config": "model.lora",
    "per_device_train_batch_size": "data.groups_per_batch",
    "resume_from_checkpoint": "checkpoint.resume",
    "reward_funcs": "reward",
    "reward_weights": "reward=[(function, weight), ...]",
    "run_name": "name",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.advantages.name",
    "steps_per_generation": "algorithm.mini_batches",
    "train_dataset": "train",
    "use_vllm": "rollout.name",
}

_SECTIONS = tuple(f"{field.name}." for field in attrs.fields(RunConfig))

#: Above a file with a reward that only the program has.
_COMMENT = """\
# The reward {name} is an object of the Python program that wrote this, which `jackfield run` does not have.
# Put it into a file, and write {{name: function, path: FILE.py:{name}}} in its place.
"""


class Training:
    """A run with the settings of a YAML file, in the same kind of folder, resumed by the same call.

    ``model`` is a folder, or a name on the Hugging Face Hub. ``train`` and ``eval`` are what ``data.train`` of a file
    is (paths, also several with weights), or records: a ``datasets.Dataset`` or a list of dicts, which the run keeps.
    ``reward`` is a function or object with a signature of the plugin ``function`` (TRL's, verl's; sync or async), the
    name of a plugin, its section, or a list of these, each alone or as (reward, weight). ``steps`` is
    ``schedule.steps``. Further ``settings`` are sections (``optimizer={"lr": 1e-6}``) or paths
    (``**{"optimizer.lr": 1e-6}``).

    Raise a ``ConfigError`` or ``DataError`` for what is wrong; the model and the data are read by :meth:`run`.
    """

    algorithm: ClassVar[str | None] = None  #: ``algorithm.name``, which is also the default of ``name``
    mode: ClassVar[str] = "online"

    def __init__(
        self,
        *,
        model: Any,
        train: Any = None,
        reward: Any = None,
        steps: int | None = None,
        eval: Any = None,
        **settings: Any,
    ) -> None:
        values: dict[str, Any] = {}
        given = {"model": model if isinstance(model, Mapping) else {"path": model}, "schedule.steps": steps}
        for path, value in [*given.items(), *settings.items()]:
            if value is not None or path in settings:
                _put(values, path, value)
        name = self.algorithm or "run"
        values = {"name": name, "folder": f"runs/{values.get('name', name)}", "mode": self.mode, **values}
        if self.algorithm is not None:
            _put(values, "algorithm", {"name": self.algorithm})
        self._objects: dict[str, Any] = {}  #: rewards that only this process has
        if reward is not None:
            section, self._objects = _rewards().section(reward)
            _put(values, "reward", section)
        self._records: list[Records] = []  #: data that only this process has
        for which, data in (("train", train), ("eval", eval)):
            if data is not None:
                self._add_data(values, which, data)
        if eval is not None and steps is not None and "evaluation" not in values:
            _put(values, "evaluation.every", max(1, steps // 10))
        self._values = values
        try:
            self.config: RunConfig = make_config(values)
        except ConfigError as error:
            if error.code == "config.unknown-key" and error.found in settings:
                error.fix = _where_it_is(str(error.found)) or error.fix
                if not (known := did_you_mean(error.found, ("model", "train", "eval", "reward", "steps"))):
                    raise
                error.message = error.message.partition(" (did")[0] + known
            raise
        if (
            reward is not None
            and self.config.mode == "offline"
            and not (self.config.data.eval or self.config.evaluation.sets)
        ):
            what, fix = "a reward has no effect on given answers, and there are no tasks to evaluate", "give eval"
            raise ConfigError(what, where="reward", expected="none, or eval", fix=f"leave it out, or {fix}")
        if self._objects and self.config.cluster.name != "inline":
            what = (
                f"the reward {next(iter(self._objects))} is an object of this process, which other workers do not have"
            )
            raise self.config.refusal("cluster.name", what, "inline, or a reward in a file that can be imported")

    def _add_data(self, values: dict[str, Any], which: str, data: Any) -> None:
        """Set the path of a data set; records are to be written into the run's folder."""
        several = data if isinstance(data, list | tuple) else [data]
        if several and all(map(_is_path, several)):
            _put(values, f"data.{which}", data)
            return
        records = Records(which, data, Path(values["folder"], "data", f"{which}.jsonl"))
        records.first()
        self._records.append(records)
        _put(values, f"data.{which}", records.file)

    def to_yaml(self, file: str | Path | None = None) -> str:
        """Return the settings as a file for ``jackfield run``, and write it if a path is given.

        Records are written to the files that it names. What only this process has is named in a comment.
        """
        self._write_records()
        text = yaml.safe_dump(self._values, sort_keys=False, allow_unicode=True)
        for name in self._objects:
            text = _COMMENT.format(name=name) + text
        if file is not None:
            replace_file(Path(file), text)
        return text

    @property
    def result(self) -> Result:
        """Return what is in the folder now, also after the run was stopped or has failed."""
        return Result(folder=Path(self.config.folder), name=self.config.name)

    def run(self, *, quiet: bool = False, hooks: Sequence[object] = ()) -> Result:
        """Train, or go on from the newest checkpoint in the folder, and return the result; a finished run does nothing.

        It may be called where an event loop runs, as in a notebook; the run then has a thread of its own. ``hooks`` are
        listeners as for :func:`jackfield.compose.run`. ``quiet`` shows no progress. SIGINT (Ctrl-C, or the notebook's
        stop button) ends the run after the step, with a checkpoint; a second one ends it at once; then
        ``KeyboardInterrupt`` is raised, and after SIGTERM ``SystemExit``. Other errors are those of ``compose.run``.
        """
        config, stop, found = self.config, _Interrupt(self.config.checkpoint.grace_seconds), list[Any]()
        if quiet:
            config = attrs.evolve(config, observe=attrs.evolve(config.observe, progress=False))
        for name in () if quiet else self._objects:
            what = "the reward %s runs in a thread of this process: a deadline cannot end it, and a crash ends the run"
            logging.getLogger("jackfield").warning(what, name)
        self._write_records()

        def work() -> None:
            try:
                with _rewards().registered(self._objects) if self._objects else nullcontext():
                    found.append(run(config, hooks=hooks, stop=stop))
            except BaseException as error:  # of a thread, raised by the one that waits
                found.append(error)

        with stop.listening() if threading.current_thread() is threading.main_thread() else nullcontext():
            if _loop_runs():
                thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name=config.name)
                thread.start()
                thread.join()
            else:
                work()
        (done,) = found
        if stop.code is not None and (isinstance(done, asyncio.CancelledError) or getattr(done, "stopped", False)):
            raise (KeyboardInterrupt if stop.code == 128 + signal.SIGINT else SystemExit)(stop.code) from None
        if isinstance(done, BaseException):
            raise done
        return attrs.evolve(self.result, steps=done.steps)

    def _write_records(self) -> None:
        begun = self.config.checkpoint.resume and any(Path(self.config.folder).glob("checkpoints/step_*"))
        for records in self._records:
            records.write(kept=begun)


class _Interrupt(Stop):
    """A stop of a run in a user's program, which it never kills: a second signal cancels the run."""

    def _received(self, number: int, _: FrameType | None) -> None:
        again, self.code = self.code is not None, 128 + number
        how = "at once" if again or not self._until else f"{self._until()}; a second signal stops at once"
        os.write(2, f"stopping {how}\n".encode())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.abandon if again else self.requested.set)


def _rewards() -> Any:
    return import_module("jackfield_reward_rules.describing")  # a plugin, which another package does not import


def _loop_runs() -> bool:
    try:
        return asyncio.get_running_loop().is_running()
    except RuntimeError:
        return False


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path beside others of its section; refuse a second value."""
    for key in reversed(path.split(".")):
        value = {key: value}
    _merge(values, value)


def _merge(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), str):  # a section that is only a name
            values[key] = {"name": values[key]}
        if isinstance(value, Mapping) and isinstance(values.setdefault(key, {}), dict):
            _merge(values[key], value)
        elif key in values:
            found = f"{values[key]!r} and {value!r}"
            raise ConfigError("a setting is given twice", where=key, found=found, fix="give it once")
        else:
            values[key] = _plain(value)


def _is_path(data: Any) -> bool:
    """Return whether this is a path, or a set of tasks as ``data.train`` has it: ``{"path": ..., "weight": ...}``."""
    names = {field.name for field in attrs.fields(DataSet)}
    return isinstance(data, str | Path) or (isinstance(data, Mapping) and {"path"} <= data.keys() <= names)


def _plain(value: Any) -> Any:
    """Return a setting as YAML has it: paths are texts, tuples are lists."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, Path) else value


def _where_it_is(name: str) -> str | None:
    """Say where a setting is that was given without its section, or under the name that it has in TRL."""
    known = [path for path, *_ in explain(RunConfig(model=ModelSpec(path="")))]
    paths = [_TRL[name]] if name in _TRL else [path for path in known if path.endswith(f".{name}")]
    ways = [f"**{{'{path}': ...}}" if path.startswith(_SECTIONS) else path for path in paths]
    return f"write {' or '.join(ways)}" if ways else None


class GRPO(Training):
    """Group relative policy optimisation."""

    algorithm = "grpo"


class DAPO(Training):
    """GRPO with dynamic sampling and decoupled clipping."""

    algorithm = "dapo"


class RLOO(Training):
    """REINFORCE with a leave-one-out baseline."""

    algorithm = "rloo"


class PPO(Training):
    """Proximal policy optimisation with a critic."""

    algorithm = "ppo"


class SFT(Training):
    """Supervised fine-tuning on the answers of the records."""

    algorithm, mode = "sft", "offline"


class DPO(Training):
    """Direct preference optimisation on pairs of answers."""

    algorithm, mode = "dpo", "offline"
