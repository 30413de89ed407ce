"""A rollout server whose process, and interpreter, are its own: the same contract, spoken over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
    BaseRolloutServer,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    HealthReport,
    PauseRequest,
    PauseResult,
    ResumeRequest,
    ResumeResult,
    RolloutContext,
    ServerInfo,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WeightReceipt,
)
from jackfield.errors import JackfieldError, RolloutError
from jackfield.plugins.discovery import PluginRecord
from jackfield.pulse import SILENCE_SECONDS
from jackfield.runtime.process.connection import HostProcess
from jackfield.runtime.process.wire import decode, types_of

__all__ = ["RolloutProcess"]

_STOP_SECONDS = 30.0


class RolloutProcess(BaseRolloutServer):
    """Stands for a replica that is made, started and stopped in another process, which ends with it.

    Raises (all methods): what the replica raises there, with the same class and code; ``rollout.stopped`` when its
    process has ended, saying how; ``DeadlineExceeded`` naming the replica.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        context: RolloutContext,
        *,
        record: PluginRecord,
        python: str,
        seconds: float = 3600.0,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """
        Args:
            config: plain settings of the plugin.
            context: the replica's; its clock stays here.
            record: of the plugin, as it is installed here; there it must be the same.
            python: the interpreter.
            seconds: the longest that any call may take.
            log: file that the process's output is added to.
            environment: variables that the process gets beside this process's.
            silence_seconds: without a sign of life of the process, after which it is killed.
        """
        super().__init__(config, context)
        self._record = record
        self._seconds = seconds
        self._name = f"rollout replica {context.replica}"
        self._process = HostProcess(
            python,
            self._name,
            context.clock,
            log=log,
            environment=environment or {},
            silence_seconds=silence_seconds,
        )
        self._used = self._stopped = False

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> ServerInfo:
        """Start the process, shake hands, make the plugin's server there, and start it.

        Raises:
            PluginError: the interpreter, or the plugin there, is not what this process expects.
            JackfieldError: what the server raises.
        """
        if self._used or self._stopped:
            raise RolloutError("the server cannot be started twice", code="rollout.stopped", fix="make a new server")
        self._used = True
        try:
            await self._process.open(self._record, self._seconds)
            plugin = {"kind": self._record.kind, "name": self._record.name}
            message = {"make": {**plugin, "settings": dict(self.config), "context": self.context}}
            await self._process.call("load its plugin", message, self._seconds)
            return cast(ServerInfo, await self._call("start"))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the server, and end its process and what that has started."""
        first, self._stopped = not self._stopped, True
        if not (first and self._used):
            return
        try:
            if self._process.death is None:
                with suppress(JackfieldError):
                    await self._process.call("stop", {"call": "stop", "arguments": None}, _STOP_SECONDS)
        finally:
            await self._end()

    async def _end(self) -> None:
        await self._process.close()

    async def health(self) -> HealthReport:
        """Whether the replica can serve, and its load; of a process that has ended, how."""
        try:
            return cast(HealthReport, await self._call("health"))
        except RolloutError as error:
            if error.code != "rollout.stopped":
                raise
            return HealthReport(healthy=False, detail=f"{error.message}: {error.found or ''}")

    # -- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. Cancelling the call aborts the request."""
        return cast(GenerateResult, await self._call("generate", request, f"generate {request.request_id!r}"))

    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate one sample and yield its tokens as they come. Closing the iterator aborts the request."""
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self._require()
        message = {"call": "generate_stream", "arguments": request}
        stream = self._process.stream(f"generate {request.request_id!r}", message, self._seconds)
        try:
            async for chunk in stream:
                yield decode(GenerateChunk, chunk)
        finally:
            await stream.aclose()

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests; when it returns they generate no more."""
        return cast(AbortResult, await self._call("abort", request))

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; when it returns no forward pass runs."""
        return cast(PauseResult, await self._call("pause", request))

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Go on decoding."""
        return cast(ResumeResult, await self._call("resume", request))

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Give memory back; only while paused or idle."""
        return cast(SleepResult, await self._call("sleep", request))

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again."""
        return cast(WakeUpResult, await self._call("wake_up", request))

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Receive a new version of the weights there, by a checkpoint engine that reaches other processes."""
        what = f"load weights of version {request.version}"
        return cast(WeightReceipt, await self._call("update_weights", request, what))

    async def _call(self, member: str, request: Any = None, what: str | None = None) -> Any:
        self._require()
        message = {"call": member, "arguments": request}
        value = await self._process.call(what or member, message, self._seconds)
        _, result = types_of(BaseRolloutServer, member)
        return decode(result, value)

    def _require(self) -> None:
        if not self._used or self._stopped:
            raise RolloutError(
                "the server is not running", code="rollout.stopped", where=self._name, fix="start it, or make a new one"
            )
