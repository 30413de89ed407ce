"""Creation of separate Python environments for workers, with ``venv`` and pip."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jackfield.errors import PluginError
from jackfield.plugins.interpreters import environment_of, environment_python, resolve_interpreter
from jackfield.settings import option

_STAMP = "jackfield-environment.json"


@attrs.frozen(kw_only=True)
class EnvironmentSettings:
    """The settings of an environment of ``jackfield env create``, which gets Jackfield and plugins."""

    folder: str | None = option(None, "folder of the environment; null: environments/NAME")
    python: str | None = option(None, "the interpreter that creates it; null: the one that runs Jackfield")
    requires: tuple[str, ...] = option((), "requirements that pip installs there")
    constraints: str | None = option(None, "a constraints file for pip")
    uninstall: tuple[str, ...] = option((), "packages that are removed afterwards if a dependency installed them")

    def path(self, name: str) -> Path:
        """Return the folder of the environment of this name."""
        return Path(self.folder or Path("environments", name)).expanduser()


def create_environment(settings: EnvironmentSettings, folder: Path, installed: Sequence[str], seconds: float) -> bool:
    """Create an environment unless it already exists as described. The output of pip goes to stderr.

    If only distributions that are copied from here have changed, only these are installed again. An incomplete
    environment, or one with other settings, is created again; any other folder is not touched.

    Args:
        settings: The description of the environment.
        folder: The folder of the environment.
        installed: Distributions that are installed in the same way as in this interpreter.
        seconds: The deadline of the whole creation.

    Returns:
        Whether the environment was changed.

    Raises:
        PluginError: ``plugin.environment``, with the step that failed; ``plugin.interpreter``.
    """
    base = resolve_interpreter(settings.python, "environments.*.python")
    installed = _with_local(installed)
    ours = [part for name in installed for part in requirement_as_installed(name)]
    wheels = [hashlib.sha256(Path(part).read_bytes()).hexdigest() for part in ours if Path(part).is_file()]
    requires = sorted(line for name in installed for line in importlib.metadata.requires(name) or ())
    constraints = None if settings.constraints is None else Path(settings.constraints).read_text(encoding="utf-8")
    plan = [base, sys.version, settings.requires, settings.uninstall, constraints, installed, requires]
    wanted = json.dumps({"plan": plan, "installed": [*ours, *wheels]}, indent=1)
    stamp = folder / _STAMP
    made = json.loads(stamp.read_text(encoding="utf-8")) if stamp.is_file() else {}
    if made == json.loads(wanted):
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        message, expected = (
            "the folder of an environment is something else",
            "no folder, an empty one, or an environment",
        )
        fix = "name another folder in the configuration"
        raise PluginError(message, code="plugin.environment", where=str(folder), expected=expected, fix=fix)
    pip = [environment_python(folder), "-m", "pip", "--disable-pip-version-check"]
    keep = [] if settings.constraints is None else ["--constraint", settings.constraints]
    steps = [[*pip, "install", "--force-reinstall", "--no-deps", *ours]]
    stamp.unlink(missing_ok=True)
    if made.get("plan") != json.loads(wanted)["plan"]:
        shutil.rmtree(folder, ignore_errors=True)
        steps = [[base, "-m", "venv", str(folder)], [*pip, "install", *keep, *settings.requires, *ours]]
        steps += [[*pip, "uninstall", "--yes", *settings.uninstall]] if settings.uninstall else []
    ends = time.monotonic() + seconds
    for step in steps:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": sys.stderr, "env": environment_of(step[0])}
        try:
            code = subprocess.run(step, timeout=max(ends - time.monotonic(), 0.1), check=False, **streams).returncode
            found = f"exit code {code}; what it printed is above"
        except subprocess.TimeoutExpired:
            code, found = None, "no end within the deadline"
        if code != 0:
            expected = f"`{' '.join([os.path.basename(step[0]), *step[1:]])}` to end well"
            fix = "correct the environment in the configuration, or raise --deadline, and give the same command again"
            details = {"where": str(folder), "expected": expected, "found": found, "fix": fix}
            raise PluginError("an environment cannot be made", code="plugin.environment", **details)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def requirement_as_installed(name: str) -> list[str]:
    """Return pip's arguments to install a distribution as it is here, or raise ``plugin.requirement``."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise PluginError(f"{name} is not installed in this interpreter", where=sys.executable) from error
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if not url.startswith("file:"):
        return [f"{distribution.name}=={distribution.version}"]
    path = unquote(urlsplit(url).path)
    return ["--editable", path] if origin.get("dir_info", {}).get("editable") else [path]


def _with_local(names: Sequence[str]) -> list[str]:
    """Add required distributions that are installed here from local files, since no index may have them."""
    found = list(names)
    for name in found:  # it grows during the loop
        for line in importlib.metadata.requires(name) or ():
            required = Requirement(line)
            known = canonicalize_name(required.name) in map(canonicalize_name, found)
            with suppress(PluginError):
                if not known and required.marker is None and "==" not in requirement_as_installed(required.name)[-1]:
                    found.append(required.name)
    return found
