"""The engines and servers that are compared, from the command line: ``NAME[:KEY=VALUE,…][@RANKS]``."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml
from attrs.validators import ge, gt, optional

from jackfield.abc.engine import ModelSpec, OptimizerSpec
from jackfield.errors import ConfigError, JackfieldError
from jackfield.plugins import PluginRecord, Registry
from jackfield.plugins.interpreters import look, resolve_interpreter
from jackfield.settings import option, structure

_TEXT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(?::(?P<settings>.*?))?(?:@(?P<ranks>[0-9]+))?", re.DOTALL)
_LOOK_SECONDS = 120.0
_SECTIONS = ("model", "optimizer", "cluster", "env")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@attrs.frozen(kw_only=True)
class ClusterSettings:
    """Where and how a rank computes; the keys are those of a configuration's section ``cluster``."""

    device: str = option("cpu", "torch device; with several ranks on GPUs: cuda, of which rank i uses number i")
    micro_batch_tokens: int = option(16384, "maximum padded tokens of one pass", gt(0))
    offload: bool = option(False, "move model, optimizer and gradients to the CPU and back before each pass")
    threads: int | None = option(1, "torch threads of each rank; null: torch's default", optional(gt(0)))
    seed: int = option(0, "seed of the engine", ge(0))


@attrs.frozen(kw_only=True)
class EnvSettings:
    """The interpreter of the processes."""

    python: str | None = option(None, "interpreter; null: that of the manifest, or this one")
    preload: str | None = option(None, "a Python file that each process runs before it imports the plugin")


@attrs.frozen(kw_only=True)
class Subject:
    """One engine or server with its settings."""

    label: str  #: as it was given on the command line
    record: PluginRecord
    ranks: int = 1
    settings: Mapping[str, Any]  #: of the plugin
    model: Mapping[str, Any]  #: settings of :class:`ModelSpec` but the path
    optimizer: Mapping[str, Any]  #: settings that replace those of the batch
    cluster: ClusterSettings
    python: str  #: absolute path of the interpreter
    preload: str | None = None
    precision: str = "float32"  #: row of the table of tolerances

    def model_spec(self, path: str) -> ModelSpec:
        """Return the model's settings with its folder."""
        return structure(ModelSpec, {**self.model, "path": path}, "model")

    def optimizer_spec(self, base: OptimizerSpec) -> OptimizerSpec:
        """Return the batch's optimizer with this subject's changes."""
        return structure(OptimizerSpec, {**attrs.asdict(base), **self.optimizer}, "optimizer")


def parse_subject(text: str, registry: Registry, kind: str) -> Subject:
    """Return the subject of a text, or raise the error of what is wrong in it.

    Keys are the plugin's settings; ``model.*``, ``optimizer.*``, ``cluster.*`` and ``env.*`` are other settings, named
    as in a configuration; ``precision`` chooses the tolerances. Values are YAML.
    """
    parts = _TEXT.fullmatch(text)
    if parts is None:
        raise _wrong(text, "NAME[:KEY=VALUE,…][@RANKS], such as fsdp:wrap=layers@2", text)
    ranks = int(parts["ranks"] or 1)
    if ranks < 1 or (kind == "rollout" and ranks > 1):
        raise _wrong(text, "at least one rank" if kind == "engine" else "a server without @RANKS", f"@{ranks}")
    record = registry.resolve(parts["name"], kind)
    manifest = record.usable()
    sections: dict[str, dict[str, Any]] = {name: {} for name in (*_SECTIONS, "")}
    for key, value in _pairs(text, parts["settings"] or ""):
        section, _, inner = key.partition(".")
        chosen = sections[section] if section in _SECTIONS and inner else sections[""]
        _put(chosen, inner if chosen is not sections[""] else key, value)
    precision = sections[""].pop("precision", None) or sections["model"].get("dtype", "float32")
    if precision not in _DTYPES:
        raise _wrong(text, f"precision={'|'.join(_DTYPES)}", precision)
    environment = structure(EnvSettings, sections["env"], "env")
    python = resolve_interpreter(environment.python or manifest.env.python, "env.python")
    subject = Subject(
        label=text,
        record=record,
        ranks=ranks,
        settings=sections[""],
        model=sections["model"],
        optimizer=sections["optimizer"],
        cluster=structure(ClusterSettings, sections["cluster"], "cluster"),
        python=python,
        preload=None if environment.preload is None else str(Path(environment.preload).absolute()),
        precision=precision,
    )
    structure(record.settings_class, subject.settings, record.name)
    subject.model_spec("folder"), subject.optimizer_spec(OptimizerSpec())
    if python != sys.executable:
        look(python, record, _LOOK_SECONDS).check()
    for problem in manifest.missing(record.label) if python == sys.executable else ():
        raise problem
    return subject


def _pairs(text: str, settings: str) -> list[tuple[str, Any]]:
    """Split ``KEY=VALUE,…`` at commas that are in no bracket."""
    found, depth, start = [], 0, 0
    for at, sign in enumerate(settings + ","):
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0:
            part, start = settings[start:at], at + 1
            key, equals, value = part.partition("=")
            if part and (not equals or not key):
                raise _wrong(text, "KEY=VALUE", part)
            if part:
                with contextlib.suppress(yaml.YAMLError):
                    value = yaml.safe_load(value)
                found.append((key, value))
    return found


def _put(section: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        inner = section.setdefault(name, {})
        section = inner if isinstance(inner, dict) else section
    section[last] = value


def _wrong(text: str, expected: str, found: object) -> JackfieldError:
    fix = "see `jackfield parity --help`"
    return ConfigError("an engine or server is not understood", where=text, expected=expected, found=found, fix=fix)
