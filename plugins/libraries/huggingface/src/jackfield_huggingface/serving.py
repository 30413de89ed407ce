"""What rollout servers share that relay to another engine: arguments that are not free, sleep, and weight folders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jackfield.abc.rollout import (
    GenerateRequest,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WorkerReceipt,
)
from jackfield.errors import ConfigError, JackfieldError, PluginError, WeightsError
from jackfield.sdk.relay import MEMORY, InterruptingServer, RelayServer
from jackfield_huggingface.folders import ReceivedWeights, WeightFolder


def without(ours: Mapping[str, str], engine: str, where: str) -> Callable[[Any, Any, Mapping[str, Any]], None]:
    """Return a validator of further arguments of an engine, under the setting ``where``.

    ``ours`` are those that a plugin sets itself, with the setting that stands for each.
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
    """A replica whose engine gives memory back. A subclass says how."""

    level_1: ClassVar[tuple[str, ...]] = MEMORY  #: what sleep of level 1 gives back

    def missing(self, error: object = None) -> PluginError:
        """Return the error where the engine's package is not there."""
        return PluginError(
            f"{self.engine_name} is not installed in this interpreter",
            where="the rollout server",
            found=error,
            fix="give it an environment that has it: cluster.interpreters.rollout; see the plugin's README",
        )

    def cannot_serve(self, error: Exception) -> JackfieldError:
        """Return the error where the engine does not load the model."""
        return self._error(
            f"{self.engine_name} cannot serve the model: {type(error).__name__}: {error}",
            "engine.model",
            found=self.context.model.path,
            fix=f"see what {self.engine_name} has printed",
        )

    @abstractmethod
    async def _give_back(self, tags: list[str], level: int) -> None:
        """Have the engine give memory back."""

    @abstractmethod
    async def _take_back(self, tags: list[str]) -> None:
        """Have the engine take memory again."""

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Give memory back; only while paused or idle."""
        self._require_running()
        if not self._paused and self._running:
            raise self._error("the server is decoding", "rollout.request", fix="pause it before it sleeps")
        chosen = self.level_1 if request.level == 1 else MEMORY
        await self._give_back([tag for tag in chosen if tag in self._awake], request.level)
        if request.level == 2:
            self._held = None
            self._stale = "the weights were given back by sleep(level=2) and no full update has come"
        self._awake -= set(chosen)
        return SleepResult()

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again."""
        self._require_running()
        tags = [tag for tag in request.tags or MEMORY if tag not in self._awake]
        if tags:
            await self._take_back(tags)
        self._awake |= set(tags)
        return WakeUpResult(awake=tuple(tag for tag in MEMORY if tag in self._awake))


class FolderServer(SleepingServer, InterruptingServer):
    """A replica whose engine reads new weights in a folder, however many workers it has."""

    _weight_folder: WeightFolder

    @abstractmethod
    async def _read_folder(self, request: UpdateWeightsRequest, folder: str) -> None:
        """Have the engine load what lies in a folder, and forget cached prefixes."""

    @abstractmethod
    def _refuse(self, request: GenerateRequest) -> None:
        """Raise where the engine cannot do what a valid request asks for."""

    async def _receive(self, request: UpdateWeightsRequest) -> ReceivedWeights:
        """Write what comes into a folder, while the engine decodes."""
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
