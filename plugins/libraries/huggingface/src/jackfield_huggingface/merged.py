"""Adapters as models: an adapter's folder is merged into its base model, once, in Hugging Face's cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from jackfield.errors import EngineError, PluginError
from jackfield_huggingface.hub import model_folder, model_name
from jackfield_huggingface.origins import CONFIG, WEIGHTS, onto_base, origin_of, record

_TOKENIZER = (
    "*token*",
    "chat_template*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
)  #: also tokenizer.model
_ADAPTER = (CONFIG, WEIGHTS, *_TOKENIZER)
_BASE = ("*.safetensors", "*.bin", "config.json", "generation_config.json", *_TOKENIZER)


def merged_folder(folder: str, outer: tuple[str, ...] = ()) -> str:
    """Return the folder of the model that results from an adapter and its base model.

    The base is the one that ``adapter_config.json`` names: a folder, or a model of the Hub; an adapter is merged first
    (``outer`` are those whose base it is). The result is kept under
    ``HF_HOME/jackfield/merged`` and made again only if the adapter or its base has changed. Raise ``engine.model`` if
    the adapter cannot be merged or its base is not to be had, and ``plugin.requirement`` without peft.
    """
    from huggingface_hub import constants

    try:
        described = json.loads(Path(folder, CONFIG).read_text(encoding="utf-8"))
        base, revision = str(described["base_model_name_or_path"]), described.get("revision")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(folder, f"{CONFIG} with base_model_name_or_path", f"{type(error).__name__}: {error}") from error
    if not Path(folder, WEIGHTS).is_file():
        raise _refused(folder, f"its weights in {WEIGHTS}", "none")
    if (task := described.get("task_type") or "CAUSAL_LM") != "CAUSAL_LM":
        raise _refused(folder, "an adapter with task_type CAUSAL_LM", task)
    whole = Path(base).is_dir() or revision is None
    base = model_folder(base if whole else f"{base}@{revision}")
    if Path(base, CONFIG).is_file() and not Path(base, "config.json").is_file():
        inner = (*outer, str(Path(folder).resolve()))
        if str(Path(base).resolve()) in inner:
            raise _refused(folder, "a whole model at the end of its base models", f"{base} once more")
        base = merged_folder(base, inner)
    if not Path(base, "config.json").is_file():
        raise _refused(folder, "its base model, in a folder or on the Hub", f"base_model_name_or_path {base}")
    place = Path(constants.HF_HOME, "jackfield", "merged", _digest(Path(folder), Path(base)))
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=place.parent))
        try:
            _merge(folder, base, made)
            if not place.is_dir():  # another process may have made it meanwhile
                made.rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    record(place, Path(folder), Path(base))
    return str(place)


def name_origin(folder: Path, path: str) -> dict[str, str]:
    """Have an exported model name what it was made from as the user knows it; return that, for its card.

    ``path`` is the folder of the run's model, which may be in a cache. An adapter that was trained on a merged one
    becomes one of the whole base model, as far as that can be; otherwise it names the merged adapter as its base.
    """
    base, origin, own = _name(path), origin_of(path), folder / CONFIG
    rows = {"base model": base}
    if origin is not None:
        adapter, whole = Path(origin["adapter"]), origin["base"]
        rows = {"base model": _name(whole), "adapter that was merged into it before": base}
        is_same = origin_of(whole) is None and _digest(adapter, Path(whole)) == Path(path).name
        if not own.is_file() or (is_same and onto_base(folder, adapter, _name(whole))):
            return rows
        rows = {"base model": base, "which is an adapter of": _name(whole), "before use": "merge that adapter first"}
    if own.is_file() and base != path:
        described = {**json.loads(own.read_text(encoding="utf-8")), "base_model_name_or_path": base}
        own.write_text(json.dumps(described, indent=2), encoding="utf-8")
    return rows


def _name(path: str) -> str:
    """Return the name of a model on the Hub, or its folder; of a merged one that of its adapter."""
    origin = origin_of(path)
    return model_name(path) if origin is None else _name(origin["adapter"])


def _merge(folder: str, base: str, made: Path) -> None:
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ModuleNotFoundError as error:
        what, fix = "a model that is an adapter needs peft", "pip install peft, or merge the adapter elsewhere"
        raise PluginError(what, code="plugin.requirement", where="model.path", fix=fix) from error
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = Path(folder, "tokenizer_config.json").is_file()
    try:
        with warnings.catch_warnings():  # peft reads what transformers calls by another name now
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            warnings.filterwarnings("error", "Found missing adapter keys")  # the base's weights would stay as they are
            tokenizer: Any = AutoTokenizer.from_pretrained(folder if own else base)
            model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
            if own and len(tokenizer) > model.get_input_embeddings().num_embeddings:  # trained with added tokens
                model.resize_token_embeddings(len(tokenizer))
            adapted = PeftModel.from_pretrained(model, folder)
            with safe_open(Path(folder, WEIGHTS), "pt") as file:
                given = {name for name in file.keys() if "lora_" in name}  # noqa: SIM118
            if left := given - set(get_peft_model_state_dict(adapted, save_embedding_layers=False)):
                raise ValueError(f"{len(left)} tensors belong to no layer of target_modules, as {min(left)}")
            merged = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # of any type, from peft, transformers and safetensors
        raise _refused(folder, f"an adapter of {base}", f"{type(error).__name__}: {error}") from error
    merged.save_pretrained(made)
    tokenizer.save_pretrained(made)


def _digest(adapter: Path, base: Path) -> str:
    """Return a digest of an adapter with its tokenizer, and of what its base model's files look like."""
    found = hashlib.sha256(str(base.resolve()).encode())
    for file in sorted(file for pattern in _ADAPTER for file in adapter.glob(pattern) if file.is_file()):
        content = file.read_bytes()
        found.update(f"{file.name} {len(content)} ".encode() + content)
    for file in sorted(file for pattern in _BASE for file in base.glob(pattern) if file.is_file()):
        if file.suffix in (".safetensors", ".bin"):  # too long to read
            seen = file.stat()
            found.update(f"{file.name} {seen.st_size} {seen.st_mtime_ns}".encode())
        else:
            found.update(f"{file.name} ".encode() + file.read_bytes())
    return found.hexdigest()[:32]


def _refused(folder: str, expected: str, found: object) -> EngineError:
    fix = "correct the adapter's folder, or merge it into its base model elsewhere and give the whole model"
    what = "the adapter cannot be merged into its base model"
    return EngineError(
        what, code="engine.model", where=f"model.path, {folder}", expected=expected, found=found, fix=fix
    )
