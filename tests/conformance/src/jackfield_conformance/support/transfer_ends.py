"""Ends of a weight transfer in separate processes, for the tests of checkpoint engines.

Each process carries out the orders of the test and answers, so a test can kill a process at a known point without
sleeping.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from multiprocessing.connection import Connection
from typing import Any

import attrs
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.errors import JackfieldError
from jackfield.plugins import load_plugin
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import WeightSender

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
_START_SECONDS = 60.0  #: for a process to import torch
_ANSWER_SECONDS = 30.0


def model_tensors(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's tensors, drawn from the seed: bf16, fp8 and float32; tiny, strided and of 1 MB."""
    generator = torch.Generator().manual_seed(seed)
    yield "embed.weight", torch.randn(1024, 256, generator=generator)
    for layer in range(12):
        weight = torch.randn(96, 64, generator=generator)
        yield f"layer.{layer}.weight", weight.to(torch.bfloat16)
        yield f"layer.{layer}.transposed", weight.T
        yield f"layer.{layer}.quantised", weight.to(torch.float8_e4m3fn)
        yield f"layer.{layer}.other", weight.to(torch.float8_e5m2)
        yield f"layer.{layer}.bias", weight[0]
    yield "scale", torch.tensor(float(seed))
    yield "empty", torch.empty(0, 4)


def adapter_tensors(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a LoRA adapter, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(20):
        for half, shape in (("A", (4, 64)), ("B", (64, 4))):
            name = f"base_model.model.layer.{layer}.lora_{half}.weight"
            yield name, torch.randn(shape, generator=generator).to(torch.bfloat16)


_KINDS = {"full": model_tensors, "adapter": adapter_tensors}


def digests(kind: str, seed: int) -> dict[str, str]:
    """Return the digests that every receiver must have."""
    return {name: digest(tensor) for name, tensor in _KINDS[kind](seed)}


@attrs.define(eq=False)
class End:
    """A process of a transfer, forked from one that has imported everything."""

    connection: Connection[Any, Any]
    process: Any

    @classmethod
    def spawn(cls) -> End:
        """Start a process."""
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_be_an_end, args=(theirs,))
        process.start()
        theirs.close()
        return cls(ours, process)

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        number: int = self.process.pid
        return number

    @property
    def dead(self) -> bool:
        """Return whether it was killed."""
        return self.connection.closed

    def order(self, what: str, **details: Any) -> None:
        """Send an order."""
        self.connection.send({"what": what, **details})

    def answer(self, seconds: float = _ANSWER_SECONDS) -> dict[str, Any]:
        """Return the answer. Raise ``AssertionError`` if none comes within ``seconds`` or the process has died."""
        assert self.connection.poll(seconds), f"no answer within {seconds:g} s"
        try:
            found: dict[str, Any] = self.connection.recv()
        except (EOFError, ConnectionError):
            raise AssertionError("the process has ended") from None
        return found

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Send an order and return its answer."""
        self.order(what, **details)
        return self.answer()

    def kill(self) -> None:
        """Kill the process by SIGKILL, and wait until it is gone."""
        if not self.dead:
            self.process.kill()
            self.process.join(_ANSWER_SECONDS)
            self.connection.close()


@attrs.define(eq=False)
class Team:
    """Trainer ranks and workers of one plugin, each in a process. Killed ones are made again."""

    plugin: str
    settings: Mapping[str, Any]
    cuda: bool = False
    ranks: list[End] = attrs.field(factory=list)
    workers: list[End] = attrs.field(factory=list)

    def gather(self, ranks: int, workers: int, seconds: float = 20.0) -> None:
        """Have these numbers of processes, with a deadline of ``seconds`` for the next transfers."""
        for ends, count in ((self.ranks, ranks), (self.workers, workers)):
            for index in range(count):
                if index == len(ends):
                    ends.append(End.spawn())
                elif ends[index].dead:
                    ends[index] = End.spawn()
            while len(ends) > count:
                ends.pop().kill()
        for side, ends in (("sender", self.ranks), ("receiver", self.workers)):
            for rank, end in enumerate(ends):
                place = {"end": side, "rank": rank, "world_size": len(ends), "deadline_seconds": seconds}
                if self.cuda:  # a GPU for the trainer, one for each worker
                    place["device"] = "cuda:0" if side == "sender" else f"cuda:{rank + 1}"
                end.order("make", plugin=self.plugin, settings=dict(self.settings), context=place)
        for end in (*self.ranks, *self.workers):
            assert end.answer(_START_SECONDS) == {"made": True}

    def begin(self, version: int, kind: str = "full", **holds: int) -> None:
        """Start a transfer at all ends, ``full`` or ``adapter``, of the tensors of seed ``version``.

        With ``rank_0=5`` in ``holds``, rank 0 stops before its sixth tensor, answers ``holding`` and does nothing more.
        """
        metadata = tuple(end.ask("prepare")["metadata"] for end in self.ranks)
        cls: Any = load_plugin("checkpoint_engine", self.plugin).cls
        topology = cls.build_topology(TopologyRequest(trainer_metadata=metadata, rollout_workers=len(self.workers)))
        for name, ends, shares in (("rank", self.ranks, topology.trainer), ("worker", self.workers, topology.rollout)):
            for number, (end, share) in enumerate(zip(ends, shares, strict=True)):
                what = "send" if name == "rank" else "receive"
                hold = holds.get(f"{name}_{number}")
                end.order(what, arguments=dict(share), version=version, kind=kind, hold=hold)

    def transfer(self, version: int, kind: str = "full") -> None:
        """Make a whole transfer; require that each end sent or received exactly the tensors of seed ``version``."""
        self.begin(version, kind)
        wanted = digests(kind, version)
        for end in (*self.ranks, *self.workers):
            answer = end.answer()
            assert answer.get("digests") == wanted, answer
        self.finalize()

    def finalize(self) -> None:
        """Finalize all living trainer ranks; workers finalize by themselves."""
        for end in self.ranks:
            if not end.dead:
                assert end.ask("finalize") == {"finalized": True}

    def close(self) -> None:
        """End all processes."""
        for end in (*self.ranks, *self.workers):
            end.kill()


@contextlib.contextmanager
def team(plugin: str, cuda: bool = False, **settings: Any) -> Iterator[Team]:
    """Yield a team without processes; end its processes afterwards."""
    made = Team(plugin, settings, cuda)
    try:
        yield made
    finally:
        made.close()


class _Process:
    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self.engine: Any = None
        self.sender: WeightSender | None = None

    async def do(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order."""
        match order["what"]:
            case "make":
                plugin = load_plugin("checkpoint_engine", order["plugin"])
                self.engine = plugin.build(order["settings"], CheckpointEngineContext(**order["context"]))
                self.sender = WeightSender(self.engine)
                return {"made": True}
            case "prepare":
                return {"metadata": dict((await self.engine.prepare()).metadata)}
            case "send":
                return {"digests": await self._send(order)}
            case "receive":
                return {"digests": await self._receive(order)}
            case "finalize":
                await self.engine.finalize()
                return {"finalized": True}
            case "limit":
                sys.dont_write_bytecode = True  # a truncated cache would stay
                resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"], resource.RLIM_INFINITY))
                return {"limited": True}
            case "held":
                gc.collect()  # an error's traceback holds what its frames held
                descriptors = [_kind(name) for name in os.listdir("/proc/self/fd")]
                threads = len(os.listdir("/proc/self/task"))
                with open("/proc/self/maps") as file:
                    maps = file.readlines()
                mapped, named = (sum(kind in line for line in maps) for kind in ("/memfd:", " /dev/shm/"))
                return {"descriptors": sorted(descriptors), "threads": threads, "mapped": mapped, "named": named}
        raise AssertionError(order)

    async def _send(self, order: Mapping[str, Any]) -> dict[str, str]:
        assert self.sender is not None
        await self.sender.connect(order["arguments"], order["version"])
        return await self.sender.send(self._held(_KINDS[order["kind"]](order["version"]), order["hold"]))

    async def _receive(self, order: Mapping[str, Any]) -> dict[str, str]:
        receiver, count = WeightReceiver(self.engine), 0
        async with aclosing(receiver.tensors(order["arguments"], order["version"])) as stream:
            async for _ in stream:
                if count == order["hold"]:
                    self.say({"holding": count})
                    await asyncio.Event().wait()
                count += 1
        return receiver.digests

    def _held(
        self, tensors: Iterator[tuple[str, torch.Tensor]], hold: int | None
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        for count, pair in enumerate(tensors):
            if count == hold:
                self.say({"holding": count})
                signal.pause()  # like a training engine that hangs in a collective, until it is killed
            yield pair

    def say(self, answer: Mapping[str, Any]) -> None:
        """Send an answer to the test."""
        self.connection.send(dict(answer))

    async def serve(self) -> None:
        """Carry out orders until the test closes the connection."""
        listening = ThreadPoolExecutor(1)  # separate from the engine's threads, which are counted
        with contextlib.suppress(EOFError):
            while True:
                order = await asyncio.get_running_loop().run_in_executor(listening, self.connection.recv)
                try:
                    answer = await self.do(order)
                except JackfieldError as error:
                    answer = {"error": type(error).__name__, "code": error.code, "text": str(error)}
                self.say(answer)


def _kind(descriptor: str) -> str:
    """Return what a descriptor refers to, without numbers that change."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").partition("[")[0]
    except OSError:
        return "the listing itself"


def _be_an_end(connection: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    asyncio.run(_Process(connection).serve())
