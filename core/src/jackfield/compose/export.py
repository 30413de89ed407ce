"""The export of a run's model, and the model card beside it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import attrs

from jackfield import __version__
from jackfield.abc.engine import BaseEngine, EngineContext, LoadCheckpointRequest, SaveCheckpointRequest
from jackfield.compose.libraries import merged
from jackfield.config import RunConfig, make_config
from jackfield.config.data import paths_of
from jackfield.errors import EngineError, PluginError, RunError
from jackfield.plugins import discover
from jackfield.trainer.checkpoint import Checkpoint

CARD = "README.md"


def export_checkpoint(checkpoint: Checkpoint, out: Path, *, merge: bool = False, averaged: bool = False) -> None:
    """Write the actor's weights of a verified ``checkpoint`` to the empty or absent folder ``out``, for Hugging Face.

    The model must fit into one process on this machine. Its shape and the tokenizer are those of the run's model
    folder. ``merge`` writes base model and adapter as one model, or raises ``run.no-adapter``; without it only the
    adapter is written, if one was trained. ``averaged`` writes the average of ``optimizer.ema_decay``, or raises
    ``run.no-average``. An ``EngineError`` is raised if the engine cannot load or save.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise EngineError("the folder for the model is not empty", where=str(out), expected="an empty or absent folder")
    config, where = make_config(checkpoint.state()["config"]), str(checkpoint.folder)
    if merge and config.model.lora is None:
        what, fix = "the run has not trained an adapter", "leave out --merge: the exported folder holds the whole model"
        raise RunError(what, code="run.no-adapter", where=where, expected="a run with model.lora", fix=fix)
    if averaged and config.optimizer.ema_decay is None:
        what, fix = "the run has kept no average of its weights", "leave out --averaged"
        raise RunError(what, code="run.no-average", where=where, expected="a run with optimizer.ema_decay", fix=fix)
    model = attrs.evolve(config.model, gradient_checkpointing=False)
    optimizer = attrs.evolve(config.optimizer, scheduler="constant") if averaged else None
    plugin = discover().load("engine", config.engine.name)
    context = EngineContext(role="actor", model=model, optimizer=optimizer)
    engine: BaseEngine = plugin.build(config.engine.settings, context, "engine")
    request = SaveCheckpointRequest(folder=str(out), format="huggingface", merge_adapter=merge, averaged=averaged)
    try:
        engine.initialize()
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(checkpoint.folder / "actor"), model_only=True))
        engine.save_checkpoint(request)
        if merge and (out / "adapter_config.json").is_file():
            message = f"the engine {config.engine.name} does not merge adapters"
            raise EngineError(message, code="plugin.capability", where=str(out), fix="leave out --merge")
        write_card(out, config, checkpoint.step, averaged=averaged)
    except OSError as error:
        raise EngineError(f"the model could not be written: {error}", where=str(out)) from error
    finally:
        engine.close()


def write_card(folder: Path, config: RunConfig, steps: int, *, averaged: bool = False) -> None:
    """Write the model card of an exported model: what it was made from, and how. An adapter names its base, too."""
    adapter, origin = (folder / "adapter_config.json").is_file(), {"base model": config.model.path}
    with suppress(PluginError):  # without the library, its models are folders
        origin = merged().name_origin(folder, config.model.path)
    head = {"base_model": origin["base model"], "library_name": "peft" if adapter else "transformers"}
    licence = _license(Path(config.model.path))
    if licence is not None:
        head["license"] = licence
    weights = "the average of the trained weights" if averaged else "the trained weights"
    kind = "a LoRA adapter for the base model" if adapter else "a whole model"
    rows = {
        "run": config.name,
        **origin,
        "license of the base model": licence or "not known",
        "algorithm": config.algorithm.name,
        "steps": str(steps),
        "optimizer": f"{config.optimizer.name}, peak learning rate {config.optimizer.lr:g}",
        "training data": ", ".join(paths_of(config.data.train)) or "None",
        "engine": config.engine.name,
        "Jackfield": __version__,
    }
    lines = ["---", *(f"{name}: {_quoted(value)}" for name, value in head.items()), "tags:", "- jackfield", "---", ""]
    lines += [f"# {config.name}", "", f"This folder holds {weights}, as {kind}.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _license(folder: Path) -> str | None:
    """Return the license in the head of a model folder's card, if it has one."""
    with suppress(OSError, UnicodeDecodeError):
        head = re.match(r"---\n(.*?)\n---", (folder / CARD).read_text(encoding="utf-8"), re.DOTALL)
        found = re.search(r"^license:\s*[\"']?([\w.-]+)", head[1], re.MULTILINE) if head else None
        return found[1] if found else None
    return None


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
