"""Shared parts of rollout servers that relay to an engine: reserved arguments, sleep, weight folders."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jackfield.abc.rollout import (
    RolloutContext,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WorkerReceipt,
)
from jackfield.errors import ConfigError, JackfieldError, PluginError, WeightsError
from jackfield.sdk.relay import MEMORY, RelayServer, Running
from jackfield_huggingface.folders import ReceivedWeights, WeightFolder


def without(ours: Mapping[str, str], engine: str, where: str) -> Callable[[Any, Any, Mapping[str, Any]], None]:
    """Return a validator of further arguments of an engine, given in the setting ``where``.

    ``ours`` maps the arguments that a plugin sets itself to the setting to use for each.
    """

    def validate(_: Any, __: Any, value: Mapping[str, Any]) -> None:
        for name in value.keys() & ours.keys():
            raise ConfigError(
                f"the argument {name} of {engine} is not free",
                where=f"{where}.{name}",
                expected="an argument that no setting stands for",
                fix=f"use {ours[name]}",
            )

    return validate


class SleepingServer(RelayServer):
    """A replica whose engine can release memory. A subclass says how."""

    level_1: ClassVar[tuple[str, ...]] = MEMORY  #: memory that sleep of level 1 releases

    def missing(self, error: object = None) -> PluginError:
        """Return the error for a missing package of the engine."""
        return PluginError(
            f"{self.engine_name} is not installed in this interpreter",
            where="the rollout server",
            found=error,
            fix="give it an environment that has it: cluster.interpreters.rollout; see the plugin's README",
        )

    def cannot_serve(self, error: Exception) -> JackfieldError:
        """Return the error for a model that the engine cannot load."""
        return self._error(
            f"{self.engine_name} cannot serve the model: {type(error).__name__}: {error}",
            "engine.model",
            found=self.context.model.path,
            fix=f"see what {self.engine_name} has printed",
        )

    @abstractmethod
    async def _give_back(self, tags: list[str], level: int) -> int | None:
        """Let the engine release memory; return the bytes, if they are known."""

    @abstractmethod
    async def _take_back(self, tags: list[str]) -> None:
        """Let the engine allocate its memory again."""

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Release memory; only while paused or idle."""
        self._require_running()
        if not self._paused and self._running:
            raise self._error("the server is decoding", "rollout.request", fix="pause it before it sleeps")
        chosen = self.level_1 if request.level == 1 else MEMORY
        freed = await self._give_back([tag for tag in chosen if tag in self._awake], request.level)
        if request.level == 2:
            self._held = None
            self._stale = "the weights were given back by sleep(level=2) and no full update has come"
        self._awake -= set(chosen)
        return SleepResult(freed_bytes=freed or 0)

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Allocate the memory again."""
        self._require_running()
        tags = [tag for tag in request.tags or MEMORY if tag not in self._awake]
        if tags:
            await self._take_back(tags)
        self._awake |= set(tags)
        return WakeUpResult(awake=tuple(tag for tag in MEMORY if tag in self._awake))


class FolderServer(SleepingServer):
    """A replica whose engine reads new weights from a folder, with any number of workers.

    All requests are removed from the engine at a pause or an update. The rest of each request is generated afterwards,
    with its tokens so far appended to the prompt. So one known weight version generates each of the engine's responses,
    and no old KV cache is used. A stop string that begins before an interruption and ends after it is not found.
    """

    _weight_folder: WeightFolder

    def __init__(self, config: Any, context: RolloutContext) -> None:
        super().__init__(config, context)
        self._flows = asyncio.Event()  #: set while requests may be sent to the engine
        self._flows.set()
        self._interruptions = 0

    @abstractmethod
    async def _part(self, running: Running, left: int) -> bool:
        """Generate up to ``left`` tokens after the prompt and the tokens so far; return False if interrupted."""

    @abstractmethod
    async def _interrupt(self) -> None:
        """Remove all running requests from the engine. No forward pass runs once it returns."""

    @abstractmethod
    async def _read_folder(self, request: UpdateWeightsRequest, folder: str) -> None:
        """Let the engine load the weights in a folder, and drop cached prefixes."""

    async def _read(self, running: Running) -> None:
        request = running.request
        budget = min(request.sampling.max_new_tokens, self._max_model_len - len(request.prompt_ids))
        while True:
            await self._flows.wait()
            interruptions, left = self._interruptions, budget - len(running.token_ids)
            if not left:
                self._end(running, "length")  # it was interrupted after its last token
                return
            if await self._part(running, left):
                return
            if interruptions == self._interruptions:
                raise self._error(f"{self.engine_name} gave request {request.request_id!r} up", "rollout.failed")

    async def _hold(self, wait: bool = False) -> None:
        self._flows.clear()
        if wait:
            await asyncio.gather(*(each.ended for each in self._begun()), return_exceptions=True)
        self._interruptions += 1
        await self._interrupt()

    async def _release(self) -> None:
        self._flows.set()

    async def _receive(self, request: UpdateWeightsRequest) -> ReceivedWeights:
        """Receive weights into a folder while the engine decodes."""
        return await self._weight_folder.receive(request)

    async def _load(self, request: UpdateWeightsRequest, received: ReceivedWeights) -> Sequence[WorkerReceipt]:
        try:
            await self._read_folder(request, str(received.folder))
        except Exception as error:
            said = error.message if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}"
            raise WeightsError(
                f"{self.engine_name} has not loaded version {request.version}: {said}",
                where=f"replica {self.context.replica}",
                found=getattr(error, "found", None),
                fix=f"see what {self.engine_name} has printed",
            ) from error
        finally:
            received.remove()
        return [WorkerReceipt(worker=0, digests=received.digests)]
