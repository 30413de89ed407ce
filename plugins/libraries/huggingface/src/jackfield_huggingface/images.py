"""Images in the prompts of vision-language models: which models take them, and what a pass with them is given.

Such a model has one vector for each place of an image in the prompt, and replaces the embeddings of placeholder tokens
by them. Here they replace the *first* placeholders of each row alone: a placeholder that the model itself has generated
stays a token, so that a row means the same in a server's first pass, in its later ones, and in training.

Shapes: ``B`` rows, ``S`` padded positions, ``H`` hidden size, ``I`` images of a row, ``C`` channels.
"""

from __future__ import annotations

import abc
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import attrs

if TYPE_CHECKING:
    import torch

PIXELS, GRIDS, SIZES = "pixel_values", "image_grid_thw", "image_sizes"

Images: TypeAlias = Mapping[str, "torch.Tensor"]  #: of one row, by the names of a model's arguments
Inputs: TypeAlias = dict[str, "torch.Tensor"]  #: arguments of a model's forward


class ImageInputs(abc.ABC):
    """What a model takes as images, and the arguments of a pass over rows with them."""

    token_id: int  #: the placeholder
    names: ClassVar[tuple[str, ...]]  #: of the tensors that a pass is given of each row's images

    @staticmethod
    def of(model: Any) -> ImageInputs | None:
        """Return what a loaded model takes; None if it takes no images, or others than those that are known here.

        That the language model gets in a pass what the library's own forward gives it is tried here, by the vision
        tower alone: the language model does not run.
        """
        for kind in (SameSize, Grids):
            try:
                found = kind.described(model)
                if found is not None and found._fits(model):
                    return found
            except Exception:  # whatever the model refuses is another kind of model
                continue
        return None

    @abc.abstractmethod
    def problem(self, arrays: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[str, str] | None:
        """Return what is expected and found where a prompt's arrays do not fit the model; None if they fit."""

    @abc.abstractmethod
    def example(self) -> tuple[Inputs, tuple[int, ...]]:
        """Return an image of random pixels, and its placeholders."""

    @abc.abstractmethod
    def library(self, model: Any, input_ids: torch.Tensor, images: Images) -> Inputs:
        """Return the arguments of the library's own forward over rows of which all placeholders are of ``images``."""

    def given(
        self, model: Any, input_ids: torch.Tensor, rows: Sequence[Images | None]
    ) -> AbstractContextManager[Inputs]:
        """Return a block for one pass over ``input_ids`` ``[B, S]``, and the arguments of the pass.

        ``rows`` has the images of each row, or None; :meth:`problem` has found none. Gradients flow into the vision
        tower, too.
        """
        import torch

        present = [each for each in rows if each]
        if not present:
            return nullcontext({"input_ids": input_ids})
        joined = {name: torch.cat([each[name] for each in present]) for name in self.names}
        counts = torch.tensor([sum(self._places(each)) if each else 0 for each in rows], device=input_ids.device)
        held = input_ids == self.token_id
        replaced = held & (held.cumsum(1) <= counts[:, None])
        images = {name: each.to(input_ids.device) for name, each in joined.items()}
        return self._given(model, input_ids, replaced, images)

    def offset(self, row: Images | None) -> int:
        """Return by how much the position of a token behind a row's images differs from the number of tokens."""
        return 0

    @abc.abstractmethod
    def _places(self, row: Images) -> list[int]:
        """Return the number of placeholders of each image."""

    @abc.abstractmethod
    def _given(
        self, model: Any, input_ids: torch.Tensor, replaced: torch.Tensor, images: Images
    ) -> AbstractContextManager[Inputs]:
        """Return the block of :meth:`given`; ``replaced`` ``[B, S]`` are the places of all ``images``."""

    def _fits(self, model: Any) -> bool:
        """Return whether the language model gets in a pass what the library's own forward gives it."""
        import torch

        image, places = self.example()
        other = self.token_id - 1 if self.token_id else 1
        ids = torch.tensor([[other, *places, other], [*places, other, other]], device=next(model.parameters()).device)
        both = {name: torch.cat((each, each)) for name, each in image.items()}
        with torch.no_grad():
            with self.given(model, ids, [image, image]) as inputs:
                found = _passed_on(model, **inputs)
            expected = _passed_on(model, **self.library(model, ids, both))
        alike = all(_equal(found.get(name), expected.get(name)) for name in {*found, *expected})
        positions = inputs.get("position_ids")
        own = _equal(expected.get("position_ids"), positions)
        if positions is not None:
            own &= positions[:, 0, -1].tolist() == [ids.shape[1] - 1 + self.offset(image)] * len(positions)
        return alike and own and "inputs_embeds" in expected and expected.get("attention_mask") is None


@attrs.frozen
class SameSize(ImageInputs):
    """Images of one size, ``pixel_values`` ``[I, C, height, width]``, each for the same number of placeholders.

    Their heights and widths, ``image_sizes`` ``[I, 2]``, may be beside, as the processor of Mistral 3 makes them.
    """

    names = (PIXELS,)
    token_id: int
    places: int  #: placeholders of an image
    shape: tuple[int, int, int]  #: of an image: channels, height, width

    @classmethod
    def described(cls, model: Any) -> Self | None:
        """Return what the configuration of a model says; None where it says no size."""
        import torch

        vision = getattr(model.config, "vision_config", None)
        token_id, size = getattr(model.config, "image_token_id", None), getattr(vision, "image_size", None)
        if token_id is None or size is None or not hasattr(model, "get_image_features"):
            return None
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (int(getattr(vision, "num_channels", 3)), int(height), int(width))
        with torch.no_grad():
            places = len(_features(model, _moved(model, {PIXELS: torch.zeros(1, *shape)})[PIXELS])[0])
        return cls(int(token_id), places, shape)

    def problem(self, arrays: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[str, str] | None:
        if not arrays:
            return None
        pixels = arrays.get(PIXELS)
        if pixels is None or not {*arrays} <= {PIXELS, SIZES}:
            return f"{PIXELS}, with {SIZES} or without", ", ".join(sorted(arrays))
        if pixels.dtype.kind != "f" or tuple(pixels.shape[1:]) != self.shape:
            return f"{PIXELS} of numbers with a fraction, (images, *{self.shape})", f"{pixels.dtype}, {pixels.shape}"
        sizes = arrays.get(SIZES)
        if sizes is not None and sizes.tolist() != [list(self.shape[1:])] * len(pixels):
            return f"{SIZES} of {list(self.shape[1:])} for each image: none has padding", str(sizes.tolist())
        wanted, there = self.places * len(pixels), sum(each == self.token_id for each in prompt_ids)
        if there < wanted:
            return f"{wanted} placeholders (token {self.token_id}) in the prompt, {self.places} an image", str(there)
        return None

    def example(self) -> tuple[Inputs, tuple[int, ...]]:
        return {PIXELS: _random(1, *self.shape)}, (self.token_id,) * self.places

    def library(self, model: Any, input_ids: torch.Tensor, images: Images) -> Inputs:
        pixels = _moved(model, images)[PIXELS]
        return {"input_ids": input_ids, PIXELS: pixels, **_sizes(model, pixels)}

    def _places(self, row: Images) -> list[int]:
        return [self.places] * len(row[PIXELS])

    @contextmanager
    def _given(self, model: Any, input_ids: torch.Tensor, replaced: torch.Tensor, images: Images) -> Iterator[Inputs]:
        embeddings = model.get_input_embeddings()(input_ids)
        yield {"inputs_embeds": _replace(embeddings, replaced, _features(model, images[PIXELS].to(embeddings.dtype)))}


@attrs.frozen
class Grids(ImageInputs):
    """Images of any size in patches, and positions in the plane, as Qwen-VL has them.

    ``pixel_values`` are ``[patches, features]``, and ``image_grid_thw`` int64 ``[I, 3]``: each image's patches in time
    (one), height and width. ``merge`` patches along each side are one place. Tokens behind an image go on from its
    larger side, so that positions differ from the number of tokens. Features of lower layers of the vision tower
    (DeepStack) are added to the outputs of the language model's first layers.
    """

    names = (PIXELS, GRIDS)
    token_id: int
    features: int  #: of a patch
    merge: int  #: patches along each side that are one place

    @classmethod
    def described(cls, model: Any) -> Self | None:
        """Return what the configuration of a model says; None where it does not have such images."""
        vision = getattr(model.config, "vision_config", None)
        token_id = getattr(model.config, "image_token_id", None)
        names = ("in_channels", "temporal_patch_size", "patch_size", "patch_size")
        sides = [getattr(vision, name, None) for name in names]
        merge = getattr(vision, "spatial_merge_size", None)
        if token_id is None or not all(isinstance(each, int) for each in (*sides, merge)):
            return None
        return cls(int(token_id), math.prod(sides), merge)  # type: ignore[arg-type]

    def problem(self, arrays: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[str, str] | None:
        if not arrays:
            return None
        if sorted(arrays) != [GRIDS, PIXELS]:
            return f"{PIXELS} and {GRIDS}", ", ".join(sorted(arrays))
        pixels, grids = arrays[PIXELS], arrays[GRIDS]
        if pixels.dtype.kind != "f" or tuple(pixels.shape[1:]) != (self.features,):
            expected = f"{PIXELS} of numbers with a fraction, (patches, {self.features})"
            return expected, f"{pixels.dtype}, {pixels.shape}"
        if grids.dtype.kind not in "iu" or tuple(grids.shape[1:]) != (3,) or not len(grids):
            return f"{GRIDS} of integers, (images, 3)", f"{grids.dtype}, {grids.shape}"
        sides: list[list[int]] = grids.tolist()
        if any(t != 1 or min(h, w) < 1 or h % self.merge or w % self.merge for t, h, w in sides):
            return f"{GRIDS} of 1 and multiples of {self.merge}, above 0", str(sides)
        patches = sum(map(math.prod, sides))
        if patches != len(pixels):
            return f"{patches} patches in {PIXELS}, as {GRIDS} says", str(len(pixels))
        wanted = [math.prod(each) // self.merge**2 for each in sides]
        runs = self._runs(prompt_ids, sum(wanted))
        if runs != wanted:
            expected = f"groups of {wanted} placeholders (token {self.token_id}) in the prompt, with a token between"
            return expected, f"groups of {runs}"
        return None

    def _runs(self, prompt_ids: Sequence[int], most: int) -> list[int]:
        """Return the lengths of the groups of placeholders in a prompt, of the first ``most``."""
        groups = (len(list(group)) for token, group in itertools.groupby(prompt_ids) if token == self.token_id)
        runs, left = list[int](), most
        for group in groups:
            if left:
                runs.append(min(group, left))
                left -= runs[-1]
        return runs

    def example(self) -> tuple[Inputs, tuple[int, ...]]:
        import torch

        sides = (1, 2 * self.merge, 3 * self.merge)
        images = {PIXELS: _random(math.prod(sides), self.features), GRIDS: torch.tensor([sides])}
        return images, (self.token_id,) * 6

    def library(self, model: Any, input_ids: torch.Tensor, images: Images) -> Inputs:
        types = (input_ids == self.token_id).int()
        return {"input_ids": input_ids, "mm_token_type_ids": types, **_moved(model, images)}

    def offset(self, row: Images | None) -> int:
        sides = row[GRIDS].tolist() if row else []
        return sum(max(h, w) // self.merge - h * w // self.merge**2 for _, h, w in sides)

    def _places(self, row: Images) -> list[int]:
        return (row[GRIDS].prod(-1) // self.merge**2).tolist()

    @contextmanager
    def _given(self, model: Any, input_ids: torch.Tensor, replaced: torch.Tensor, images: Images) -> Iterator[Inputs]:
        import torch

        embeddings = model.get_input_embeddings()(input_ids)
        pixels, grids = images[PIXELS].to(embeddings.dtype), images[GRIDS]
        found = model.get_image_features(pixel_values=pixels, image_grid_thw=grids)
        positions, _ = model.base_model.get_rope_index(input_ids, replaced.int(), image_grid_thw=grids)
        inputs = {
            "inputs_embeds": _replace(embeddings, replaced, found.pooler_output),
            "position_ids": positions,
        }
        deep = getattr(found, "deepstack_features", None)
        if deep is None:
            yield inputs
            return
        added = [torch.cat(list(each)) for each in deep]

        def add(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return arguments, {**named, "visual_pos_masks": replaced, "deepstack_visual_embeds": added}

        hook = model.base_model.language_model.register_forward_pre_hook(add, with_kwargs=True)
        try:
            yield inputs
        finally:
            hook.remove()


def _random(*shape: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _moved(model: Any, images: Images) -> Inputs:
    """Return images on a model's device, and in its dtype unless they are integers."""
    like = next(model.parameters())
    return {
        name: each.to(like.device, like.dtype if each.is_floating_point() else each.dtype)
        for name, each in images.items()
    }


def _replace(embeddings: torch.Tensor, replaced: torch.Tensor, features: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return embeddings ``[B, S, H]`` with the vectors of images, ``[places, H]`` each, where ``replaced`` says so."""
    import torch

    return embeddings.masked_scatter(replaced[..., None], torch.cat(list(features)).to(embeddings.dtype))


def _features(model: Any, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Return the vectors of each image of one size, ``[places, H]``."""
    found = model.get_image_features(pixel_values=pixels, **_sizes(model, pixels))
    features = getattr(found, "pooler_output", found)
    return [each.reshape(-1, each.shape[-1]) for each in features]


def _sizes(model: Any, pixels: torch.Tensor) -> Inputs:
    """Return the sizes of images for a model that wants them (Mistral 3), int64 ``[I, 2]``: they have no padding."""
    import torch

    if SIZES not in inspect.signature(model.get_image_features).parameters:
        return {}
    return {SIZES: torch.tensor([pixels.shape[-2:]] * len(pixels), device=pixels.device)}


class _Stop(Exception):
    """Ends a pass before the language model's layers."""


def _passed_on(model: Any, **inputs: Any) -> dict[str, Any]:
    """Return the arguments that a model gives to its language model."""
    seen: dict[str, Any] = {}

    def note(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.update(named)
        raise _Stop

    hook = model.base_model.language_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(**inputs, use_cache=False)
    except _Stop:
        pass
    finally:
        hook.remove()
        if hasattr(model.base_model, "rope_deltas"):  # of this pass; later ones have other rows
            model.base_model.rope_deltas = None
    return seen


def _equal(one: Any, other: Any) -> bool:
    """Return whether two arguments are the same, tensors by their values."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)
