"""Libraries that a configuration may need: they are imported where they are used."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.reward import ScoreRequest
from jackfield.config import RunConfig
from jackfield.config.agent_service import AgentServiceConfig
from jackfield.data.formats import TaskFormat
from jackfield.errors import PluginError

_BARS = {"huggingface_hub.utils": "disable_progress_bars", "transformers.utils.logging": "disable_progress_bar"}


def archives() -> Any:
    """Return the library jackfield-archive."""
    return _library("jackfield-archive", "an archive")


def readers() -> Any:
    """Return the library jackfield-datasets."""
    return _library("jackfield-datasets", "a set of tasks that is not a .jsonl file")


def has_readers() -> bool:
    """Return whether jackfield-datasets is installed."""
    return find_spec("jackfield_datasets") is not None


def recognised(records: Sequence[Any], form: TaskFormat) -> TaskFormat:
    """Return the format of records; without jackfield-datasets, or with keys that are given, that is ``form``."""
    return form if form.is_given or not has_readers() else readers().recognise(records, form)


def example(config: RunConfig) -> ScoreRequest | None:
    """Return a sample of the first task with its own answer; None without jackfield-datasets, or without that task."""
    return readers().example(config) if has_readers() else None


def describe_tasks(config: RunConfig) -> list[str]:
    """Return sentences about what is recognised in the sets of tasks that are here; none without jackfield-datasets."""
    return readers().describe(config) if has_readers() else []


def pipelines() -> Any:
    """Return the library jackfield-pipelines."""
    return _library("jackfield-pipelines", "data.pipeline")


def toolboxes() -> Any:
    """Return the library jackfield-tools."""
    return _library("jackfield-tools", "the section tools")


def named_models() -> Any:
    """Return the library jackfield-models."""
    return _library("jackfield-models", "the section models")


def hub() -> Any:
    """Return the models of the Hugging Face Hub, from the library jackfield-huggingface."""
    return _library("jackfield-huggingface", "a model of the Hub", ".hub")


def merged() -> Any:
    """Return the models that are adapters merged into others, from the library jackfield-huggingface."""
    return _library("jackfield-huggingface", "an adapter as the model", ".merged")


def _library(name: str, what: str, module: str = "") -> Any:
    """Return a library that is imported where it is used; raise ``plugin.requirement`` if it is not installed."""
    try:
        return import_module(name.replace("-", "_") + module)
    except ModuleNotFoundError as error:
        fix = f"pip install {name}"
        raise PluginError(f"{what} needs {name}", code="plugin.requirement", fix=fix) from error


def with_model_folders(config: RunConfig) -> RunConfig:
    """Return the configuration with folders for models of the Hub, which may be downloaded, and for adapters, merged.

    Raise ``engine.model`` if one is neither a folder nor to be had.
    """

    def folder(path: str) -> str:
        with suppress(PluginError):  # without the library, a missing folder is what there is to say
            found = path if Path(path).exists() else str(hub().model_folder(path))
            if Path(found, "adapter_config.json").is_file() and not Path(found, "config.json").is_file():
                return str(merged().merged_folder(found))
            return found
        return path

    model = attrs.evolve(config.model, path=folder(config.model.path))
    critic = (
        config.critic if config.critic.path is None else attrs.evolve(config.critic, path=folder(config.critic.path))
    )
    return attrs.evolve(config, model=model, critic=critic)


def hide_progress_bars() -> None:
    """Hide the progress bars of libraries, here and in later processes, unless HF_HUB_DISABLE_PROGRESS_BARS is 0.

    A run shows its own progress. Models of the Hub are downloaded before, with a bar.
    """
    if os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1") == "0":
        return
    for module, function in _BARS.items():  # where they are imported already, they have read the variable
        if module in sys.modules:
            getattr(sys.modules[module], function)()


def check_agents(config: RunConfig) -> None:
    """Refuse settings of agents that have no effect, and tools that cannot be made."""
    if config.mode in ("offline", "train") and (config.agent_service != AgentServiceConfig() or config.tools):
        where = "tools" if config.tools else "agent_service"
        raise config.refusal(where, f"mode {config.mode} runs no agents", "nothing, or mode: online")
    if config.models:
        named_models().check_models(config.models)
    if config.tools and config.data.tools:
        raise config.refusal("data.tools", "the agent's tools are shown to the model in their place", "no data.tools")
    if config.tools:
        toolboxes().check_tools(config.tools)
