"""A block in which operators of Data-Juicer have neither network nor models, and chance is that of the row."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import random
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from data_juicer.utils import file_utils, mm_utils
from data_juicer.utils.constant import DEFAULT_PREFIX
from data_juicer.utils.lazy_loader import LazyLoader
from packaging.requirements import InvalidRequirement, Requirement

from jackfield_operator_data_juicer import guard

#: Kinds of models whose files come with a package.
_SHIPPED = frozenset({"opencv_classifier"})
#: Packages that nothing here uses, because :class:`Sound` does what they are for.
_REPLACED = frozenset({"torchcodec"})
_HASH: Callable[..., str] = file_utils.dict_to_hash
_UUID = uuid.uuid4


class Offline:
    """Have neither a package installed nor a model loaded in a block, and yield what was refused.

    Names of new files, which Data-Juicer takes from the time and the process, come from ``random``, which has the seed
    of the row.
    """

    def __enter__(self) -> list[str]:
        self._closed = guard.closed()
        seen = self._closed.__enter__()
        self._before = list[tuple[Any, str, Any]]()
        self._put(LazyLoader, "_install_package", staticmethod(_installed))
        self._put(file_utils, "dict_to_hash", _file_hash)
        self._put(mm_utils, "Audio", Sound)
        self._put(uuid, "uuid4", _uuid4)
        for module in [each for name, each in [*sys.modules.items()] if name.startswith("data_juicer.ops.")]:
            if (loads := vars(module).get("prepare_model")) is not None:
                self._put(module, "prepare_model", _only_shipped(loads))
        return seen

    def _put(self, place: Any, name: str, value: Any) -> None:
        self._before.append((place, name, vars(place)[name]))
        setattr(place, name, value)

    def __exit__(self, *error: Any) -> None:
        for place, name, value in reversed(self._before):
            setattr(place, name, value)
        self._closed.__exit__(*error)


class Sound:
    """What Data-Juicer uses of ``datasets.Audio``, which decodes by a torch and an FFmpeg that are not packages.

    Sounds are decoded by soundfile (WAV, FLAC, OGG, MP3) to the mean of their channels, as by ``datasets``.
    """

    def __init__(self, sampling_rate: int | None = None) -> None:
        self._rate = sampling_rate

    def encode_example(self, value: Any) -> Any:
        """Return a path, or the bytes of a file."""
        return value

    def decode_example(self, value: Any) -> dict[str, Any]:
        """Return the samples, as float32, and their rate."""
        import soundfile

        file = io.BytesIO(value) if isinstance(value, bytes) else value
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
        mono = samples.mean(axis=1)
        if self._rate is not None and self._rate != rate:
            mono, rate = (
                importlib.import_module("librosa").resample(mono, orig_sr=rate, target_sr=self._rate),
                self._rate,
            )
        return {"array": mono, "sampling_rate": rate}


def _installed(spec: str, *_: Any, **__: Any) -> None:
    """Refuse to install what is not there: Data-Juicer also asks for what it does not find by its name."""
    try:
        wanted = Requirement(spec)
        if wanted.name in _REPLACED or wanted.specifier.contains(importlib.metadata.version(wanted.name)):
            return
    except (InvalidRequirement, importlib.metadata.PackageNotFoundError):
        pass
    guard.refuse(f"it needs the package {spec}")


def _only_shipped(loads: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(model_type: str, **settings: Any) -> Any:
        if model_type not in _SHIPPED:
            guard.refuse(f"it needs a model ({model_type})")
        return loads(model_type, **settings)

    return prepare


def _file_hash(parameters: Mapping[str, Any], hash_length: int | None = None) -> str:
    """Return what distinguishes the file that is made of another."""
    moment = {f"{DEFAULT_PREFIX}pid", f"{DEFAULT_PREFIX}timestamp"}
    kept = {name: value for name, value in parameters.items() if name not in moment}
    return _HASH({**kept, "chance": random.getrandbits(64)}, hash_length)


def _uuid4() -> uuid.UUID:
    return uuid.UUID(int=random.getrandbits(128), version=4) if guard.is_closed() else _UUID()
