"""The models that a bench evaluates: checkpoints of a run, its base model, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import xxhash

from jackfield.config import RunConfig
from jackfield.errors import ConfigError, EngineError, RunError
from jackfield.trainer.checkpoint import CheckpointStore, open_checkpoint

BASE = "base"  #: name of the model that a run begins with
_ADAPTER = "adapter_config.json"


@attrs.frozen(kw_only=True)
class Model:
    """A model to evaluate."""

    name: str  #: of the checkpoint's or model's folder; ``base`` for the model that the run begins with
    step: int = 0  #: completed steps, which are the weight version
    folder: Path
    checkpoint: bool = False  #: whether the folder is a checkpoint; else it is a Hugging Face model
    digest: str  #: of the manifest, or of names, sizes and times of the model's files


def choose_models(
    config: RunConfig, path: Path | None, *, everything: bool = False, newest: int | None = None, base: bool = False
) -> list[Model]:
    """Return the models in the order of their steps, or raise ``run.no-checkpoint`` or ``engine.model``.

    ``path`` is a checkpoint, a Hugging Face folder, or the folder of another run, of which the newest checkpoint is
    taken. Without it, ``everything``, the ``newest`` checkpoints or, if no model is chosen, the newest one are taken
    from the run of the configuration. ``base`` puts the run's base model first.
    """
    models = [huggingface_model(Path(config.model.path), BASE)] if base else []
    if path is not None and (path / "manifest.json").is_file():
        return [*models, checkpoint_model(path)]
    if path is not None and not (path / "checkpoints").is_dir():
        if base:
            what, expected = "a model's folder is evaluated alone", "--checkpoint with a checkpoint of the run"
            raise ConfigError(what, where="--base", expected=expected, found=path, fix="leave out --base")
        return [huggingface_model(path)]
    folders = list(CheckpointStore((path or Path(config.folder)) / "checkpoints").folders().values())
    if not (everything or newest or path) and base:
        return models
    chosen = folders if everything else folders[-(newest or 1) :]
    if not chosen:
        expected, fix = "a run with checkpoints", "wait for its first one, give --checkpoint PATH, or --base alone"
        details = {"where": str(path or config.folder), "expected": expected, "fix": fix}
        raise RunError("there is no checkpoint", code="run.no-checkpoint", **details)
    return [*models, *map(checkpoint_model, chosen)]


def checkpoint_model(folder: Path) -> Model:
    """Return the model of a checkpoint, whose contents are not read yet."""
    step = open_checkpoint(folder, "actor/", contents=False).step
    digest = xxhash.xxh3_128_hexdigest((folder / "manifest.json").read_bytes())
    return Model(name=folder.name, step=step, folder=folder, checkpoint=True, digest=digest)


def huggingface_model(folder: Path, name: str | None = None) -> Model:
    """Return the model of a Hugging Face folder, or raise ``engine.model`` if there is no whole model."""
    if not (folder / "config.json").is_file():
        adapter = (folder / _ADAPTER).is_file()
        found = "an adapter without its base model" if adapter else "no config.json" if folder.is_dir() else "no folder"
        fix = "export it with `jackfield checkpoint export --merge`" if adapter else "check the path"
        expected = "a checkpoint, a run's folder, or a Hugging Face model"
        details = {"where": str(folder), "expected": expected, "found": found, "fix": fix}
        raise EngineError("there is no model to evaluate", code="engine.model", **details)
    digest = xxhash.xxh3_128_hexdigest(repr(_files(folder)).encode())
    return Model(name=name or folder.resolve().name, folder=folder, digest=digest)


def _files(folder: Path) -> Sequence[tuple[str, int, int]]:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
