"""The reward agent ``function``: any function, class or rubric that scores."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import gt, le, optional

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import ConfigError, PluginError, RewardError, RunError
from jackfield.sdk import option
from jackfield_user_code import WorkerResult, WorkerReward, try_first

_ADAPTER = Path(__file__).with_name("_adapter.py")
_GROUP = "jackfield.reward_functions"  #: entry points


@attrs.frozen(kw_only=True)
class FunctionRewardConfig:
    """Settings that name the function and the limits of its processes."""

    path: str = option(
        help="folder/file.py:function, package.module:function, or the name of an entry point of the group "
        "jackfield.reward_functions; also a class, an instance or a rubric of verifiers."
    )
    method: str = option("compute_score", "The method of a class or an instance that is called.")
    keywords: Mapping[str, Any] = option(
        factory=dict, help="Further keyword arguments of the function, or of the class's constructor."
    )
    workers: int = option(
        1, "Processes that score, each one sample at a time, or in_flight samples.", [gt(0), le(4096)]
    )
    in_flight: int | None = option(
        None, "Calls at a time in one process, for a coroutine function; null: 10000.", [gt(0), le(1_000_000)]
    )
    fork: bool = option(
        True, "Fork the processes from one that has imported the function; false: each imports it, for libraries that "
        "do not work after a fork."
    )  # fmt: skip
    form: Literal["auto", "text", "messages"] = option(
        "auto",
        "Form of prompts and completions for TRL's functions; auto: texts if the record's column `prompt` is a text, "
        "as in TRL, else messages.",
    )
    python: str | None = option(None, "Interpreter of these processes, with its own packages; null: this one.")
    memory_bytes: int | None = option(4 * 2**30, "Address space of one process; null: unlimited.", optional(gt(0)))
    try_first: bool = option(
        True,
        "Score the first task's own answer before anything is generated, and refuse a function that fails on it twice.",
    )
    start_seconds: float = option(60.0, "Longest time to import the function.", gt(0.0))
    version: str | None = option(
        None, "Version of the function, under which scores are cached; null: a digest of its file, of the modules that "
        "it imports from its own folder and package, and of the keywords."
    )  # fmt: skip

    def __attrs_post_init__(self) -> None:
        _interpreter(self.python)  # refuses it before a run starts


class FunctionReward(WorkerReward):
    """A reward that calls a function, whose signature says how.

    It may be ``compute_score`` in verl's form, also with other fields of the request; TRL's form, which scores whole
    groups; a rubric of verifiers; sync or async. A class may have ``score_group``; its module or itself may have
    ``post_process_scores``. It runs in worker processes, which are killed at a sample's deadline. An exception, a crash
    or a result that is not finite is ``failed``, and a late result is ``timeout``; neither is ever a score.
    """

    def __init__(self, config: FunctionRewardConfig, context: RewardContext) -> None:
        options: dict[str, Any] = {"method": config.method, "keywords": config.keywords, "fork": config.fork}
        options |= {"python": _interpreter(config.python), "start_seconds": config.start_seconds}
        options |= {"in_flight": config.in_flight or 10_000, "adapter": _ADAPTER}
        is_entry_point = ":" not in config.path and not config.path.endswith(".py")
        super().__init__(config, context, f"@{_GROUP}:{config.path}" if is_entry_point else config.path, **options)
        self._getters: dict[str, Callable[[ScoreRequest], Any]] = {}
        self._started = False

    @property
    def compares(self) -> bool:
        """Return whether the function scores whole groups. It is known after the start."""
        return bool(self._pool.about.get("group"))

    @property
    def version(self) -> str | None:
        """Return the setting, or a digest of code and keywords. It is known after the start."""
        digest = self._pool.about.get("digest")
        if self.config.version is not None or digest is None:
            version: str | None = self.config.version
            return version
        keywords = json.dumps(dict(self.config.keywords), sort_keys=True, default=str)
        return hashlib.sha256(f"{digest}{keywords}".encode()).hexdigest()[:32]

    async def start(self) -> None:
        """Start a process; ``worker.start`` if it cannot load the code, ``reward.function`` if it cannot call it."""
        try:
            await super().start()
        except RunError as error:
            if error.code != "reward.function":
                raise
            details = {name: getattr(error, name) for name in ("code", "where", "expected", "found", "fix")}
            raise RewardError(error.message, **details) from error
        about = self._pool.about
        if self.config.in_flight is not None and not about["async"]:
            raise _without_effect("in_flight", "a function that is not a coroutine function", "workers")
        if self.config.form != "auto" and about["style"] == "score":
            raise _without_effect("form", "a function that does not take prompts and completions", "parameters")
        self._getters = {name: _getter(name) for name in about.get("needs", ())}
        if about["style"] == "score":  # verl's signature, with verl's columns
            own = {"extra_info": _own_extra_info, "ground_truth": _own_ground_truth}
            self._getters |= {name: get for name, get in own.items() if name in self._getters}
        self._started = True
        await try_first(self, self.config.path)

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one sample, when a process is free. ``extra_info`` is passed as JSON."""
        if not self._started:
            await self.start()
        if "score" not in self._pool.about["functions"]:
            return (await self._grouped([request]))[0]
        arguments = {name: get(request) for name, get in self._getters.items()}
        result = await self._pool.call(
            arguments, request.deadline_seconds, f"sample {request.idempotency_key}", "score"
        )
        return _unscored(result) if result.status != "ok" else self._result(result.value)

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Score one whole group, by the function itself if it compares."""
        if not self._started:
            await self.start()
        if not self.compares:
            return await super().score_group(requests)
        return await self.finish_group(requests, await self._grouped(requests))

    async def finish_group(
        self, requests: Sequence[ScoreRequest], scores: Sequence[ScoreResult]
    ) -> Sequence[ScoreResult]:
        """Adjust the scores of a group by the function's ``post_process_scores``, if there is one."""
        if not self._started:
            await self.start()
        about = self._pool.about
        if "post" not in about["functions"] or not scores:
            return scores
        failed = math.nan if about["nan"] else None
        given = [failed if each.score is None else each.score for each in scores]
        seconds = max(request.deadline_seconds for request in requests)
        result = await self._pool.call({"scores": given}, seconds, f"group {requests[0].group_id}", "post")
        if result.status != "ok":
            raise RewardError("post_process_scores has failed", where=self.config.path, found=result.error)
        if isinstance(result.value, dict):
            raise self._refused(result.value)
        return [self._processed(*each) for each in zip(scores, result.value, strict=True)]

    def _processed(self, before: ScoreResult, after: Any) -> ScoreResult:
        if isinstance(after, dict):
            return ScoreResult(status="failed", error=str(self._refused(after)))
        if after is not None:
            return attrs.evolve(before, status="ok", score=after, error=None, token_scores=None)
        if before.status != "ok":
            return before
        nothing = {"wrong": "post_process_scores took a score away", "found": "None or NaN", "expected": "a number"}
        return ScoreResult(status="failed", error=str(self._refused(nothing)))

    async def _grouped(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        rows = [{name: get(request) for name, get in self._getters.items()} for request in requests]
        seconds = max(request.deadline_seconds for request in requests)
        name = f"group {requests[0].group_id}" if requests[0].group_id else f"sample {requests[0].idempotency_key}"
        result = await self._pool.call({"requests": rows, "form": self.config.form}, seconds, name, "group")
        if result.status != "ok":
            return [_unscored(result)] * len(requests)
        if isinstance(result.value, dict):
            return [ScoreResult(status="failed", error=str(self._refused(result.value)))] * len(requests)
        return list(map(self._result, result.value))

    def _result(self, value: dict[str, Any]) -> ScoreResult:
        if "wrong" in value:
            return ScoreResult(status="failed", error=str(self._refused(value)))
        return ScoreResult(**value)

    def _refused(self, answer: Mapping[str, Any]) -> RewardError:
        details = {name: answer[name] for name in ("expected", "found")}
        return RewardError(answer["wrong"], code="reward.output", where=self.config.path, **details)


def _unscored(result: WorkerResult) -> ScoreResult:
    return ScoreResult(status="timeout" if result.status == "timeout" else "failed", error=result.error)


def _getter(name: str) -> Callable[[ScoreRequest], Any]:
    """Return what reads a field of a request as plain values."""
    if name in ("extra_info", "metrics"):
        return lambda request: dict(getattr(request, name))
    if name in ("messages", "tool_calls"):
        return lambda request: [dict(each) for each in getattr(request, name)]
    if name == "parts":
        return lambda request: [{"author": each.author, "text": each.text} for each in request.parts]
    return functools.partial(_field, name)


def _field(name: str, request: ScoreRequest) -> Any:
    return getattr(request, name)


def _own_extra_info(request: ScoreRequest) -> dict[str, Any]:
    """Return the record's own field ``extra_info``, as in verl's Parquet files, else the whole record."""
    own = request.extra_info.get("extra_info")
    return dict(own if isinstance(own, Mapping) else request.extra_info)


def _own_ground_truth(request: ScoreRequest) -> Any:
    """Return verl's ``reward_model.ground_truth`` as it is in the record, if this is the task's, else its text."""
    reward = request.extra_info.get("reward_model")
    own = reward.get("ground_truth") if isinstance(reward, Mapping) else None
    text = own if isinstance(own, str) else json.dumps(own, ensure_ascii=False)
    return own if own is not None and text == request.ground_truth else request.ground_truth


def _without_effect(name: str, what: str, instead: str) -> ConfigError:
    where, fix = f"reward.{name}", f"remove it, or see {instead}"
    return ConfigError(f"{name} has no effect with {what}", where=where, expected="null", fix=fix)


def _interpreter(python: str | None) -> str:
    """Return the path of the interpreter; None: this one."""
    if python is None:
        return sys.executable
    found = shutil.which(str(Path(python).expanduser()))
    if found is None:
        raise PluginError(
            "there is no such interpreter",
            code="plugin.interpreter",
            where="reward.python",
            expected=f"a Python interpreter at {python}, or a command of that name on PATH",
            found="no such file",
        )
    return str(Path(found).absolute())
