"""Hugging Face model folders: the class that loads one, and the names that its tensors have there.

A loaded model may hold its weights in another form than its checkpoint: transformers stacks the projections of all
experts into one parameter (``mlp.experts.gate_up_proj`` for ``mlp.experts.0.gate_proj.weight`` and all others), and
moves the parts of vision-language models. Weights travel, and are saved, under the names of the checkpoint, in its
shapes. :class:`CheckpointNames` converts both ways, one *group* of tensors at a time. A parameter that is only renamed
is a group; so is a stacked parameter with all tensors that it is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.errors import WeightsError

if TYPE_CHECKING:
    import torch

_SHOWN = 4  #: names in a message


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a model folder's safetensors files, by name; empty without such files."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is not a mapping
                found[name] = tuple(tensors.get_slice(name).get_shape())
    return found


def auto_class(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the class of transformers whose ``from_pretrained`` loads all of the model in ``folder``.

    ``AutoModelForImageTextToText`` if config.json names such a model, or nothing else fits; ``AutoModelForCausalLM``
    otherwise, which would load only the language model of some vision-language models.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    seeing = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if seeing is None or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    named = seeing in (config.architectures or ())
    speaks = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForImageTextToText if named or not speaks else AutoModelForCausalLM


@attrs.frozen(eq=False)
class TensorGroup:
    """Tensors that are converted together."""

    parts: tuple[str, ...]  #: names in the loaded model
    shapes: Mapping[str, tuple[int, ...]]  #: of the checkpoint's tensors, by name
    _key: str  #: what the library calls the group
    _pattern_of: Mapping[str, str]  #: by part: the converter's pattern that it matches
    _names: Mapping[str, str]  #: by the name that the converter gives: the checkpoint's
    _converter: Any = None  #: from the model's form to the checkpoint's; None: the values are the same

    @property
    def only_renamed(self) -> bool:
        """Return whether it is one tensor with the same values in both forms."""
        return self._converter is None


class CheckpointNames:
    """The names and forms that the tensors of a model loaded by transformers have in its folder.

    Tied parameters have one name: the one in the folder, or the library's choice if the folder has several. Buffers
    that are not saved have none. Pass the model that ``from_pretrained`` returned, before it is wrapped or sharded;
    names and shapes are checked against the safetensors files of its folder.

    Raises:
        WeightsError: ``weights.names`` if the library cannot turn the model back into the folder's form.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self._model = model
        self._forward = _Transforms(list(getattr(model, "_weight_conversions", None) or ()))
        try:
            self._backward = _Transforms([each.reverse_transform() for each in reversed(self._forward.all)])
            self._disk = shapes_of(folder)
            state = {name: each for name, each in model.state_dict(keep_vars=True).items() if hasattr(each, "shape")}
            self._shapes = {name: tensor.shape for name, tensor in state.items()}
            parts, self._aliases = self._parts(state)
            self.groups = tuple(self._plan(parts))
        except (ValueError, RuntimeError, AttributeError, KeyError, TypeError, StopIteration) as error:
            raise self._refusal(f"{type(error).__name__}: {error}") from error
        self._groups = {name: group for group in self.groups for name in group.shapes}
        self._check()

    def find(self, name: str) -> tuple[str, TensorGroup] | None:
        """Return the name and group of a checkpoint's tensor; any of the names of tied tensors works."""
        name = self._aliases.get(name, name)
        group = self._groups.get(name)
        return None if group is None else (name, group)

    def to_checkpoint(self, group: TensorGroup, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert whole tensors of a group, in the order of its parts, to the checkpoint's, contiguous, by name.

        The result may share their memory.
        """
        if group.only_renamed:
            return dict(zip(group.shapes, (tensor.contiguous() for tensor in tensors), strict=True))
        converter = deepcopy(group._converter)
        for part, tensor in zip(group.parts, tensors, strict=True):
            converter.add_tensor(group._key, part, group._pattern_of[part], tensor)
        return {group._names[name]: tensor.contiguous() for name, tensor in self._run(converter, group._key)}

    def to_model(self, group: TensorGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert all of the checkpoint's tensors in a group to the model's, by their names in the model.

        The result may share their memory.
        """
        if group.only_renamed:
            return dict(zip(group.parts, tensors.values(), strict=True))
        converters: dict[str, Any] = {}
        for name in _sorted(tensors):
            key, converter, pattern = self._loaded_name(name)
            converters.setdefault(key, deepcopy(converter)).add_tensor(key, name, pattern, tensors[name])
        return {name: tensor for key, each in converters.items() for name, tensor in self._run(each, key)}

    def _run(self, converter: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in converter.convert(key, model=self._model, config=self._model.config).items():
            yield name, value[0] if isinstance(value, list) else value

    def _parts(self, state: Mapping[str, torch.Tensor]) -> tuple[list[str], dict[str, str]]:
        """Return the names of all saved tensors, tied ones once, and the tied ones' other names."""
        ignored = set(self._model._keys_to_ignore_on_save or ())
        secondary = set(getattr(self._model, "all_tied_weights_keys", None) or ())
        same: dict[int, list[str]] = {}
        for name, tensor in state.items():
            if name not in ignored:
                same.setdefault(id(tensor), []).append(name)
        parts: list[str] = []
        aliases: dict[str, str] = {}
        for names in same.values():
            names.sort(key=lambda name: name in secondary)
            chosen = next((name for name in names if self._saved_name(name) in self._disk), names[0])
            parts.append(chosen)
            aliases.update({self._saved_name(name): self._saved_name(chosen) for name in names if name != chosen})
        return _sorted(parts), aliases

    def _saved_name(self, name: str) -> str:
        """Return the folder's name for the library's ``name``: with or without the model's prefix."""
        name = self._backward.renamed(name)
        prefix = f"{self._model.base_model_prefix}."
        others = (name, prefix + name, name.removeprefix(prefix))
        return next((other for other in others if other in self._disk), name)

    def _plan(self, parts: list[str]) -> Iterator[TensorGroup]:
        """Yield groups in the order of their first parts, tried on tensors without data."""
        import torch

        collected: dict[str, tuple[Any, dict[str, str]]] = {}
        for part in parts:
            key, converter, pattern = self._backward.converted(part)
            collected.setdefault(key if converter else part, (converter, {}))[1][part] = pattern
        for key, (converter, pattern_of) in collected.items():
            group = tuple(pattern_of)
            whole = [torch.empty(self._shapes[part], device="meta") for part in group]
            if converter is None:
                yield TensorGroup(group, {self._saved_name(key): tuple(whole[0].shape)}, key, {}, {})
                continue
            trial = deepcopy(converter)
            for part, tensor in zip(group, whole, strict=True):
                trial.add_tensor(key, part, pattern_of[part], tensor)
            made = {name: tuple(tensor.shape) for name, tensor in self._run(trial, key)}
            names = {name: self._saved_name(name) for name in made}
            yield TensorGroup(
                group, {names[name]: shape for name, shape in made.items()}, key, pattern_of, names, converter
            )

    def _loaded_name(self, name: str) -> tuple[str, Any, str]:
        """Return a tensor's name in the model, by the library's rules for loading, and its converter."""
        key, converter, pattern = self._forward.converted(self._forward.renamed(name))
        prefix = f"{self._model.base_model_prefix}."
        for other in (key, prefix + key, key.removeprefix(prefix)):
            if other in self._shapes:
                return other, converter, pattern
        return name, None, ""

    def _check(self) -> None:
        """Refuse conversions whose round trip does not give the folder's and the model's tensors."""
        import torch

        wrong = [
            f"{name} {list(shape)}"
            for group in self.groups
            for name, shape in group.shapes.items()
            if self._disk and self._disk.get(name) != shape
        ]
        if wrong:
            raise self._refusal(_some(wrong))
        for group in self.groups:
            if group.only_renamed:
                continue
            tensors = {name: torch.empty(shape, device="meta") for name, shape in group.shapes.items()}
            try:
                found = {name: tensor.shape for name, tensor in self.to_model(group, tensors).items()}
            except (ValueError, RuntimeError, AttributeError, KeyError, TypeError) as error:
                raise self._refusal(f"{type(error).__name__}: {error}") from error
            if found != {part: self._shapes[part] for part in group.parts}:
                raise self._refusal(_some(sorted(found)))

    def _refusal(self, found: str) -> WeightsError:
        return WeightsError(
            f"weights of {type(self._model).__name__} cannot be published under the names of their checkpoint",
            code="weights.names",
            where=str(getattr(self._model.config, "name_or_path", "")),
            expected="tensors with the names and shapes of the folder's safetensors files",
            found=found,
            fix="load the folder with transformers and save it with save_pretrained(), without quantisation",
        )


class _Transforms:
    """transformers' renamings and converters of one direction."""

    def __init__(self, transforms: list[Any]) -> None:
        self.all = transforms
        self._converters = [each for each in transforms if hasattr(each, "operations")]
        self._renamings = [each for each in transforms if not hasattr(each, "operations")]

    def renamed(self, name: str) -> str:
        """Return the name after all renamings."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def converted(self, name: str) -> tuple[str, Any, str]:
        """Return the converted name, the one converter that matches, and its pattern."""
        for converter in self._converters:
            key, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return key, converter, pattern
        return name, None, ""


def _sorted(names: Iterable[str]) -> list[str]:
    """Sort names as the library does: layers and experts by their numbers."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
