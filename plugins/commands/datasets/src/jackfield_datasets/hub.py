"""Reads sets from the Hugging Face Hub, or from its cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from jackfield.data.formats import refusal
from jackfield.errors import PluginError
from jackfield_datasets.files import Row, chosen, plain

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_BATCH = 1000  #: rows that are read together


def looks_like_a_name(path: str) -> bool:
    """Return whether a path that does not exist may be a name on the Hub: ``org/name``."""
    return _NAME.fullmatch(path) is not None


def rows_of_hub(name: str, config: str | None, split: str | None) -> Iterator[Row]:
    """Yield the records of a set, which is downloaded into the cache of ``datasets`` if it is not there.

    With ``HF_HUB_OFFLINE`` or ``HF_DATASETS_OFFLINE`` only the cache is used. Errors are ``data.missing``, and
    ``plugin.requirement`` without the library ``datasets``.
    """
    try:
        from datasets import DatasetDict, load_dataset
    except ModuleNotFoundError as error:
        what, fix = f"a set of the Hub, {name}, needs datasets", "pip install 'jackfield-datasets[hub]'"
        raise PluginError(what, code="plugin.requirement", fix=fix) from error
    try:
        found: Any = load_dataset(name, config, split=split)
    except Exception as error:  # of the library, of the network, of the set's files
        offline = [each for each in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(each)]
        what = f"there is no such file or folder, and no set {name!r} of the Hub can be loaded"
        fix = f"check the name; {offline[0]} allows only what is in the cache" if offline else "check name and network"
        shown = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise refusal(what, "a path, or org/name with its split", shown, fix, "data.missing", name) from error
    if isinstance(found, DatasetDict):
        found = found[chosen(list(found), None, name)]
    return _rows(found)


def _rows(found: Any) -> Iterator[Row]:
    for batch in found.iter(batch_size=_BATCH):
        for values in zip(*batch.values(), strict=True):
            yield plain(dict(zip(batch, values, strict=True)))
