"""Queue backends: put and get in MB/s, small rows in milliseconds, and what the controller costs per row.

    python benchmarks/transfer_queue.py [--sizes 1 64 512] [--backends memory sql ...] [--quick] [--json]

Each backend that is installed is measured in this process: a batch of 64 rows of float32 is put, got and deleted, under
new keys each time; the median counts, after a first time that touches the memory. A get ends when the consumer has read
every byte and the sum is right. Then 1,024 short samples of 5 jagged columns are put, got and deleted with one call
each. The backend zmq is measured between processes, too: from the beginning of a put until a second process, which is
then told, has got the batch (both messages, through pipes, included); a memcpy takes turns. At last four producers and
four consumers move batches of 8 MB at once, each in a process; one of each takes turns, and so do the same processes
without a store, which copy into shared memory and read there: what the machine loses by four pairs.

Beside them: a memcpy of the same bytes into memory that was touched before, Ray's object store alone (an object for a
batch), and the PyPI package TransferQueue 0.1.11, where it is installed (make benchmark-transfer-queue). PostgreSQL and
Redis are started for the benchmark on loopback, PostgreSQL without fsync.

The controller is measured over a backend that keeps nothing: rows are put until all are there, then leased, acked and
committed; microseconds of processor time per row, and the growth of the process in bytes per row. ``--plot FILE`` draws
both over the number of rows.

The last line is a JSON object (``--json``: nothing else). Ratios are those of the backend zmq to TransferQueue at 64
MB. What could not be measured is null, and ``reasons`` says why. Exit status 2 where TransferQueue could not be
measured. ``--quick`` takes memory, zmq and TransferQueue, 1 and 64 MB (unless others are given) and two
repetitions: under 50 s on a quiet machine. All with one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _transfer_queue_controller as controller
import _transfer_queue_processes as processes
import _transfer_queue_stores as stores

FOLDER = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != FOLDER]  # the peer's module is named as this file
sys.path.insert(0, str(FOLDER.parent / "tools" / "testing"))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a copy by several threads waits for the slowest

PEER = "TransferQueue 0.1.11"
RAY = "Ray's object store"
PEER_SECONDS, QUICK_PEER_SECONDS = 240.0, 40.0
PEER_PYTHON = str(FOLDER.parent / ".venv-transfer-queue" / "bin" / "python")  #: made by make benchmark-transfer-queue
HEADLINE_MB = processes.BATCH_MB
KNOWN = ("memory", "sql", "sql, PostgreSQL", "redis", "zmq", "nixl", "ray", PEER)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MB", help="default: 1 64 512; with --quick 1 64")
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", help=f"of {'; '.join(KNOWN)}. Default: all that are there"
    )
    parser.add_argument(
        "--controller-rows",
        type=int,
        nargs="*",
        metavar="N",
        help="in whole batches of 256, at least one; default: 1000 10000 100000; with --quick 1000 8000",
    )
    parser.add_argument("--plot", metavar="FILE", help="a PNG of the controller's cost per row")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.backends = arguments.backends or ["memory", "zmq", PEER]
    arguments.sizes = arguments.sizes or ([1, 64] if arguments.quick else [1, 64, 512])
    if arguments.controller_rows is None:
        arguments.controller_rows = [1_000, 8_000] if arguments.quick else [1_000, 10_000, 100_000]
    if arguments.only:
        if (found := only(arguments.only, arguments)) is not None:
            print(json.dumps(found))
        return
    known = dict.fromkeys((*KNOWN, *stores.registered()))
    if unknown := [name for name in arguments.backends or () if name not in known]:
        parser.error(f"no such backend: {', '.join(unknown)}; known are {'; '.join(known)}")
    say = (lambda *_: None) if arguments.json else print
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    found, reasons = measure(arguments, say)
    if arguments.plot:
        controller.plot(found["controller"], arguments.plot)
    missed = PEER in reasons
    summary = headline(found, reasons, arguments) | {"machine": platform.platform(), "cores": os.cpu_count(), **found}
    print(json.dumps(summary))
    if missed:
        sys.exit(2)


def measure(arguments: argparse.Namespace, say: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Everything that can be, and why the rest cannot."""
    reasons: dict[str, str] = {}
    repeats = 2 if arguments.quick else 5
    found: dict[str, Any] = {"memcpy": {str(size): stores.memcpy(size) for size in arguments.sizes}, "backends": {}}
    say(f"{'':24}" + "".join(f"{f'{size} MB: put':>14}{'get':>8}" for size in arguments.sizes) + "   small put, get ms")
    say(f"{'memcpy':24}" + "".join(f"{found['memcpy'][str(size)]:14,.0f}{'':8}" for size in arguments.sizes))
    with stores.backends(reasons) as there:
        for name, (cls, config) in there.items():
            if arguments.backends and name not in arguments.backends:
                continue
            with tempfile.TemporaryDirectory() as folder:
                one = found["backends"][name] = asyncio.run(
                    stores.backend(cls, config, folder, arguments.sizes, repeats)
                )
            say(line(name, one, arguments.sizes))
            say(stores.MANY_TEXT.format(**one))
            if name == "zmq" and HEADLINE_MB in arguments.sizes:
                with tempfile.TemporaryDirectory() as folder:
                    found |= asyncio.run(processes.measured(cls, config, folder, repeats))
                say(processes.TEXT.format(**found["between_processes"], **found["clients_at_once"]))
    if not arguments.backends or "ray" in arguments.backends:
        one = in_a_process_of_its_own("ray", 120.0)
        if "reason" in one:
            reasons[RAY] = one["reason"]
        else:
            found["backends"][RAY] = one
            say(line(RAY, one, arguments.sizes))
    if not arguments.backends or PEER in arguments.backends:
        python = PEER_PYTHON if Path(PEER_PYTHON).exists() else sys.executable
        peer = in_a_process_of_its_own("peer", QUICK_PEER_SECONDS if arguments.quick else PEER_SECONDS, python)
        if "reason" in peer:
            reasons[PEER] = peer["reason"]
        else:
            found["backends"][PEER] = peer
            say(line(PEER, peer, arguments.sizes))
    found["controller"] = []
    for rows in arguments.controller_rows:
        one = in_a_process_of_its_own(f"controller:{rows}", 1800.0)
        if "reason" in one:
            reasons[f"controller, {rows} rows"] = one["reason"]
            continue
        found["controller"].append(one)
        costs = f"put {one['put_us']:.0f}, lease, ack and commit {one['consume_us']:.0f} µs per row"
        say(f"controller, {one['rows']:>9,} rows: {costs}; {one['bytes_per_row']:,.0f} bytes per row")
    for name, reason in reasons.items():
        say(f"not measured: {name}: {reason}")
    return found, reasons


def headline(found: dict[str, Any], reasons: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures that are followed over time."""
    ours, peer = found["backends"].get("zmq"), found["backends"].get(PEER)
    size = str(HEADLINE_MB)
    for name in ("zmq", PEER):
        if name not in found["backends"]:
            chosen = not arguments.backends or name in arguments.backends
            reasons.setdefault(name, "it is not installed" if chosen else "it was not chosen (--backends)")
    if HEADLINE_MB not in arguments.sizes:
        reasons[f"{size} MB"] = "it was not chosen (--sizes): no ratio to TransferQueue, and none of processes"
    if not arguments.controller_rows:
        reasons["controller"] = "no rows were chosen (--controller-rows)"
    both = ours is not None and peer is not None and size in ours["put"] and size in peer["put"]
    largest = max(found["controller"], key=lambda one: one["rows"], default=None)
    return {
        "put_ratio": ours["put"][size] / peer["put"][size] if both else None,
        "get_ratio": ours["get"][size] / peer["get"][size] if both else None,
        "memcpy_fraction": found.get("between_processes", {}).get("memcpy_fraction"),
        "small_put_p50_ms": None if ours is None else ours["small_put_p50_ms"],
        "small_put_p99_ms": None if ours is None else ours["small_put_p99_ms"],
        "many_put_us_per_sample": None if ours is None else ours["many_put_us_per_sample"],
        "many_get_us_per_sample": None if ours is None else ours["many_get_us_per_sample"],
        "at_once_fraction": found.get("clients_at_once", {}).get("fraction"),
        "at_once_raw_fraction": found.get("clients_at_once", {}).get("raw_fraction"),
        "bytes_per_row": None if largest is None else largest["bytes_per_row"],
        "reasons": reasons,
    }


def line(name: str, one: dict[str, Any], sizes: list[int]) -> str:
    """A row of the table."""
    rates = "".join(f"{one['put'][str(size)]:14,.0f}{one['get'][str(size)]:8,.0f}" for size in sizes)
    return f"{name:24}{rates}   {one['small_put_p50_ms']:.2f}, {one['small_get_p50_ms']:.2f}"


def only(part: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """A part that needs a process of its own."""
    name, *words = part.split(":")
    repeats = 2 if arguments.quick else 5
    if name == "peer":
        return asyncio.run(stores.peer(arguments.sizes, repeats))
    if name == "ray":
        return asyncio.run(stores.object_store(arguments.sizes, repeats))
    if name == "controller":
        return asyncio.run(controller.controller(int(words[0])))
    asyncio.run(processes.act(name, *words))
    return None


def in_a_process_of_its_own(part: str, seconds: float, python: str = sys.executable) -> dict[str, Any]:
    """What it prints last, or ``reason``; it and all that it started are ended after ``seconds``."""
    command = [python, __file__, *sys.argv[1:], "--only", part]
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": home},
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"reason": f"it did not end within {seconds:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        return {"reason": (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]}
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
