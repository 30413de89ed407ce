"""The tree of all exceptions that Jackfield raises.

Each exception has a ``code``, which :data:`CODES` and ``docs/reference/errors.md`` list, and says what went wrong,
where, what was expected, what was found and how to fix it.
"""

from __future__ import annotations

import difflib
import functools
import os
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

CODES: dict[str, str] = {
    "config.unreadable": "The configuration file is missing or is not YAML.",
    "config.unknown-key": "A key in the configuration belongs to no setting.",
    "config.missing-key": "A setting without a default is not given.",
    "config.wrong-type": "A value has the wrong type.",
    "config.invalid-value": "A value has the right type but is not allowed.",
    "config.override": "A command-line override is not of the form key.path=value.",
    "plugin.not-found": "No installed plugin has this name and kind.",
    "plugin.ambiguous": "Plugins of several kinds have this name.",
    "plugin.duplicate": "Two distributions provide a plugin of the same kind and name.",
    "plugin.manifest-missing": "An entry point names a manifest file that is not there.",
    "plugin.manifest-invalid": "A manifest is not TOML, or has missing, unknown or wrong keys.",
    "plugin.abi": "The plugin implements another major version of its contract, or needs a newer minor one.",
    "plugin.import": "The plugin's module raised while it was imported.",
    "plugin.object-missing": "The manifest names an object that its module does not have.",
    "plugin.not-a-subclass": "The plugin's class does not derive from the contract's abstract class.",
    "plugin.abstract-method": "The plugin's class leaves an abstract method of its contract undefined.",
    "plugin.sync-async": "A method is synchronous where the contract is asynchronous, or the reverse.",
    "plugin.signature": "A method does not accept the parameters of its contract.",
    "plugin.capability": "A request needs a capability that the plugin does not declare.",
    "plugin.config-class": "The plugin's config object is not a frozen attrs class.",
    "plugin.hooks": "The plugin's hook module cannot be registered.",
    "plugin.hook-failed": "A hook implementation raised; all others of that hook were called.",
    "plugin.interpreter": "A configured interpreter is missing, broken or did not answer in time.",
    "plugin.handshake": "The process where a plugin is to run has another Jackfield, plugin or contract than this one.",
    "plugin.environment": "An environment for an interpreter of its own cannot be made, or is not described.",
    "plugin.requirement": "A package that this part needs is not installed.",
    "plugin.scaffold": "A new plugin cannot be written: a bad name, or something is there already.",
    "plugin.check": "The conformance checks of a plugin could not be run.",
    "data.missing": "A data file does not exist.",
    "data.malformed": "A line of a data file is not a JSON object, or lacks a field.",
    "data.empty": "A data set has no tasks.",
    "data.no-chat-template": "The tokenizer has no chat template and the configuration gives none.",
    "data.no-end-token": "Neither the tokenizer nor the chat template has a token that ends an answer.",
    "data.prompt-too-long": "A prompt has more tokens than the limit.",
    "data.not-append-only": "A turn changed tokens of an earlier turn.",
    "data.vocabulary": "The tokenizer knows token ids that the model does not have.",
    "algorithm.unknown": "No registered part of this kind has this name.",
    "algorithm.input": "An algorithm got tensors or options that it cannot work with.",
    "algorithm.not-finite": "A log-probability, an advantage or a loss is NaN or infinite.",
    "engine.failed": "The training engine raised.",
    "engine.state": "The engine was used before initialize() or in the wrong mode.",
    "engine.model": "The model folder is missing or cannot be loaded.",
    "rollout.failed": "The rollout server raised.",
    "rollout.request": "A generation request is invalid.",
    "rollout.context-length": "A prompt leaves no room for an answer within the model's length.",
    "rollout.stopped": "The rollout server is stopped or died.",
    "rollout.stale": "A replica whose weights are not current was asked to generate.",
    "agent.failed": "An agent loop raised.",
    "agent.output": "An agent loop returned sequences that break the contract.",
    "reward.failed": "A reward agent raised.",
    "reward.output": "A reward agent returned something that is not a score.",
    "reward.too-many-failures": "More groups than allowed ended without a usable reward.",
    "queue.unknown-sample": "A sample is not in the queue.",
    "queue.unknown-consumer": "A consumer has not been registered.",
    "queue.invalid": "A queue request contradicts itself.",
    "queue.batch-failed": "A group of a batch failed more often than it may be replaced.",
    "queue.closed": "The queue is closed.",
    "queue.column": "A column is not there, or was written twice.",
    "queue.lease": "A lease is expired, released or of an older epoch.",
    "queue.full": "The queue stayed full until the deadline.",
    "queue.unreachable": "The server or file behind a queue backend does not answer, or broke off.",
    "queue.store": "What is behind a queue backend cannot be used: login, format, damage, or its own settings.",
    "queue.lost": "Rows went with the storage unit that held them, or their values were altered in the store.",
    "queue.ledger": "The ledger of a run was cut, changed or removed: it is not the one that the checkpoint knows.",
    "queue.session": "A queue's controller in another process does not answer, or knows this process no more.",
    "rpc.size": "A message between processes is above the limits.",
    "rpc.authentication": "A message came from a process that does not know the secret.",
    "rpc.malformed": "A message from another process is not one of the protocol, or is too long.",
    "rpc.value": "A value cannot travel to another process, or is of another type than the method declares.",
    "rpc.method": "Another process has called a method that is not served.",
    "rpc.cancelled": "A call to another process was cancelled.",
    "rpc.lost": "The connection to another process has ended.",
    "rpc.address": "A server's address cannot be listened at, written or read.",
    "rpc.version": "Two processes have different versions of the protocol or of a contract.",
    "weights.digest": "A replica loaded other bytes than the engine sent.",
    "weights.names": "A model's weights cannot be turned back into the names and shapes of its checkpoint.",
    "weights.missing": "A tensor that was sent did not arrive, or arrived twice.",
    "weights.log-probs": "A replica computes other log-probs than the engine, with the same weights.",
    "weights.base": "A delta came for a version of the weights that the replica, or the sender, does not hold.",
    "weights.version": "A weight version went backwards or does not match.",
    "weights.transfer": "A weight transfer broke off.",
    "weights.storage": "A folder of weights cannot be written or read: no room, no permission, a damaged file.",
    "schedule.staleness": "A batch is staler than the schedule allows.",
    "run.log-probs": "The log-probs of a training pass are not those of inference, or not those of the rollout.",
    "run.folder-in-use": "Another run is using this folder.",
    "run.changed": "The folder holds a run with other settings or other data.",
    "run.no-adapter": "An adapter is to be merged, and the run has trained none.",
    "run.no-checkpoint": "A folder holds no checkpoint.",
    "run.storage": "The run's folder cannot be written or read: no room, no permission, a damaged disk.",
    "run.checkpoint-write": "A checkpoint could not be written; the earlier ones are as before.",
    "run.checkpoint-damaged": "A file of a checkpoint is missing or is not what was written.",
    "run.checkpoint-format": "A checkpoint was written by a version of Jackfield with another format.",
    "run.not-finite": "A loss or gradient norm became NaN or infinite.",
    "run.not-running": "No run that has replicas goes on in a folder.",
    "run.failed": "A part of the run failed.",
    "worker.start": "A worker process cannot start, or cannot load the user's code.",
    "cluster.unavailable": "A Ray cluster cannot be started or joined, or has no room for a worker.",
    "worker.answer": "A worker process answered what it was not asked; it was killed, and its call has failed.",
    "worker.died": "A worker died, or lost what it had made.",
    "deadline": "Something that was waited for did not come in time.",
}

_DETAILS = ("where", "expected", "found", "fix")


class JackfieldError(Exception):
    """The base class of all errors.

    Args:
        message: What went wrong, in one sentence without a full stop.
        code: One of :data:`CODES`; each class has a default.
        where: The place: a file and line, a path in the configuration, a plugin, a sample.
        expected: The expected value or state.
        found: The actual value or state.
        fix: What the reader can do.
    """

    default_code = "run.failed"

    def __init_subclass__(cls, code: str | None = None) -> None:
        cls.default_code = code or cls.default_code

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        where: object = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.code = code or self.default_code
        assert self.code in CODES, f"error code {self.code!r} is not listed in jackfield.errors.CODES"
        self.message, self.where, self.expected, self.found, self.fix = message, where, expected, found, fix
        super().__init__(message)

    def __str__(self) -> str:
        shown = self.where is None or (isinstance(self.where, str) and self.where in self.message)
        head = self.message if shown else f"{self.message} at {self.where}"
        details = ((name, getattr(self, name)) for name in _DETAILS[1:])
        lines = [f"  {name}: {value}" for name, value in details if value is not None]
        return "\n".join([f"[{self.code}] {head}", *lines])

    def __reduce__(self) -> tuple[Any, ...]:
        details: dict[str, Any] = {name: getattr(self, name) for name in ("code", *_DETAILS)}
        return functools.partial(type(self), **details), (self.message,)

    def as_dict(self) -> dict[str, Any]:
        """Return the error as JSON-ready fields, as ``--json`` prints them."""
        values = {name: getattr(self, name) for name in _DETAILS}
        details = {name: None if value is None else str(value) for name, value in values.items()}
        return {"code": self.code, "message": self.message, **details}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a hint at the known name that is closest to a wrong one; empty if none is close."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def described(error: BaseException) -> str:
    """Describe an exception in one line, with the file and line that raised it, in user code if possible."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    libraries = (os.path.dirname(__file__) + os.sep, "<frozen ", *installed)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values that can be sent to another process."""
    if isinstance(error, JackfieldError):
        return {"class": type(error).__name__, **error.as_dict()}
    return {"class": None, "message": f"{type(error).__name__}: {error}"}


def rebuilt_error(fields: Mapping[str, Any], where: str) -> JackfieldError:
    """Return the error from the :func:`error_fields` that another process, named by ``where``, sent."""
    kind = globals().get(str(fields.get("class")))
    if not (isinstance(kind, type) and issubclass(kind, JackfieldError)):
        return RunError(f"{where} raised {fields.get('message')}", where=where)
    details = {name: fields.get(name) for name in _DETAILS}
    code = fields["code"] if fields.get("code") in CODES else None
    return kind(str(fields.get("message")), code=code, **details)


class ConfigError(JackfieldError, code="config.invalid-value"):
    """A configuration file or an override is wrong."""


class PluginError(JackfieldError, code="plugin.requirement"):
    """A plugin cannot be used."""


class PluginNotFound(PluginError, code="plugin.not-found"):
    """No plugin of that name is installed."""


class PluginImportError(PluginError, code="plugin.import"):
    """The plugin's module fails to import."""


class DataError(JackfieldError, code="data.malformed"):
    """A task file, a tokenizer or a template is wrong."""


class EngineError(JackfieldError, code="engine.failed"):
    """A training engine refused or failed."""


class RolloutError(JackfieldError, code="rollout.failed"):
    """A rollout server refused or failed."""


class AgentError(JackfieldError, code="agent.failed"):
    """An agent loop broke its contract or failed."""


class RewardError(JackfieldError, code="reward.failed"):
    """A reward agent broke its contract or failed."""


class QueueError(JackfieldError, code="queue.invalid"):
    """The TransferQueue refused a request."""


class LeaseError(QueueError, code="queue.lease"):
    """A lease is unknown, expired or of an old epoch."""


class QueueFull(QueueError, code="queue.full"):
    """Backpressure lasted beyond its deadline."""


class RpcError(JackfieldError, code="rpc.malformed"):
    """A message between processes was refused, or a call could not be delivered."""


class WeightsError(JackfieldError, code="weights.transfer"):
    """A weight synchronisation was lost, stale or corrupt."""


class ScheduleError(JackfieldError, code="config.invalid-value"):
    """A schedule's staleness bound would be broken."""


class RunError(JackfieldError, code="run.failed"):
    """A run cannot start, continue or resume."""


class WorkerLost(RunError, code="worker.died"):
    """A worker died and its work was lost."""


class DeadlineExceeded(JackfieldError, code="deadline"):
    """A wait reached its deadline."""
