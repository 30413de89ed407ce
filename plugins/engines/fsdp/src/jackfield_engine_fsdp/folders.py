"""Hugging Face folders: load a module that is ready to be sharded, and export full tensors and whole folders."""

from __future__ import annotations

import enum
import functools
import logging
import shutil
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from jackfield.abc.engine import Box, LoraSpec, ModelSpec
from jackfield.errors import EngineError
from jackfield_engine_fsdp.model import TokenModel, has_adapter, is_of_adapter
from jackfield_engine_fsdp.parts import own_part
from jackfield_engine_fsdp.trained import full, published_name
from jackfield_huggingface.adapters import merged_weight
from jackfield_huggingface.architectures import advice
from jackfield_huggingface.attention import choose_attention
from jackfield_huggingface.heads import HEAD_FILE, read_scalar_head
from jackfield_huggingface.names import CheckpointNames, auto_class

if TYPE_CHECKING:
    from peft import PeftModel

_log = logging.getLogger("jackfield")

invalid = functools.partial(EngineError, code="config.invalid-value")
_unusable = functools.partial(EngineError, code="engine.model", where="model.path")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars inside the block: the run shows its own progress."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers inside the block, and restore their state afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def load_causal_lm(spec: ModelSpec, attention: str, seed: int, *, predicts: bool = True) -> PreTrainedModel:
    """Load the whole model of ``spec.path`` on the CPU, in every rank; vision-language models, too.

    Without ``predicts``, for a critic, the folder may lack the output layer, as that of a sequence classifier does: it
    is tied to the embeddings then. Refuse a folder that is missing, cannot be loaded or lacks weights
    (``engine.model``), and an unknown dtype.
    """
    if spec.dtype not in DTYPES:
        expected = "one of " + ", ".join(sorted(DTYPES))
        raise invalid(f"unknown dtype {spec.dtype!r}", where="model.dtype", expected=expected, found=repr(spec.dtype))
    folder = Path(spec.path)
    if not (folder / "config.json").is_file():
        raise _unusable(
            f"no model in the folder {spec.path!r}",
            expected="a Hugging Face folder with config.json and weights",
            found="no config.json" if folder.is_dir() else "no such folder",
            fix="give a folder that save_pretrained() wrote or that was downloaded before",
        )
    try:
        with seeded(seed), without_progress_bars():
            attention = choose_attention(folder, attention, spec.trust_remote_code)
            model, report = auto_class(folder, spec.trust_remote_code).from_pretrained(
                str(folder),
                dtype=DTYPES[spec.dtype],
                attn_implementation=attention,
                trust_remote_code=spec.trust_remote_code,
                use_safetensors=True,  # no pickle
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as caught:  # transformers raises various types for a broken folder or a missing kernel
        raise _unusable(
            f"the model in {spec.path!r} cannot be loaded: {caught}",
            expected=f"weights that transformers loads as a causal language model with {attention} attention",
            found=type(caught).__name__,
            fix="install the package that it names, or set engine.attention: sdpa"
            if isinstance(caught, ImportError)
            else advice(spec.path, "trained"),
        ) from caught
    if not predicts and {"lm_head.weight"} == set(report.get("missing_keys", ())):
        model.config.tie_word_embeddings = True
        model.tie_weights()
    else:
        _refuse_missing_weights(spec.path, report)
    _refuse_bidirectional(spec.path, model)
    model.config.use_cache = False
    if spec.gradient_checkpointing:
        # transformers 5.2x renamed the method, and the old name warns
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as caught:
            raise invalid(str(caught), where="model.gradient_checkpointing", fix="set it to false") from caught
    return model


def _refuse_missing_weights(path: str, report: dict[str, Any]) -> None:
    """Refuse a folder that lacks weights, which transformers would fill with random numbers."""
    missing = sorted(report.get("missing_keys", ())) + sorted(str(key) for key in report.get("mismatched_keys", ()))
    if missing:
        raise _unusable(
            f"the model folder {path!r} lacks {len(missing)} weights",
            expected="every weight of the architecture that config.json names",
            found="no " + ", ".join(missing[:4]) + (" …" if len(missing) > 4 else ""),
        )


def _refuse_bidirectional(path: str, model: PreTrainedModel) -> None:
    """Refuse a prefix language model (PaliGemma): it attends to the tokens that are to be predicted."""
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None) is True:
        raise _unusable(
            f"{type(model).__name__} attends to later tokens",
            where=path,
            expected="a causal language model",
            found="use_bidirectional_attention: true in its configuration",
            fix=advice(path, "trained"),
        )


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the language model's layers that an adapter can merge into, by name; no output layer."""
    head = model.get_output_embeddings()
    inside = set((getattr(model.base_model, "language_model", None) or model).modules())
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer in inside and layer is not head
    }


def add_lora(model: PreTrainedModel, spec: LoraSpec, seed: int) -> PeftModel:
    """Add a fresh adapter to ``model`` (the same for the same seed); only the adapter is trainable.

    Refuse (``config.invalid-value``) what PEFT refuses, such as unknown target modules, and layers whose adapters no
    rollout server could load: experts that are stacked in one parameter.
    """
    from peft import LoraConfig, get_peft_model

    layers = _linear_layers(model)
    targets = list(spec.target_modules) or list(layers)
    _refuse_tied(model, targets)
    chosen = [layer for name, layer in layers.items() if f".{name}".endswith(tuple(f".{each}" for each in targets))]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.rank,
        use_dora=spec.use_dora,
        use_rslora=spec.use_rslora,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in chosen),
    )
    try:
        with seeded(seed), warnings.catch_warnings():
            # peft 0.21 uses a name that transformers 5.23 has renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted = get_peft_model(model, config)
    except ValueError as caught:
        raise invalid(
            f"the adapter does not fit the model: {caught}",
            where="model.lora.target_modules",
            fix=f"choose from {_last_names(layers)}",
        ) from caught
    _refuse_stacked(adapted, layers)
    base = Path(model.config.name_or_path)
    if base.is_dir():  # else it is a model's name on the hub
        adapted.peft_config["default"].base_model_name_or_path = str(base.resolve())
    return adapted


def _refuse_tied(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Refuse an adapter of an output layer that is tied: merged, it would change the embeddings."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    names = [f".{name}" for name, module in model.named_modules() if module is head]
    ends = tuple(f".{each}" for each in targets)
    if names and names[0].endswith(ends) and getattr(head, "weight", None) is embeddings.weight:
        raise invalid(
            "the output layer shares its weights with the embeddings, so it can have no adapter",
            where="model.lora.target_modules",
            expected="layers with weights of their own",
            found=names[0].removeprefix("."),
            fix="leave it out of target_modules",
        )


def _refuse_stacked(adapted: PeftModel, layers: dict[str, nn.Module]) -> None:
    """Refuse stacked experts: PEFT wraps their parameter, and servers cannot merge or load that."""
    from peft.tuners.lora.layer import LoraLayer

    wrong = [
        name.removeprefix("base_model.model.")
        for name, layer in adapted.named_modules()
        if isinstance(layer, LoraLayer) and not isinstance(layer.get_base_layer(), nn.Linear | Conv1D)
    ]
    if wrong:
        raise invalid(
            "adapters of these layers cannot be published to rollout servers",
            where="model.lora.target_modules",
            expected="linear layers",
            found=", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
            fix=f"set target_modules to some of {_last_names(layers)}",
        )


def _last_names(layers: dict[str, nn.Module]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in layers}))


@torch.no_grad()
def changed_by(step: float, parameters: Iterable[torch.Tensor]) -> float:
    """Return the share of elements that change when ``step`` is added in their own dtype.

    An update of AdamW is about as large as the learning rate. An element of bfloat16 has 8 bits: it does not change by
    less than 1/512 to 1/256 of itself.
    """
    changed = total = 0
    for parameter in parameters:
        wide = parameter.float()
        changed += int(((wide + step).to(parameter.dtype) != parameter).sum())
        total += parameter.numel()
    return changed / max(1, total)


def make_value_head(folder: Path, hidden_size: int, dtype: torch.dtype, seed: int) -> nn.Linear:
    """Create a head ``[*, hidden_size] -> [*, 1]``: the folder's scalar head (:func:`read_scalar_head`).

    Without one, weights are N(0, 1/hidden_size) from the seed. A bias that is not given is 0.
    """
    generator, given = torch.Generator().manual_seed(seed), read_scalar_head(folder, hidden_size) or {}
    with seeded(seed):
        head = nn.Linear(hidden_size, 1)
    with torch.no_grad():
        head.weight.normal_(0.0, hidden_size**-0.5, generator=generator)
        head.bias.zero_()
        for name, tensor in given.items():
            head.get_parameter(name).copy_(tensor)
    _log.info("the value head is %s", f"that of {folder}" if given else "a random one")
    return head.to(dtype)


#: Patterns of the files beside the weights that are needed to use them; copied unchanged.
_COMPANIONS = ["*.py", "tokenizer*", "vocab.*", "merges.txt", "spiece.model", "chat_template.*", "added_tokens.json"]
_COMPANIONS += ["special_tokens_map.json", "preprocessor_config.json", "processor_config.json"]


def published_tensors(model: TokenModel, names: CheckpointNames) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the whole model in checkpoint form, with an adapter merged.

    A group of tensors that are stacked in the model is gathered and then converted, which needs at most about three
    times its size, beside the model. Merged weights are computed one at a time: the base does not change.
    """
    module, dtypes = model.causal_lm, model.published_dtypes
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    config = adapter_config(model)

    def whole(part: str) -> torch.Tensor:
        if part in tensors:
            return full(tensors[part].detach().to(dtypes.get(part, tensors[part].dtype)))
        layer, _, leaf = part.rpartition(".")
        base = full(tensors[f"{layer}.base_layer.{leaf}"])
        if leaf != "weight" or config is None:
            return base
        adapter = module.get_submodule(layer)
        kinds = ["lora_A", "lora_B", *(["lora_magnitude_vector"] if config["use_dora"] else [])]
        parts = {kind: full(adapter.get_submodule(f"{kind}.default").weight) for kind in kinds}
        return merged_weight(layer, base, parts, config).to(base.dtype)

    for group in names.groups:
        yield from names.to_checkpoint(group, [whole(part) for part in group.parts]).items()


def adapter_tensors(model: TokenModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapter's tensors under PEFT's names."""
    for name, parameter in model.language_model.named_parameters():
        if is_of_adapter(name):  # an engine without an optimizer trains nothing, but exports
            yield published_name(name), full(parameter)


def local_tensors(model: TokenModel, names: CheckpointNames) -> Generator[tuple[Box, torch.Tensor], None, None] | None:
    """Return an iterator of what this rank has of the model's published tensors; None if that is not rows of each.

    So it is with an adapter, and where the checkpoint's form needs whole tensors (stacked experts). What every rank has
    whole, such as a buffer, every rank yields.
    """
    if has_adapter(model.language_model) or not all(group.only_renamed for group in names.groups):
        return None
    module, dtypes = model.causal_lm, model.published_dtypes
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))

    def local() -> Generator[tuple[Box, torch.Tensor], None, None]:
        for group in names.groups:
            (name,), (part,) = group.shapes, group.parts
            own = own_part(tensors[part])
            if own.values.numel() or not tensors[part].numel():  # there may be fewer rows than ranks
                values = own.values.to(dtypes.get(part, own.values.dtype))
                yield Box(name=name, shape=own.shape, start=own.start, length=tuple(values.shape)), values

    return local()


def adapter_config(model: TokenModel) -> dict[str, Any] | None:
    """Return the adapter's PEFT config as JSON-ready values; None without an adapter."""
    if not has_adapter(model.language_model):
        return None
    return {name: _plain(value) for name, value in model.language_model.peft_config["default"].to_dict().items()}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def save_folder(model: TokenModel, names: CheckpointNames, source: Path, folder: Path, writes: bool) -> None:
    """Write an empty folder for ``from_pretrained`` (transformers', or PEFT's with an adapter).

    A collective operation: ranks without ``writes`` only take part in the gathering. The tokenizer's files are copied
    from ``source``, the model's folder.
    """
    own = adapter_tensors(model) if has_adapter(model.language_model) else published_tensors(model, names)
    tensors = {name: tensor.cpu() for name, tensor in own if writes}
    head = {name: full(each) for name, each in model.value_head.named_parameters()} if model.value_head else {}
    if not writes:
        return
    if has_adapter(model.language_model):
        save_file(_contiguous(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        model.language_model.peft_config["default"].save_pretrained(str(folder))
    else:
        with without_progress_bars(), model.dropout.config_as_loaded():
            model.causal_lm.save_pretrained(str(folder), state_dict=tensors, save_original_format=False)
            if model.published_dtypes:  # the library names the dtype of the master weights
                model.causal_lm.config.dtype = model.dtype
                model.causal_lm.config.save_pretrained(str(folder))
    if head:
        save_file(_contiguous(head), folder / HEAD_FILE, metadata={"format": "pt"})
    for path in (path for pattern in _COMPANIONS for path in source.glob(pattern)):
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
