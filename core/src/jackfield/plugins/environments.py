"""Environments for interpreters of their own: made with ``venv`` and pip, once, as a configuration describes them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import attrs

from jackfield.errors import PluginError
from jackfield.plugins.interpreters import environment_of, resolve_interpreter

__all__ = ["EnvironmentPlan", "create_environment", "environment_python", "requirement_as_installed"]

_STAMP = "jackfield-environment.json"


@attrs.frozen(kw_only=True)
class EnvironmentPlan:
    """What is to be there."""

    folder: Path
    python: str | None = None  #: the interpreter that makes it; None: this one
    requires: tuple[str, ...] = ()  #: what pip installs, beside ``installed``
    installed: tuple[str, ...] = ()  #: distributions of this interpreter that come along, as they are installed here
    constraints: Path | None = None
    without: tuple[str, ...] = ()  #: packages that are removed afterwards


def environment_python(folder: Path) -> str:
    """The interpreter of an environment."""
    return str(Path(folder).absolute() / "bin" / "python")


def create_environment(plan: EnvironmentPlan, seconds: float) -> bool:
    """Make an environment, unless it is there as planned. pip's output goes to stderr.

    Where only what comes along from here has changed, it alone is installed again. An environment that another plan has
    made, or that was left half made, is made anew; a folder that is something else is left alone.

    Args:
        plan: what is to be there.
        seconds: the deadline for all of it.

    Returns:
        Whether there was something to do.

    Raises:
        PluginError: ``plugin.environment``, with the step that failed; ``plugin.interpreter``.
    """
    base = resolve_interpreter(plan.python, "environments.*.python")
    ours = [part for name in plan.installed for part in requirement_as_installed(name)]
    stamp, digests = plan.folder / _STAMP, {"digest": _digest(plan, base), "installed": _digest_installed(ours)}
    made = json.loads(stamp.read_text(encoding="utf-8")) if stamp.is_file() else {}
    if digests.items() <= made.items():
        return False
    if plan.folder.exists() and any(plan.folder.iterdir()) and not (plan.folder / "pyvenv.cfg").is_file():
        raise PluginError(
            "the folder of an environment is something else",
            code="plugin.environment",
            where=str(plan.folder),
            expected="no folder, an empty one, or an environment",
            fix="name another folder in the configuration",
        )
    ends = time.monotonic() + seconds
    pip = [environment_python(plan.folder), "-m", "pip", "--disable-pip-version-check"]
    keep = [] if plan.constraints is None else ["--constraint", str(plan.constraints)]
    stamp.unlink(missing_ok=True)
    if made.get("digest") == digests["digest"]:
        _run([*pip, "install", "--force-reinstall", "--no-deps", *ours], ends, plan)
    else:
        shutil.rmtree(plan.folder, ignore_errors=True)
        _run([base, "-m", "venv", str(plan.folder)], ends, plan)
        _run([*pip, "install", *keep, *plan.requires, *ours], ends, plan)
        if plan.without:
            _run([*pip, "uninstall", "--yes", *plan.without], ends, plan)
    stamp.write_text(json.dumps({**digests, "requires": [*plan.requires, *ours]}, indent=1), encoding="utf-8")
    return True


def requirement_as_installed(name: str) -> list[str]:
    """pip's arguments for a distribution as this interpreter has it: the same version, file or editable folder.

    Raises:
        PluginError: ``plugin.requirement``: it is not installed here.
    """
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


def _run(command: Sequence[str], ends: float, plan: EnvironmentPlan) -> None:
    """Run one step; its last words are pip's, on stderr, just above."""
    try:
        code: int | None = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=environment_of(command[0]),
            timeout=max(ends - time.monotonic(), 0.1),
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        raise PluginError(
            "an environment cannot be made",
            code="plugin.environment",
            where=str(plan.folder),
            expected=f"`{' '.join(_shown(command))}` to end well",
            found="no end within the deadline" if code is None else f"exit code {code}; what it printed is above",
            fix="correct the environment in the configuration, or raise --deadline, and give the same command again",
        )


def _shown(command: Sequence[str]) -> Iterable[str]:
    return (os.path.basename(part) if number == 0 else part for number, part in enumerate(command))


def _digest(plan: EnvironmentPlan, base: str) -> str:
    """Of all but what comes along, of which it is what that needs."""
    parts = [base, sys.version, *plan.requires, "", *plan.without, "", *plan.installed, ""]
    parts += sorted(line for name in plan.installed for line in importlib.metadata.requires(name) or ())
    if plan.constraints is not None:
        parts.append(plan.constraints.read_text(encoding="utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _digest_installed(arguments: Sequence[str]) -> str:
    """Of pip's arguments, and of the wheels that they name."""
    parts = [part.encode() for part in arguments]
    parts += [hashlib.sha256(Path(part).read_bytes()).digest() for part in arguments if Path(part).is_file()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
