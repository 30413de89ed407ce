"""The import of a user's class from a file or a module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from jackfield.errors import ConfigError, PluginError, described, did_you_mean

_loaded: dict[tuple[str, int], Any] = {}  #: modules by file and time of change


def load(target: str, where: str) -> Any:
    """Return what ``file.py:Name`` or ``module:Name`` names; ``where`` is the setting, for errors.

    A file is imported once, and modules beside it can be imported, as in a script.

    Raises:
        ConfigError: It cannot be imported, or has no such name.
        PluginError: ``plugin.requirement`` if a package is missing.
    """
    place, _, name = target.rpartition(":")
    try:
        module = _file(Path(place).expanduser().resolve()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        fix = "check the path, and that the code can be imported"
        details: dict[str, Any] = {"where": where, "expected": "file.py:Name or module:Name", "fix": fix}
        raise ConfigError(f"{target} cannot be imported", found=described(error), **details) from error
    if not hasattr(module, name):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        what = f"{place} has no {name!r}{did_you_mean(name, own)}"
        raise ConfigError(what, where=where, expected=", ".join(own[:20]) or "a class", found=name, fix="correct it")
    return getattr(module, name)


def requirement(error: BaseException) -> PluginError | None:
    """Return the error of an adapter whose package is missing, if this is what an exception says."""
    if not isinstance(refusal := getattr(error, "refusal", None), dict):
        return None
    return PluginError(**refusal)


def _file(path: Path) -> Any:
    key = str(path), path.stat().st_mtime_ns
    if key in _loaded:
        return _loaded[key]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = path.stem
    if name in sys.modules:  # another module has its name
        if getattr(sys.modules[name], "__file__", None) == str(path) and _is_newest(path):
            return sys.modules[name]
        name = f"{name}_{hashlib.sha256(repr(key).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and attrs look for the module of a class
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    _loaded[key] = module
    return module


def _is_newest(path: Path) -> bool:
    return not any(file == str(path) for file, _ in _loaded)
