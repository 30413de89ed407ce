"""Check who imports whom: the contracts of ``.importlinter``, those for the plugins, and what imports load.

The plugins are found, so a new one is under the contracts without an edit. Needs every package installed.
"""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from jackfield_conformance.suites.structure import find_reaches
from packages import ROOT, Package, discover

#: The folder of packages that provide commands of the CLI. Like the conformance suite, they may import all of the core.
COMMANDS = "commands"

#: Imports for type checkers and editors alone: `from jackfield import GRPO` is looked up when it is used.
TYPES_ONLY = {"ignore_imports": "\njackfield -> jackfield_training", "unmatched_ignore_imports_alerting": "none"}

#: What `import` of any module of the core must not load.
HEAVY = ("numpy", "ray", "tensordict", "torch", "transformers")

#: Each module is imported after those before it, and what it newly loads of HEAVY is laid at its door.
_PROBE = """
import importlib, json, pkgutil, sys
heavy, package = sys.argv[1].split(","), importlib.import_module(sys.argv[2])
walk = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
found, seen = {}, set()
for name in [package.__name__, *(each.name for each in walk)]:
    if not name.endswith("__main__"):
        importlib.import_module(name)
        new = {each for each in heavy if each in sys.modules} - seen
        seen |= new
        if new:
            found[name] = sorted(new)
print(json.dumps(found))
"""


def main() -> None:
    """Run all checks; exit 1 where one fails."""
    packages = discover()
    failed = not _lint(contracts(packages))
    found = heavy_imports("jackfield")
    bound = [each for each in _plugins(packages) if each.folder.parent.name != COMMANDS]
    reaches = [reach for package in bound for reach in find_reaches(package.folder / "src", ROOT)]
    for reach in reaches:
        print(f"{reach}, which is not in jackfield_conformance.suites.structure.ALLOWED")
    for module, names in found.items():
        print(f"importing {module} loads {', '.join(names)}")
    if not found:
        print(f"importing every module of jackfield loads none of {', '.join(HEAVY)}")
    sys.exit(1 if failed or found or reaches else 0)


def contracts(packages: dict[str, Package]) -> str:
    """``.importlinter`` with the packages that were found added, as the text of a configuration file."""
    config = configparser.ConfigParser()
    config.read_string((ROOT / ".importlinter").read_text(encoding="utf-8"))
    libraries = {each.import_name for each in _plugins(packages) if each.folder.parent.name == "libraries"}
    plugins = [each.import_name for each in _plugins(packages) if each.import_name not in libraries]
    others = [each.import_name for each in packages.values() if each.import_name != "jackfield"]
    config["importlinter"]["root_packages"] = _lines(["jackfield", *others])
    config["importlinter:contract:layers"].update(TYPES_ONLY)
    if others:
        config["importlinter:contract:no-plugins-in-core"] = {
            "name": "The core imports no plugin",
            "type": "forbidden",
            "source_modules": _lines(["jackfield"]),
            "forbidden_modules": _lines(others),
            **TYPES_ONLY,
        }
    if len(plugins) > 1:
        config["importlinter:contract:independent-plugins"] = {
            "name": "Plugins import no plugin",
            "type": "independence",
            "modules": _lines(plugins),
            **TYPES_ONLY,
        }
    if libraries:
        config["importlinter:contract:libraries"] = {
            "name": "Libraries import no plugin",
            "type": "forbidden",
            "source_modules": _lines(sorted(libraries)),
            "forbidden_modules": _lines(plugins),
            **TYPES_ONLY,
        }
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        config.write(file)
        file.seek(0)
        return file.read()


def _plugins(packages: dict[str, Package]) -> list[Package]:
    return [each for each in packages.values() if ROOT / "plugins" in each.folder.parents]


def heavy_imports(package: str) -> dict[str, list[str]]:
    """Module to the heavy packages that importing it loads; every module of ``package`` is imported."""
    command = [sys.executable, "-c", _PROBE, ",".join(HEAVY), package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        sys.exit(f"importing the modules of {package} failed:\n{done.stderr}")
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def _lint(text: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "importlinter.ini"
        file.write_text(text, encoding="utf-8")
        program = Path(sys.executable).with_name("lint-imports")
        return subprocess.run([program, "--config", file, "--no-cache"], cwd=ROOT, check=False).returncode == 0


def _lines(names: list[str]) -> str:
    return "\n" + "\n".join(names)


if __name__ == "__main__":
    main()
