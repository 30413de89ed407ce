"""The reward agent ``function``: a plain Python function or class with ``compute_score``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import gt, le, optional

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import PluginError, RewardError
from jackfield.sdk import option
from jackfield_user_code import WorkerReward


@attrs.frozen(kw_only=True)
class FunctionRewardConfig:
    """Settings that name the function and the limits of its processes."""

    path: str = option(help="folder/file.py:function or package.module:function; also a class or an instance.")
    method: str = option("compute_score", "The method of a class or an instance that is called.")
    keywords: Mapping[str, Any] = option(
        factory=dict, help="Further keyword arguments of the function, or of the class's constructor."
    )
    workers: int = option(1, "Processes that score concurrently.", [gt(0), le(4096)])
    python: str | None = option(None, "Interpreter of these processes, with its own packages; null: this one.")
    memory_bytes: int | None = option(4 * 2**30, "Address space of one process; null: unlimited.", optional(gt(0)))
    start_seconds: float = option(60.0, "Longest time to import the function.", gt(0.0))

    def __attrs_post_init__(self) -> None:
        _interpreter(self.python)  # refuses it before a run starts


class FunctionReward(WorkerReward):
    """A reward that calls ``compute_score(data_source, solution_str, ground_truth, extra_info)``.

    The function may be asynchronous. It returns a number, or a dict with ``score`` whose other numbers become metrics.
    It runs in a worker process, which is killed at a sample's deadline. An exception, a crash or a result that is not
    finite is ``failed``, and a late result is ``timeout``; neither is ever a score.
    """

    def __init__(self, config: FunctionRewardConfig, context: RewardContext) -> None:
        options: dict[str, Any] = {"method": config.method, "keywords": config.keywords}
        options |= {"python": _interpreter(config.python), "start_seconds": config.start_seconds}
        super().__init__(config, context, config.path, **options)

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one sample in the next free process. ``extra_info`` is passed as JSON."""
        arguments = {
            "data_source": request.data_source,
            "solution_str": request.solution_str,
            "ground_truth": request.ground_truth,
            "extra_info": dict(request.extra_info),
        }
        name = f"sample {request.idempotency_key}"
        result = await self._pool.call(arguments, deadline_seconds=request.deadline_seconds, name=name)
        if result.status != "ok":
            return ScoreResult(status="timeout" if result.status == "timeout" else "failed", error=result.error)
        try:
            return self._result(result.value)
        except RewardError as error:
            return ScoreResult(status="failed", error=str(error))

    def _result(self, value: Any) -> ScoreResult:
        if not isinstance(value, dict):
            return ScoreResult(score=self._number(value, "the result"))
        if "score" not in value:
            raise self._refuse("the result has no 'score'", f"keys {sorted(value)}")
        metrics = {name: self._number(each, f"metric {name!r}") for name, each in value.items() if name != "score"}
        return ScoreResult(score=self._number(value["score"], "the score"), metrics=metrics)

    def _number(self, value: Any, what: str) -> float:
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self._refuse(f"{what} is not a finite number", f"{type(value).__name__} {value!r}"[:200])
        return float(value)

    def _refuse(self, message: str, found: str) -> RewardError:
        return RewardError(
            message,
            code="reward.output",
            where=self.config.path,
            expected="a number, or a dict with 'score' and further numbers",
            found=found,
        )


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
