"""Makes operators of Data-Juicer, without network, models, programs and installations."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from data_juicer.ops import OPERATORS
from data_juicer.ops.base_op import OP

from jackfield.errors import ConfigError, OperatorError, did_you_mean
from jackfield_operator_data_juicer.config import unknown_name
from jackfield_operator_data_juicer.offline import Offline
from jackfield_operator_data_juicer.reading import models

#: Operators that are no operators on rows.
_NOT_ROWS = {"Grouper": "it makes one row of many", "Aggregator": "it needs rows that a grouper has joined"}
_FFMPEG = "it starts the program ffmpeg"
#: What operators need for a row, but not to be made, or why they break the contract.
_NEEDS = {
    "audio_ffmpeg_wrapped_mapper": _FFMPEG,
    "download_file_mapper": "it needs the network",
    "human_preference_annotation_mapper": "it needs the network: a server of Label Studio",
    "image_remove_background_mapper": "it needs a model (rembg)",
    "s3_download_file_mapper": "it needs the network",
    "s3_upload_file_mapper": "it needs the network",
    "video_face_ratio_filter": "its statistics change by chance: dlib reads beyond the memory of its image",
    "video_ffmpeg_wrapped_mapper": _FFMPEG,
    "video_human_tracks_face_demographic_mapper": "it needs a model (deepface)",
    "video_motion_score_ptlflow_filter": "it needs a model (ptlflow)",
    "video_motion_score_raft_filter": "it needs a model (raft)",
    "video_ocr_area_ratio_filter": "it needs a model (easyocr)",
    "video_resize_aspect_ratio_mapper": _FFMPEG,
    "video_resize_resolution_mapper": _FFMPEG,
    "video_split_by_scene_mapper": _FFMPEG,
    "video_undistort_mapper": _FFMPEG,
}


def refusal(name: str, why: str) -> OperatorError:
    """Return the error of an operator that cannot be used here."""
    fix = "leave it out, or use an operator of Jackfield; docs/guides/data_juicer.md lists those that can be used"
    details: Any = {"where": name, "expected": "an operator without model, network or other programs", "fix": fix}
    return OperatorError(f"Data-Juicer's {name} cannot be used", code="operator.refused", found=why, **details)


def operator_class(name: str) -> type[OP]:
    """Return the class of an operator; raise ``config.invalid-value`` if there is none."""
    if name not in OPERATORS.modules:
        what = unknown_name(name, list(OPERATORS.modules))
        raise ConfigError(what, where="op", expected="a name of docs/reference/data_juicer.md", found=name)
    cls: type[OP] = OPERATORS.modules[name]
    return cls


def kind_of(cls: type[OP]) -> str:
    """Return which of Data-Juicer's types a class is: Filter, Mapper and so on."""
    return next(each.__name__ for each in cls.__mro__ if each.__module__ == "data_juicer.ops.base_op")


def make(name: str, settings: Mapping[str, Any]) -> OP:
    """Make an operator; refuse what needs a model, the network, another program or a package that is missing."""
    cls = operator_class(name)
    if why := _never(name, cls):
        raise refusal(name, why)
    known = {
        *cls._BASE_PARAMS,
        *(
            each
            for one in cls.__mro__
            for each in inspect.signature(vars(one).get("__init__", object.__init__)).parameters
        ),
    }
    if unknown := sorted(settings.keys() - known):  # which it would ignore
        what = f"Data-Juicer's {name} has no setting {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        raise ConfigError(what, code="config.unknown-key", where=f"settings.{unknown[0]}", found=unknown[0])
    with Offline() as seen:
        try:
            import data_juicer.core.data  # noqa: F401 - operators import it when they are made, and packages with it

            made = cls(**copy.deepcopy(dict(settings)))
        except Exception as error:
            if seen or isinstance(error, ImportError):
                raise refusal(name, _why(cls, seen[0] if seen else f"{type(error).__name__}: {error}")) from error
            found = f"{type(error).__name__}: {error}"
            what = f"Data-Juicer's {name} refuses its settings"
            raise ConfigError(what, where="settings", expected="its settings", found=found) from error
    if seen:
        raise refusal(name, _why(cls, seen[0]))
    return made


def _never(name: str, cls: type[OP]) -> str | None:
    """Return why an operator cannot be used, whatever its settings are."""
    if why := _NOT_ROWS.get(kind_of(cls)) or ("it needs Data-Juicer's own Ray" if "ray_" in name else None):
        return why
    if kind_of(cls) not in ("Filter", "Mapper", "Deduplicator", "Selector"):
        return f"it is a {kind_of(cls)}"
    if why := _NEEDS.get(name):
        return why
    module: ModuleType = sys.modules[cls.__module__]
    if "load_audio" in vars(module) and importlib.util.find_spec("soundfile") is None:
        return "it needs the package soundfile"
    return None


def _why(cls: type[OP], seen: str) -> str:
    """Return why an operator was refused: if it lacks a package for a model, that it needs the model."""
    kinds = models(cls)
    return f"it needs a model ({kinds[0]})" if kinds and seen.startswith("it needs the package") else seen
