"""Checks of a run before it starts: settings, plugins, tasks, model, tokenizer and mixed-in samples.

Errors are raised here, before anything is started and before the run's folder is changed. Reading tasks and the
model's description imports neither torch nor transformers, so that most mistakes show quickly.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.compose.capabilities import check_capabilities
from jackfield.compose.devices import check_devices
from jackfield.compose.engines import check_engines
from jackfield.compose.libraries import check_agents, hide_progress_bars, hub
from jackfield.compose.modes import check_mode, check_stages
from jackfield.compose.parts import load_hooks, register_any, register_installed
from jackfield.compose.resolve import has_arrays, resolve_algorithm
from jackfield.compose.rewards import check_parts
from jackfield.compose.tasks import check_tokens, fit_prompts, read_tasks, task_files
from jackfield.config import RunConfig, load_stages, plugin_settings
from jackfield.errors import ConfigError, EngineError, PluginError, PluginNotFound
from jackfield.imports import collection_paused
from jackfield.observe.trackers import check_trackers
from jackfield.plugins import HookManager, Registry, discover
from jackfield.plugins.interpreters import environment_python, look, resolve_interpreter
from jackfield.queue import Values
from jackfield.queue.sample_files import ImportedSamples, cell_of, is_archive, read_samples, saved_samples, shape_of
from jackfield.runtime.samples import TRAIN
from jackfield.sdk.archive import SavedSample
from jackfield.sdk.arrays import cell as arrays_cell
from jackfield.sdk.jagged import length_limits
from jackfield.trainer.checkpoint import find_queue
from jackfield.trainer.role import Role, RoleName

_LOG = logging.getLogger("jackfield")
_HEAVY = {"engine", "rollout"}  #: kinds whose plugins import torch, which are imported last
_PROBE_SECONDS = 30.0
_DTYPES = ("float32", "bfloat16", "float16")
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")  #: weight files that only torch.load could read


@collection_paused()
def prepare(config: RunConfig, registry: Registry, hooks: Sequence[object], role: RoleName, clock: Clock) -> Role:
    """Make all checks that do not change the run's folder; those that import torch come last."""
    if config.profile is not None and role in ("all", "train") and find_spec("pyinstrument") is None:
        expected, fix = "the package pyinstrument", "install jackfield[profile], or leave profile out"
        raise PluginError("pyinstrument is not installed", where="profile", expected=expected, fix=fix)
    elsewhere = check_plugins(config, registry)
    manager, algorithm = check_settings(config, registry, role, hooks)
    here = config.cluster.name == "inline"  # otherwise workers check their plugins in their own processes
    local = {kind: name for kind, name in config.plugins.items() if here and kind not in elsewhere}
    for kind in sorted(local.keys() - _HEAVY):
        registry.load(kind, local[kind])
    tasks = read_tasks(config, algorithm)
    prompt_limit(config)
    model = read_model(config)
    limit, given = token_limit(config, model), config.cluster.max_model_len
    if limit is not None and given is None and limit < (model.get("max_position_embeddings") or 0):
        _LOG.warning("samples have at most %d tokens: the model's rotary frequencies are others beyond", limit)
    with suppress(PluginError):  # without the library there is nothing to say
        said = {
            key: value for key, value in hub().generation_defaults(Path(config.model.path)).items() if value is not None
        }
        if said and config.mode != "offline":
            what = "the defaults of generation_config.json are not used, sampling.* is: %s"
            _LOG.warning(what, ", ".join(f"{key} {value}" for key, value in said.items()))
    hide_progress_bars()
    # making a nested tensor from its values reads a deprecated flag of torch.fx, which logs a warning
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    fit_prompts(config, tasks, prompt_limit(config, model))
    if here:
        check_tokens(config, tasks, model, prompt_limit(config))
    for kind in sorted(local.keys() & _HEAVY):
        registry.load(kind, local[kind])
    check_rows(config)
    made: Any = {"clock": clock, "hooks": manager, "arrays": has_arrays(config, registry)}
    return Role(config=config, name=role, algorithm=algorithm, tasks=tasks, **made)


def check_settings(
    config: RunConfig, registry: Registry, role: RoleName = "all", hooks: Sequence[object] = ()
) -> tuple[HookManager, ResolvedAlgorithm]:
    """Make all checks that need only the configuration and the installed plugins: no model, data or interpreter.

    Return the hooks, and the algorithm with every choice made.
    """
    check_mode(config, role)
    if config.model.dtype not in _DTYPES:
        raise config.refusal("model.dtype", "no parameters have this dtype", f"one of {', '.join(_DTYPES)}")
    check_parts(plugin_settings(config, registry)["reward"], registry)
    check_capabilities(config, registry, role)
    check_agents(config)
    manager = hooks_of(config, registry, hooks)
    algorithm = resolve_algorithm(config, registry.resolve(config.rollout.name, "rollout").usable())
    check_devices(config, registry, role, algorithm)
    check_engines(config, registry, role, algorithm)
    task_files(config, algorithm)
    prompt_limit(config, {})
    return manager, algorithm


def check_file(file: str, overrides: Sequence[str], role: RoleName) -> dict[str, tuple[RunConfig, ResolvedAlgorithm]]:
    """Check the settings of a file, or of its ``stages``; return configuration and algorithm of each by name."""
    stages, registry = load_stages(file, overrides, served=role != "all"), discover()
    found = check_stages(stages, lambda config: check_settings(config, registry, role))
    return {name: (stages[name], algorithm) for name, (_, algorithm) in found.items()}


# -- plugins


def check_plugins(config: RunConfig, registry: Registry) -> dict[str, str]:
    """Check that plugins are found, and that interpreters can import theirs; return :func:`interpreters`.

    If a plugin is not found, the error also has the import errors of the installed ones of its kind. If the name looks
    misspelt, plugins that import torch are not tried, because that takes long.
    """
    for kind, name in config.plugins.items():
        try:
            registry.resolve(name, kind).usable()
        except PluginNotFound as error:
            usable = {record.name: record for record in registry.records(kind) if record.error is None}
            for record in () if kind in _HEAVY and difflib.get_close_matches(name, usable) else usable.values():
                found = look(record.usable().env.python, record, _PROBE_SECONDS, importing=True)
                for problem in found.problems:
                    error.found = f"{error.found}; {record.name} cannot be used: {problem.message}: {problem.found}"
            raise
    elsewhere = interpreters(config, registry)
    joining = [(python, "transfer_queue") for kind, python in elsewhere.items() if kind != "rollout"]
    for python, kind in dict.fromkeys([*((python, kind) for kind, python in elsewhere.items()), *joining]):
        record = registry.resolve(config.plugins[kind], kind)
        look(python, record, min(config.deadlines.start, _PROBE_SECONDS)).check()
    return elsewhere


def hooks_of(config: RunConfig, registry: Registry, hooks: Sequence[object] = ()) -> HookManager:
    """Collect the hooks of the run's plugins, let plugins register components, and check the mixing samplers."""
    register_installed(registry)
    manifests = [registry.resolve(name, kind).usable() for kind, name in config.plugins.items()]
    manager = HookManager([*hooks, *load_hooks(config.observe.hooks)], manifests)
    manager.call("register_parts", register=register_any)
    check_trackers(config.observe)
    for name, mixed in attrs.asdict(config.mixing, recurse=False).items():
        if mixed is not None:
            mixed.sampler.make(f"mixing.{name}.sampler.options")
    return manager


def interpreters(config: RunConfig, registry: Registry) -> dict[str, str]:
    """Return the interpreters of kinds of workers that do not use this one; start none.

    The configuration has precedence over manifests. Raise ``plugin.interpreter`` if there is no such program, or this
    kind of worker cannot have one.
    """
    found = {}
    for kind, name in config.plugins.items():
        wanted, where = config.cluster.interpreters.get(kind), f"cluster.interpreters.{kind}"
        details: dict[str, Any] = {"code": "plugin.interpreter", "where": where}
        if wanted is None:
            manifest = registry.resolve(name, kind).usable()
            wanted, where = manifest.env.python, f"the manifest of the {manifest.label}, [env] python"
        elif wanted in config.environments:
            python = environment_python(config.environments[wanted].path(wanted))
            if not Path(python).exists():
                what, fix = f"the environment '{wanted}' has not been made", f"jackfield env create {wanted} FILE"
                raise PluginError(what, expected=python, found="no such file", fix=fix, **details)
            wanted = python
        path = os.path.abspath(resolve_interpreter(wanted, where))
        if path == os.path.abspath(sys.executable):
            continue
        if config.cluster.name == "inline" and kind != "rollout":
            what = f"a worker of the kind '{kind}' cannot have a process of its own with the cluster 'inline'"
            expected = f"{sys.executable}; or an interpreter for rollout"
            fix = "use cluster.name: ray, or give the rollout server the interpreter of its own"
            raise PluginError(what, expected=expected, found=path, fix=fix, **{**details, "where": where})
        found[kind] = path
    return found


# -- tasks, model and tokenizer


def read_model(config: RunConfig) -> Mapping[str, Any]:
    """Return the text model's part of the ``config.json`` in the model's folder.

    Raise ``engine.model`` if the folder holds no model, or its weights are pickles.
    """
    folder, refused = Path(config.model.path), partial(EngineError, code="engine.model")
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what, found = f"there is no model in the folder {config.model.path!r}", "no such folder"
        if folder.is_dir():
            found = "no config.json" if isinstance(error, FileNotFoundError) else f"config.json: {error}"
        expected = "a Hugging Face folder with config.json, weights and tokenizer"
        fix = f"check the path; the working folder is {Path.cwd()}"
        if (folder / "adapter_config.json").is_file():
            what, found = "the model's folder holds an adapter without its base model", "adapter_config.json"
            fix = "pip install jackfield-huggingface peft, with which a run merges the two; or merge them elsewhere"
        raise refused(what, where="model.path", expected=expected, found=found, fix=fix) from error
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if pickles and not any(folder.glob("*.safetensors")):
        what = "the model's weights are pickles, which could execute code when they are read"
        fix = "load the model in a process that you trust with it, and save_pretrained() it to another folder"
        details = {"expected": "safetensors", "found": ", ".join(pickles[:4]), "fix": fix}
        raise refused(what, where=f"model.path, {folder}", **details)
    return {**described, **(described.get("text_config") or {})}


def token_limit(config: RunConfig, model: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sample, configured or with one set of rotary frequencies; None: the model's limit.

    Refuse a larger one that is configured: log-probs of a sample that crosses it are those of no training pass.
    """
    given, limits = config.cluster.max_model_len, {} if config.mode == "offline" else length_limits(model)
    for kind, limit in limits.items():
        if (given or 0) > limit:
            what = f"a sample that grows beyond {limit} tokens while it is generated has log-probs that no training "
            what += f"pass computes: the model's rotary frequencies ({kind}) are others there"
            raise config.refusal("cluster.max_model_len", what, f"at most {limit}")
    return given or min(limits.values(), default=None)


def prompt_limit(config: RunConfig, model: Mapping[str, Any] | None = None) -> int | None:
    """Return a prompt's maximum length in tokens, configured or leaving room for a response.

    ``model`` is the model's description, by default that in its folder.

    Refuse a prompt and a response that do not fit together.
    """
    model = read_model(config) if model is None else model
    given, positions = token_limit(config, model), model.get("max_position_embeddings")
    rotary = model.get("rope_scaling") or model.get("rope_parameters") or {}
    scaled = rotary.get("rope_type", rotary.get("type", "default")) != "default"
    room = given or (None if scaled else positions)
    prompt, response = config.data.max_prompt_tokens, config.sampling.max_new_tokens
    if prompt is None:
        return None if room is None else room - 1
    if room is not None and prompt + response > room:
        what, fix = "the longest prompt and the longest response do not fit together", "lower one of them"
        source = "cluster.max_model_len" if config.cluster.max_model_len else "the model's limit"
        expected = f"data.max_prompt_tokens + sampling.max_new_tokens of at most {room} tokens ({source})"
        found = f"{prompt} + {response}"
        raise ConfigError(what, where="data.max_prompt_tokens", expected=expected, found=found, fix=fix)
    return prompt


def describe_lengths(config: RunConfig) -> list[str]:
    """Return a sentence where a model's positions end before a long prompt and its response do."""
    try:
        model = read_model(config)
    except EngineError:  # paths need not exist
        return []
    positions, limit = model.get("max_position_embeddings"), token_limit(config, model)
    prompt, response = config.data.max_prompt_tokens or 1, config.sampling.max_new_tokens
    ends = min((each for each in (positions, limit) if each is not None), default=None)
    if config.mode == "offline" or ends is None or prompt + response <= ends:
        return []
    name = "max_position_embeddings" if ends == positions else "cluster.max_model_len or its rotary frequencies"
    what = (
        f"The model's samples end at {ends} tokens ({name}), before a prompt of {prompt} and a response of {response}"
    )
    return [f"{what} (sampling.max_new_tokens) do: responses are cut off there."]


# -- mixed-in samples


def check_rows(config: RunConfig) -> None:
    """Check that each mixed-in file has samples with the needed columns; online, human ones need a reward."""
    for name, file in _files(config).items():
        needed, first, own = ["prompt_ids", "response_ids"], next(_read(file), None), name == TRAIN
        if name != "expert" and config.mode != "offline":
            unread = config.algorithm.old_log_probs == "engine" and config.algorithm.correction.enabled is False
            needed += [] if own and first is not None and "task" in first.cells else ["reward"]  # it can be scored
            needed += [] if own and unread else ["rollout_log_probs"]
        if first is None or not first.cells.keys() >= set(needed):
            where = "data.samples" if name == TRAIN else f"mixing.{name}.samples"
            expected = f"rows with the columns {', '.join(needed)} at least"
            found = file if first is None else ", ".join(sorted(first.cells)) or "no columns"
            raise ConfigError("there are no samples in it", where=where, expected=expected, found=found)


def mixed_samples(role: Role, values: Values) -> list[ImportedSamples]:
    """Return the imports of mixed-in samples, for a new run's start and after losses."""
    files, read = _files(role.config).items(), partial(_completed, arrays=role.arrays)
    return [ImportedSamples(role.queue, values, name, partial(read, file, name), file) for name, file in files]


def _files(config: RunConfig) -> dict[str, str]:
    """Return the files that are trained on or mixed in, by partition."""
    mixed = {name: each.samples for name in ("expert", "human") if (each := getattr(config.mixing, name)) is not None}
    return mixed if config.data.samples is None else {TRAIN: config.data.samples, **mixed}


def _read(file: str) -> Iterator[SavedSample]:
    path = Path(file)
    if path.is_dir() and not is_archive(path):
        return (sample for sample in saved_samples(find_queue(path)) if sample.batch is not None)
    return (sample for sample in read_samples(path) if sample.status not in ("failed", "dropped"))


def _completed(file: str, name: str, arrays: bool = False) -> Iterator[SavedSample]:
    """Yield a file's samples with the tags that a run needs, and the columns that not every program writes.

    Weight versions are removed, because those of other runs mean nothing here.
    """
    for row in _read(file):
        cells, length = dict(row.cells), shape_of(row.cells["response_ids"])[0]
        cells.setdefault("response_mask", cell_of("response_mask", [True] * length))
        tags = {name: value for name, value in row.tags.items() if not name.startswith("weight_version_")}
        tags |= {"prompt_tokens": shape_of(row.cells["prompt_ids"])[0], "response_tokens": length}
        tags["model_tokens"] = sum(bytes(cells["response_mask"][1]))
        if arrays:
            cells.setdefault("multi_modal_inputs", arrays_cell({}))
        if name != "human":
            cells.setdefault("rollout_log_probs", cell_of("rollout_log_probs", [0.0] * length))
        if name == "expert":
            cells.setdefault("reward", cell_of("reward", 0.0))
            tags["expert"] = True
        yield attrs.evolve(row, cells=cells, tags=tags)
