"""Models of the Hugging Face Hub: their folders in the cache, what they say about generation, and uploads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jackfield.errors import EngineError, RunError

_NAME = re.compile(r"[\w.-]*\w/[\w.-]+(@[\w./-]+)?")
_CACHED = re.compile(r"models--(.+?)--(.+)")
#: files of the repository's own folder that a model is loaded from; never weights that are pickles
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "README.md", "LICENSE*"]


def model_folder(path: str) -> str:
    """Return the folder of a model: ``path`` itself, or that of ``OWNER/NAME`` or ``OWNER/NAME@REVISION`` in the cache.

    A model that is whole in the cache is used as it is there; the Hub is not asked. Otherwise its files are downloaded,
    unless ``HF_HUB_OFFLINE`` is set. Paths of another form are returned, and ``engine.model`` is raised if the model is
    neither a folder, nor in the cache, nor on the Hub.
    """
    if Path(path).exists() or not _NAME.fullmatch(path):
        return path
    from huggingface_hub import constants, snapshot_download

    name, _, revision = path.partition("@")
    options: dict[str, Any] = {"repo_id": name, "revision": revision or None}
    found = [f"no folder {Path(path).absolute()}"]
    try:
        cached = str(snapshot_download(**options, local_files_only=True))
        if (lacks := _lacks(Path(cached))) is None:
            return cached
        found.append(f"in the cache {cached} without {lacks}")
    except Exception:  # of several kinds, and of httpx
        found.append(f"nothing in the cache {constants.HF_HUB_CACHE}")
    try:
        folder = str(snapshot_download(**options, allow_patterns=_FILES, ignore_patterns=["*/*"]))
        if (lacks := _lacks(Path(folder))) is None:
            return folder
        found.append(f"{constants.ENDPOINT}/{name} has no {lacks}")
        fix = "use another model; weights that are pickles have to be saved as safetensors first"
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        asked = "not asked (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else f"{type(error).__name__}: {reason[:200]}"
        found.append(f"{constants.ENDPOINT}: {asked}")
        fix = "check the name; download it where the Hub can be reached (hf download NAME), or give a folder"
    raise EngineError(
        f"the model {path!r} is neither a folder nor a model of the Hub that can be loaded", code="engine.model",
        where="model.path", expected="a Hugging Face folder, or OWNER/NAME of a model on the Hub",
        found="; ".join(found), fix=fix,
    )  # fmt: skip


def model_name(path: str) -> str:
    """Return the name on the Hub of a model in its cache; of another folder its path."""
    folder = Path(path)
    found = _CACHED.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return path if found is None else f"{found[1]}/{found[2]}"


def _lacks(folder: Path) -> str | None:
    """Return what a folder lacks to be a model or an adapter with its weights."""
    if (folder / "adapter_config.json").is_file():
        return None if (folder / "adapter_model.safetensors").is_file() else "adapter_model.safetensors"
    if not (folder / "config.json").is_file():
        return "config.json"
    wanted = {"model.safetensors"}
    if (index := folder / "model.safetensors.index.json").is_file():
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    return missing[0] if missing else None


def upload(folder: Path, name: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Create the model repository ``name`` if there is none, upload a folder into it, and return its address.

    Raise ``run.failed`` with the Hub's answer.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        message = "Upload a model that Jackfield has trained"
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # of several kinds, and of httpx
        what, fix = "the model was not uploaded", "log in (hf auth login), or give a token; the folder is unchanged"
        raise RunError(
            what, where=f"{api.endpoint}/{name}", found=f"{type(error).__name__}: {error}", fix=fix
        ) from error
    return str(repository)


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults in a model's ``generation_config.json``; ``engine.model`` if it is not JSON."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        kept = {
            key: found[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if key in found
        }
    except (OSError, ValueError, TypeError) as error:
        what, fix = "generation_config.json cannot be read", "correct it, or remove it"
        raise EngineError(what, code="engine.model", where=str(file), found=error, fix=fix) from error
    return kept
