"""GB/s of the checkpoint engines, beside memcpy, raw gloo, ZeroMQ and NIXL in the same run.

    python benchmarks/weights.py [--engines nccl shared file zmq nixl] [--gigabytes 0.1 1] [--receivers 1 2 4]
                                 [--rounds 5] [--quick] [--json]

A sender and its receivers are processes of this host. The weights are many tensors of 16 KB, or few of 32 MB (12.5 MB
of 0.1 GB), bfloat16. Each figure is the median of the rounds; what is compared takes turns, so that whatever else the
machine does meets all alike.

publish   from the first tensor that the sender draws to the last one being handed over. Receivers of `shared` wait
          meanwhile and load afterwards. For `nccl`, `zmq` and `nixl` it is the total
total     from all ends connected to the sender's return: all receivers have taken everything. Those of `shared` and
          `file` have also copied it into memory of their own
load      of `shared`: from the end of publishing until all receivers have copied everything, GB/s of the weights
digests   xxh3 of each tensor at both ends, as a run has them; without: the bare engine

`shared_memcpy_fraction`: publish of `shared` over a warm memcpy of the same bytes by as many threads.
Raw transports move the same memory: from the sender's tensors to those of each receiver; of small tensors, from one
buffer to another. `nccl_raw_fraction`: total of `nccl` over the best of gloo's own broadcast, in pieces of 4 and 32 MB
and tensor by tensor, two under way. `zmq_raw_fraction`: total of `zmq` over the best of ZeroMQ itself, from
a ROUTER to a DEALER for each receiver, within the host as the engine, without copies at the sender: in messages of
4 MB, each copied to its place in a tensor, and of 12.5 and 32 MB, each held until the next one is there, as a tensor
is. `zmq_dropped_fraction`: over messages of 4 and 32 MB that the receiver drops at once, so that the same memory takes
them all, and no tensor ever is there. `nixl_raw_fraction`: total of `nixl` over the best of NIXL itself, over UCX: each
receiver reads the sender's registered memory into its own, in pieces of 4 and 32 MB and tensor by tensor, one at a
time. All are of large tensors without digests at the largest size, and the smallest over the numbers of receivers. The
best is the way with the highest median. `nccl_small_raw_fraction`, …: the same of tensors of 16 KB.
`raw_fractions`: each of them by engine, size and tensors, for each number of receivers.
deltas: by the first of `zmq`, `shared`, `nccl`, `nixl` that is there, to one receiver, large tensors, with digests. Of
so many of the 4096-byte blocks one number each is changed: the bytes that are sent for it, of those of all weights,
and the seconds until the receiver has loaded and proved every tensor, beside those of a full update.

``--quick`` takes 0.1 GB, unless others are given, and fewer cases; what is in no fraction, in fewer rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import _weights_raw
from _weights_ends import BLOCK, SECONDS, End

SMALL, LARGE = 16 * 1024, 32 * 2**20  #: bytes of a tensor
MODULES = {
    "nccl": "jackfield_transport_nccl",
    "shared": "jackfield_transport_shared",
    "file": "jackfield_transport_file",
    "zmq": "jackfield_transport_zmq",
    "nixl": "jackfield_transport_nixl",
}
CHANGED = (0.0, 0.01, 0.1, 0.5, 1.0)  #: of the blocks
WITHOUT_LOADING = ("nccl", "zmq", "nixl")  #: receivers of these only take what comes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--gigabytes", nargs="+", type=positive(float), help="default: 0.1 1; with --quick 0.1")
    parser.add_argument("--receivers", nargs="+", type=positive(int), default=[1, 2, 4])
    parser.add_argument("--rounds", type=positive(int), default=5)
    parser.add_argument("--quick", action="store_true", help="0.1 GB, fewer cases: about a minute")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    if arguments.gigabytes is None:
        arguments.gigabytes = [0.1] if arguments.quick else [0.1, 1.0]
    there = [name for name in arguments.engines if importlib.util.find_spec(MODULES[name]) is not None]
    load = os.getloadavg()
    with ends(1 + max(arguments.receivers)) as connections, tempfile.TemporaryDirectory() as folder:
        bench = Bench(connections, Path(folder), arguments)
        results = []
        print(HEAD)
        for gigabytes in arguments.gigabytes:
            for result in bench.size(gigabytes, there):
                results.append(result)
                print(row(result), flush=True)
        deltas = list(bench.deltas(max(arguments.gigabytes), there))
        for delta in deltas:
            print(
                f"delta of {delta['changed']:6.1%} of the blocks: {delta['sent']:7.2%} of the bytes, "
                f"{delta['seconds']:.3f} s; full: {delta['full_seconds']:.3f} s"
            )
    summary = {
        "shared_memcpy_fraction": smallest(results, "shared", "memcpy"),
        "nccl_raw_fraction": smallest(results, "nccl", "raw"),
        "zmq_raw_fraction": smallest(results, "zmq", "raw"),
        "nixl_raw_fraction": smallest(results, "nixl", "raw"),
        "zmq_dropped_fraction": smallest(results, "zmq", "dropped"),
        **{f"{name}_small_raw_fraction": smallest(results, name, "raw", "small") for name in WITHOUT_LOADING},
        "raw_fractions": fractions(results),
        "note": "; ".join(
            f"{name} is not installed or not measured"
            for name in ("shared", "nccl", "zmq", "nixl")
            if name not in there
        ),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average {load[0]:.1f} before",
        "deltas": deltas,
        "results": results,
    }
    for name in summary:
        if name.endswith(("_fraction", "_fractions")):
            print(f"{name}: {summary[name]}")
    if arguments.json:
        print(json.dumps(summary))


def positive(kind: type[float]) -> Callable[[str], float]:
    """A type of arguments: numbers above 0."""

    def parse(text: str) -> float:
        if (number := kind(text)) > 0:
            return number
        raise argparse.ArgumentTypeError(f"{text} is not above 0")

    parse.__name__ = f"positive {kind.__name__}"  # as errors call it
    return parse


def smallest(results: list[dict[str, Any]], engine: str, reference: str, tensors: str = "large") -> float | None:
    """Without digests, at the largest size."""
    chosen = [r for r in results if (r["engine"], r["tensors"], r["digests"]) == (engine, tensors, False)]
    size = max((r["gigabytes"] for r in chosen), default=0)
    return min((round(r["publish"] / r[reference], 3) for r in chosen if r["gigabytes"] == size), default=None)


def fractions(results: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Of the raw transport, by number of receivers."""
    found: dict[str, dict[int, float]] = {}
    for r in results:
        if r["raw"]:
            case = f"{r['engine']}, {r['gigabytes']:g} GB, {r['tensors']} tensors"
            found.setdefault(case, {})[r["receivers"]] = round(r["total"] / r["raw"], 3)
    return found


FIGURES = ("publish", "total", "load", "memcpy", "raw", "dropped")
HEAD = "engine      GB  tensors  receivers  digests" + "".join(f"{name:>9}" for name in FIGURES) + "  (GB/s)"


def row(result: dict[str, Any]) -> str:
    """A line of the table."""
    digests = "yes" if result["digests"] else "no"
    case = f"{result['engine']:8}{result['gigabytes']:6.1f}{result['tensors']:>9}{result['receivers']:11}{digests:>9}"
    return case + "".join(f"{'' if result[name] is None else format(result[name], '.2f'):>9}" for name in FIGURES)


class Bench:
    """Who is asked for what, in turns."""

    def __init__(self, connections: list[Connection], folder: Path, arguments: argparse.Namespace) -> None:
        self.sender, *self.receivers = connections
        self.all = connections
        self.folder = folder
        self.arguments = arguments
        self.count = 0
        self.tensors = ""  #: which those are that everybody has

    def size(self, gigabytes: float, engines: list[str]) -> Iterator[dict[str, Any]]:
        """All cases of one size."""
        total = int(gigabytes * 1e9)
        for tensors, each in (("large", min(LARGE, total // 8)), ("small", SMALL)):
            self.tensors = tensors
            ask([self.sender], "weights", total // each, each, True)
            ask(self.receivers, "weights", total // each, each, False)
            for engine in engines:
                for receivers in self.arguments.receivers:
                    for digests in (False, True):
                        if self.arguments.quick and self.left_out(engine, tensors, receivers, digests):
                            continue
                        case = {"engine": engine, "gigabytes": gigabytes, "tensors": tensors, "receivers": receivers}
                        yield {**case, "digests": digests, **self.case(engine, receivers, digests)}

    def left_out(self, engine: str, tensors: str, receivers: int, digests: bool) -> bool:
        """What a quick run does without: only the fractions' cases are measured with several receivers."""
        first = receivers == self.arguments.receivers[0]
        if engine == "file":
            return tensors == "small" or digests or not first
        return (tensors == "small" or digests) and not first

    def case(self, engine: str, receivers: int, digests: bool) -> dict[str, Any]:
        """Medians of the rounds: GB/s."""
        self.make(engine, receivers)
        members = [self.sender, *self.receivers[:receivers]]
        found: dict[str, list[float]] = {"publish": [], "total": [], "load": [], "memcpy": []}
        raw: dict[Any, list[float]] = {}
        dropped: dict[Any, list[float]] = {}
        if engine in WITHOUT_LOADING and not digests:
            self.make_raw(engine, receivers)
            raw = {way: [] for way in _weights_raw.WAYS[engine]}
            dropped = {way: [] for way in _weights_raw.DROPPED if engine == "zmq"}
        self.transfer(engine, receivers, digests)  # the first one touches the buffers
        for way in list(raw)[:1]:
            ask(members, "raw", way)
        of_a_fraction = self.tensors == "large" and not digests
        for _ in range(
            self.arguments.rounds if of_a_fraction or not self.arguments.quick else min(self.arguments.rounds, 2)
        ):
            found["memcpy"].append(ask([self.sender], "memcpy")[0])
            publish, total, load = self.transfer(engine, receivers, digests)
            found["publish"].append(total if engine in WITHOUT_LOADING else publish)
            found["total"].append(total)
            if engine == "shared":
                found["load"].append(load)
            for way, values in (*raw.items(), *dropped.items()):
                values.append(ask(members, "raw", way)[0])
        ask(self.all, "forget")
        figures = {name: rounded(values) for name, values in found.items()}
        return {**figures, "raw": best(raw), "dropped": best(dropped)}

    def make_raw(self, engine: str, receivers: int) -> None:
        """Connect the ends as the engine's own transport does, without the engine."""
        workers = self.receivers[:receivers]
        self.count += 1
        if engine == "zmq":
            (place,) = ask([self.sender], "raw_make", engine, receivers)
            ask(workers, "raw_make", engine, 0, place)
        elif engine == "nixl":
            there = ask(workers, "raw_make", engine)
            (place,) = ask([self.sender], "raw_make", engine, there)
            ask(workers, "raw_meet", place)
        else:
            members = [self.sender, *workers]
            for rank, member in enumerate(members):
                member.send(("raw_make", engine, str(self.folder / f"store-{self.count}"), rank, len(members)))
            for member in members:
                answer(member)

    def deltas(self, gigabytes: float, engines: list[str]) -> Iterator[dict[str, Any]]:
        """What updates cost that change a part of the weights."""
        engine = next((name for name in ("zmq", "shared", "nccl", "nixl") if name in engines), None)
        if engine is None:
            return
        each = min(LARGE, int(gigabytes * 1e9) // 8) // BLOCK * BLOCK
        count = int(gigabytes * 1e9) // each
        ask([self.sender], "weights", count, each, True)
        ask(self.receivers[:1], "weights", count, each, False)
        self.make(engine, 1)
        full = [self.delta(0.0, full=True)[1] for _ in range(self.arguments.rounds + 1)]
        for changed in (0.01, 0.1) if self.arguments.quick else CHANGED:
            found = [self.delta(changed) for _ in range(self.arguments.rounds)]
            seconds, sent = min(second for _, second in found), found[-1][0]
            case = {"engine": engine, "gigabytes": gigabytes, "changed": changed, "sent": sent / (count * each)}
            yield {**case, "seconds": round(seconds, 4), "full_seconds": round(min(full), 4)}
        ask(self.all, "forget")

    def delta(self, changed: float, full: bool = False) -> tuple[int, float]:
        """One update: bytes sent, and seconds."""
        ask([self.sender], "change", changed)
        (topology,) = ask([self.sender], "prepare", 1)
        self.count += 1
        base = None if full else self.count - 1
        self.sender.send(("send_delta", topology[0], self.count, base))
        self.receivers[0].send(("receive_delta", topology[1][0], self.count, base))
        sent, digests = answer(self.sender)
        seconds, received = answer(self.receivers[0])
        if digests != received:
            raise ValueError("the receiver holds other weights")
        ask([self.sender], "finalize")
        return sent, seconds

    def make(self, engine: str, receivers: int) -> None:
        settings = {"folder": str(self.folder / "weights"), "poll_seconds": 0.005} if engine == "file" else {}
        ask([self.sender], "make", engine, settings, "sender")
        ask(self.receivers[:receivers], "make", engine, settings, "receiver")

    def transfer(self, engine: str, receivers: int, digests: bool) -> tuple[float, float, float]:
        """One transfer: GB/s of publishing, of everything, of the receivers' loading after publishing."""
        workers = self.receivers[:receivers]
        (topology,) = ask([self.sender], "prepare", receivers)
        hold = engine == "shared"
        self.count += 1
        self.sender.send(("send", topology[0], self.count, digests))
        for worker, share in zip(workers, topology[1], strict=True):
            worker.send(("receive", share, self.count, digests, hold, engine not in WITHOUT_LOADING))
        published = answer(self.sender)
        start = time.perf_counter()
        if hold:
            for worker in workers:
                worker.send("go")
        total = answer(self.sender)
        loaded = [answer(worker) for worker in workers]
        ask([self.sender], "finalize")
        bytes_ = loaded[0]
        return bytes_ / published / 1e9, bytes_ / total / 1e9, bytes_ / (time.perf_counter() - start) / 1e9


def rounded(values: list[float]) -> float | None:
    """Return the median to three digits, or None without values."""
    return round(median(values), 3) if values else None


def best(ways: dict[Any, list[float]]) -> float | None:
    """The median of the way that has the highest one."""
    return max((round(median(values), 3) for values in ways.values()), default=None)


def ask(connections: list[Connection], what: str, *details: Any) -> list[Any]:
    """Order the same of several, and wait for all."""
    for connection in connections:
        connection.send((what, *details))
    return [answer(connection) for connection in connections]


def answer(connection: Connection) -> Any:
    """What a process answers."""
    if not connection.poll(SECONDS):
        raise TimeoutError(f"a process did not answer within {SECONDS:g} s")
    found = connection.recv()
    if isinstance(found, Exception):
        raise found
    return found


@contextmanager
def ends(count: int) -> Iterator[list[Connection]]:
    """So many processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "jackfield.weights", *filter(importlib.util.find_spec, MODULES.values())])
    pairs = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=End.run, args=(theirs,), daemon=True) for _, theirs in pairs]
    for process in processes:
        process.start()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for process in processes:
            process.kill()
            process.join()


if __name__ == "__main__":
    main()
