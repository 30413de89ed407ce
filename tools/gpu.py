"""The GPU tier: conformance, weights, a GRPO run and training speed on one machine, from the source tree.

    python3 tools/gpu.py                      # all stages on cuda; results in build/gpu/results.json
    python3 tools/gpu.py --device cpu --small # the same code with tiny sizes, without a GPU
    python3 tools/gpu.py --stage training     # one stage; may be repeated
    python3 tools/gpu.py --collect            # gather wheels for a machine without a package index, into .gpu-wheels

It needs torch 2.11, transformers 5.17 and Python 3.11, or newer ones, and installs nothing: packages of this
repository are found in their source folders, and missing libraries in wheels that ``--collect`` (``make gpu-wheels``)
has gathered. Each stage is a process of its own with a deadline. A stage that fails is reported, the others go on, and
the exit code is 1. Guide: docs/guides/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packages import ROOT, Package, discover

WORK = ROOT / "build" / "gpu"
WHEELS = ROOT / ".gpu-wheels"
REQUIREMENTS = ROOT / "tools" / "gpu-requirements.txt"
#: Stages in order, each with its deadline in seconds.
STAGES = {
    "environment": 120.0,
    "engine_conformance": 900.0,
    "server_conformance": 900.0,
    "parity": 600.0,
    "weights_shared": 180.0,
    "weights_nccl": 180.0,
    "grpo": 900.0,
    "training": 900.0,
    "trl": 600.0,
}
PYTHONS = ("3.12", "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="torch device; default: cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes and few checks: shows that the stages run")
    parser.add_argument("--stage", action="append", choices=list(STAGES), help="run only this stage; may be repeated")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of models, outputs and unpacked wheels")
    parser.add_argument("--out", type=Path, help="file of the results; default: results.json in that folder")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of wheels")
    parser.add_argument("--collect", action="store_true", help="download wheels into that folder, and end")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.wheels)
        return
    work, out = arguments.work.resolve(), arguments.out or arguments.work / "results.json"
    path = source_path(arguments.wheels, work)
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    sys.path[:0] = path
    warm_up()
    results = run_all(arguments.stage or list(STAGES), arguments.device, arguments.small, work)
    content = {"device": arguments.device, "small": arguments.small, "stages": results}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    counts = [result["status"] for result in results.values()]
    told = ", ".join(f"{counts.count(status)} {status}" for status in ("passed", "failed", "skipped"))
    print(f"{told}; results in {out}")
    sys.exit(1 if "failed" in counts else 0)


def collect(folder: Path) -> None:
    """Download the wheels of ``gpu-requirements.txt`` for Python 3.12 on x86-64, at the tested versions."""
    folder.mkdir(parents=True, exist_ok=True)
    python, *platforms = PYTHONS
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    command += [f"--platform={platform}" for platform in platforms]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--requirement", str(REQUIREMENTS)]
    subprocess.run(command, check=True)
    found = sorted(folder.glob("*.whl"))
    size = sum(file.stat().st_size for file in found) / 2**20
    print(f"{len(found)} wheels, {size:.1f} MiB, in {folder}")


def source_path(wheels: Path, work: Path) -> list[str]:
    """Return the folders that make the packages of the repository importable, with their metadata and the wheels."""
    packages, metadata, unpacked = discover(), work / "metadata", work / "wheels"
    for folder in (metadata, unpacked):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for package in packages.values():
        write_metadata(package, metadata)
    installed = {str(each.metadata["Name"]).lower().replace("-", "_") for each in importlib.metadata.distributions()}
    for wheel in sorted(wheels.glob("*.whl")):
        if wheel.name.partition("-")[0].lower() in installed:
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    sources = [str(package.source) for package in packages.values()]
    own = [str(ROOT / "tools"), str(ROOT / "benchmarks")]
    return [str(metadata), *sources, *own, *([str(unpacked)] if any(unpacked.iterdir()) else [])]


def write_metadata(package: Package, folder: Path) -> None:
    """Write what an installation would say of a package: name, version and entry points."""
    place = folder / f"{package.import_name}-{package.version}.dist-info"
    place.mkdir()
    text = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n"
    (place / "METADATA").write_text(text, encoding="utf-8")
    project = tomllib.loads((package.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = dict(project.get("entry-points", {}))
    lines = [
        line for name, entries in groups.items() for line in (f"[{name}]", *(f"{n} = {v}" for n, v in entries.items()))
    ]
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def warm_up() -> None:
    """Import what stages need, once. CUDA is not initialised, so that processes can be forked."""
    for name in ("torch", "tensordict", "transformers.models.qwen3.modeling_qwen3", "peft", "gpu_stages"):
        with contextlib.suppress(Exception):  # the stage that needs it reports it
            importlib.import_module(name)


def run_all(names: list[str], device: str, small: bool, work: Path) -> dict[str, Any]:
    """Run stages, each in a process of its own, and print a line for each."""
    results: dict[str, Any] = {}
    for name in (name for name in STAGES if name in names):
        folder = work / "stages" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = time.monotonic()
        found = run_stage(name, {"device": device, "small": small, "folder": str(folder), "known": results}, folder)
        results[name] = {"status": "failed", **found, "seconds": round(time.monotonic() - started, 2)}
        told = found.get("reason") or found.get("error") or ""
        print(f"{name:20} {results[name]['status']:8} {results[name]['seconds']:8.1f} s  {told}".rstrip(), flush=True)
    return results


def run_stage(name: str, plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one stage in a child process and return its result, or its error."""
    result, output = folder / "result.json", folder / "output.txt"
    child = start(lambda: play(name, plan, result), output)
    poll, seconds = os.pidfd_open(child), STAGES[name]
    try:
        ended = bool(select.select([poll], [], [], seconds)[0])
    finally:
        os.close(poll)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        code, processor = os.waitstatus_to_exitcode(status), round(used.ru_utime + used.ru_stime, 2)
    if not ended:
        return {"error": f"no end within {seconds:g} s; see {output}"}
    if not result.is_file():
        return {"error": f"the process ended with {code}; see {output}"}
    return {**json.loads(result.read_text(encoding="utf-8")), "processor_seconds": processor}


def start(call: Callable[[], None], output: Path) -> int:
    """Run a call in a child with a process group and an output of its own; return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(child, child)
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        with output.open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        call()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def play(name: str, plan: dict[str, Any], result: Path) -> None:
    """Run a stage and write its result, its reason to be skipped, or its error."""
    try:
        stages = importlib.import_module("gpu_stages")
        try:
            found = {"status": "passed", "result": getattr(stages, name)(stages.Plan(**plan))}
        except stages.Skipped as reason:
            found = {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        found = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
    result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
