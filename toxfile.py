"""One tox environment for each package that is found, for its tests against its built wheel.

The requirements from outside the repository are the environment's ``deps``, so tox follows changes of a pyproject.toml.
The repository's own wheels are installed again for each run, because tox does not look into a path in ``deps``.
Run it through tools/ci.py, which builds the wheels first, or after ``make wheels``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tox.config.loader.memory import MemoryLoader
from tox.config.types import Command, EnvList
from tox.plugin import impl

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

from environment import UV, installer_settings
from packages import ROOT, Package, closure, discover, third_party

if TYPE_CHECKING:
    from tox.config.sets import ConfigSet
    from tox.session.state import State

#: What every package's tests run with. Interpreters that all tests share are left to the session over all packages.
CONFORMANCE = "jackfield-conformance"
PYTEST = ("python", "-m", "pytest", "-m", "not shared_interpreter and not nightly")

#: Set by tools/ci.py, which runs the tests of all environments in one pool.
MAKE_ONLY = "JACKFIELD_MAKE_ONLY"
TEST_TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")

PACKAGES = discover()
os.environ.update(installer_settings())  # environments are made by uv


@impl
def tox_extend_envs() -> Iterator[str]:
    """One environment for each package that has tests."""
    return (name for name, package in PACKAGES.items() if package.tests.is_dir())


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Give each environment its settings, and make all of them the default."""
    core_conf.loaders.insert(0, MemoryLoader(env_list=EnvList(list(tox_extend_envs()))))
    for name in tox_extend_envs():
        settings = _settings(PACKAGES[name], state.conf.pos_args(None) or ())
        state.conf.memory_seed_loaders[name].append(MemoryLoader(**settings))


def _settings(package: Package, arguments: tuple[str, ...]) -> dict[str, object]:
    wanted = {CONFORMANCE: frozenset[str](), package.name: package.test_extras}
    wheels = " ".join(str(PACKAGES[name].wheel.relative_to(ROOT)) for name in closure(PACKAGES, wanted))
    tests = str(package.tests.relative_to(ROOT))
    return {
        "description": f"the tests of {package.name} against its wheel",
        "deps": "\n".join(["-c constraints.txt", *sorted({*TEST_TOOLS, *third_party(PACKAGES, wanted)})]),
        "commands_pre": [f"{UV} pip install --quiet --no-deps --reinstall {wheels}", f"{UV} pip check"],
        "commands": [] if MAKE_ONLY in os.environ else [Command([*PYTEST, tests, *arguments])],
    }
