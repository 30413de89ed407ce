"""Prompts with images: pictures of messages in OpenAI's form become tokens and pixels, by the model's own processor.

A picture is a ``data:`` address or a file in a given folder; nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from jackfield.errors import DataError, PluginError
from jackfield.sdk.arrays import joined

if TYPE_CHECKING:
    from PIL.Image import Image

Messages: TypeAlias = Sequence[Mapping[str, Any]]
_Prompt: TypeAlias = tuple[tuple[int, ...], Mapping[str, Any]]  #: tokens, and arrays by name

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAXIMUM_BYTES = 32 << 20  #: of one picture's file
MAXIMUM_PIXELS = 64_000_000  #: of one picture
MAXIMUM_PICTURES = 64  #: of one conversation
_IMAGE_KINDS = ("image_url", "image")
_KEPT = 8  #: conversations; the rollouts of a group share one
_KEPT_PICTURES = 32
#: What a processor returns per token: the tokens are returned apart, and models make the others themselves.
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


class ImagePrompts:
    """Encodes conversations with pictures for one model, with the processor in its ``folder``."""

    def __init__(self, folder: str | Path, image_folders: Sequence[Path] = ()) -> None:
        self._folder, self._image_folders = str(folder), tuple(each.resolve() for each in image_folders)
        self._pictures: dict[str, _Prompt] = {}  #: by address or path
        self._joined: dict[tuple[str, ...], Mapping[str, Any]] = {}  #: the arrays of the pictures of one text

    @property
    def image_token(self) -> str:
        """The placeholder, which a chat template shows for each picture."""
        return str(getattr(self._processor, "image_token", "<image>"))

    def shown(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages for a chat template, whose pictures are parts ``{"type": "image"}``."""
        return [_without_pictures(message) for message in messages]

    def expanded(self, token_ids: Sequence[int], placeholder: int, messages: Messages) -> _Prompt:
        """Return the tokens of a text that shows the pictures of messages, each expanded, and read-only NumPy arrays.

        Raise ``data.image`` for a picture that cannot be read, and for a processor or a template that does not take it.
        """
        sources = tuple(_source(part) for message in messages for part in _pictures(message))
        if len(sources) > MAXIMUM_PICTURES:
            _refuse("a conversation has too many pictures", f"at most {MAXIMUM_PICTURES}", str(len(sources)))
        if token_ids.count(placeholder) != len(sources):
            expected = f"one {self.image_token} for each of {len(sources)} pictures"
            fix = "give a chat_template that shows parts of the type image, and no such text beside them"
            found = str(token_ids.count(placeholder))
            _refuse("the chat template does not show each picture once", expected, found, fix)
        pictures = [self._picture(source) for source in sources]
        places = iter(pictures)
        ids = [each for token in token_ids for each in (next(places)[0] if token == placeholder else (token,))]
        if sources not in self._joined:
            arrays = functools.reduce(joined, (each for _, each in pictures))
            for array in arrays.values():
                array.flags.writeable = False
            _keep(self._joined, sources, arrays, _KEPT)
        return tuple(ids), self._joined[sources]

    def _picture(self, source: str) -> _Prompt:
        """Return the tokens and the arrays of one picture."""
        if source not in self._pictures:
            _keep(self._pictures, source, self._make(self._read(source)), _KEPT_PICTURES)
        return self._pictures[source]

    def _make(self, picture: Image) -> _Prompt:
        processor = self._processor
        try:
            made = processor(text=[self.image_token], images=[picture], return_tensors="np", add_special_tokens=False)
        except Exception as error:  # of any processor
            expected = f"pictures that {type(processor).__name__} takes"
            _refuse("the model's processor refuses a picture", expected, f"{type(error).__name__}: {error}")
        arrays = {name: np.array(value) for name, value in made.items() if name not in _OF_TOKENS}
        return tuple(map(int, made["input_ids"][0])), arrays

    @functools.cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        found = list[str]()
        for make in (AutoProcessor.from_pretrained, _WithoutVideos):
            try:
                processor = make(self._folder, local_files_only=True)
            except Exception as error:  # of files that are missing or broken
                found.append(f"{type(error).__name__}: {error}".strip().splitlines()[0])
                continue
            if getattr(processor, "image_processor", None) is not None:
                return processor
            found.append(type(processor).__name__)
        expected, fix = "a processor of images", "save the processor of the model beside it, or use another model"
        return _refuse(f"the model in {self._folder} takes no images", expected, found[0], fix)

    def _read(self, source: str) -> Image:
        """Return a picture in RGB."""
        content = _decoded(source) if source.startswith("data:") else self._file(source)
        try:
            from PIL import Image, UnidentifiedImageError
        except ModuleNotFoundError as error:
            fix = "pip install 'jackfield-huggingface[images]'"
            raise PluginError("pictures need Pillow", code="plugin.requirement", fix=fix) from error
        name = _named(source)
        try:
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
            if picture.width * picture.height > MAXIMUM_PIXELS:
                found = f"{picture.width} x {picture.height}"
                _refuse("a picture is too large", f"at most {MAXIMUM_PIXELS} pixels", found, where=name)
            return picture.convert("RGB")
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            expected = f"one of the formats {', '.join(FORMATS)}"
            _refuse("a picture cannot be read", expected, f"{type(error).__name__}: {error}", where=name)

    def _file(self, source: str) -> bytes:
        """Return the bytes of a file, which has to be inside a folder of the data."""
        where = ", ".join(map(str, self._image_folders)) or "(none: the data has no folder)"
        if "://" in source and not source.startswith("file://"):
            fix = "download pictures before the run"
            _refuse("pictures are not downloaded", "a data: address, or a file's path", _named(source), fix)
        for folder in self._image_folders:
            file = (folder / source.removeprefix("file://")).resolve()
            if file.is_relative_to(folder) and file.is_file():
                if file.stat().st_size > MAXIMUM_BYTES:
                    found = f"{file.stat().st_size} bytes"
                    _refuse("a picture is too large", f"at most {MAXIMUM_BYTES} bytes", found, where=_named(source))
                return file.read_bytes()
        return _refuse("there is no such picture", f"a file inside of {where}", _named(source))


class _WithoutVideos:
    """A processor of images in patches alone. The library's own takes videos, too, for which it needs torchvision."""

    def __init__(self, folder: str, **options: Any) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self.image_processor = AutoImageProcessor.from_pretrained(folder, **options)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        self._merged = self.image_processor.merge_size**2  #: patches of a place
        placeholder = json.loads((Path(folder) / "config.json").read_text())["image_token_id"]
        self.image_token = str(self._tokenizer.convert_ids_to_tokens(placeholder))

    def __call__(self, text: list[str], images: list[Image], **options: Any) -> dict[str, Any]:
        """Return the arrays of the images, and the tokens of one text, with a placeholder for each place."""
        arrays = dict(self.image_processor(images=images, return_tensors="np"))
        places = (arrays["image_grid_thw"].prod(1) // self._merged).tolist()
        first, *rest = text[0].split(self.image_token)
        parts = [self.image_token * count + part for count, part in zip(places, rest, strict=True)]
        ids = self._tokenizer("".join((first, *parts)), add_special_tokens=False)["input_ids"]
        return {**arrays, "input_ids": [ids]}


def _keep(known: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Note a value, and forget the oldest ones if there are too many."""
    while len(known) >= most:
        del known[next(iter(known))]
    known[key] = value


def _pictures(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in _IMAGE_KINDS]


def _without_pictures(message: Mapping[str, Any]) -> dict[str, Any]:
    pictures = _pictures(message)
    if not pictures:
        return dict(message)
    return {**message, "content": [{"type": "image"} if part in pictures else part for part in message["content"]]}


def _source(part: Mapping[str, Any]) -> str:
    """Return the address or path of a picture: ``image_url`` with its ``url``, or ``image``, ``url``, ``path``."""
    value = next((part[name] for name in ("image_url", "image", "url", "path") if name in part), None)
    value = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(value, str) or not value:
        expected = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}, or the path of a file'
        return _refuse("a part of a message is no picture", expected, repr(dict(part))[:200])
    return value


def _decoded(address: str) -> bytes:
    head, _, text = address.partition(",")
    if not head.endswith(";base64"):
        return _refuse("a picture's address is not in base64", "data:image/png;base64,…", head[:80])
    if len(text) * 3 // 4 > MAXIMUM_BYTES:
        return _refuse("a picture is too large", f"at most {MAXIMUM_BYTES} bytes", f"{len(text)} characters")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        return _refuse("a picture's address is not in base64", "data:image/png;base64,…", f"{head[:80]}: {error}")


def _named(source: str) -> str:
    return source if len(source) <= 80 else f"{source[:80]}…"


def _refuse(message: str, expected: str, found: str, fix: str | None = None, where: str | None = None) -> NoReturn:
    raise DataError(message, code="data.image", where=where, expected=expected, found=found, fix=fix)
