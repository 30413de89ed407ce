"""``jackfield rewards try``: the reward of a run on a few lines of data."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.reward import ResponsePart, RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.compose.libraries import recognised
from jackfield.compose.rewards import make_reward
from jackfield.data.formats import Task, TaskFormat, plain_text
from jackfield.errors import DataError, JackfieldError
from jackfield.plugins import discover
from jackfield.runtime.reward_service import RewardService
from jackfield.settings import structure
from jackfield_rewards.settings import ServedReward, load_reward, read_yaml

_FIELDS = ("response", "solution_str")
_START_SECONDS = 600.0
DEADLINE_SECONDS = 60.0  #: as in a run


@asynccontextmanager
async def opened(reward: ServedReward, name: str) -> AsyncIterator[RewardService]:
    """Start a reward with its service in this process, and close it at the end."""
    clock, section = Clock(), reward.reward
    context = RewardContext(clock=clock, run=name)
    service = make_reward(discover(), section.name, section.settings, reward.reward_service, context)
    try:
        await clock.wait_for(service.start(), _START_SECONDS, f"the reward {section.name} to start")
        yield service
    finally:
        await service.close()


async def score_lines(file: Path, data: Path, rows: int, field: str | None) -> list[dict[str, Any]]:
    """Score the first lines of a data file; return a row for each line.

    A line that is no task, or has no response, raises ``data.malformed``.
    """
    reward, (form, seconds) = load_reward(file), _run_settings(file)
    requests = _requests(data, rows, field, form, seconds)
    async with opened(reward, "try") as service:
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.group_id, []).append(index)
        found: list[dict[str, Any]] = [{} for _ in requests]
        await asyncio.gather(*(_group(service, requests, indices, found) for indices in groups.values()))
    return found


async def _group(
    service: RewardService, requests: Sequence[ScoreRequest], indices: Sequence[int], found: list[dict[str, Any]]
) -> None:
    """Score lines with one prompt as a group, as in a run."""
    asked, took = [attrs.evolve(requests[index], group_size=len(indices)) for index in indices], list[float]()
    if service.compares:
        began = time.monotonic()
        results = await service.score_group(asked)
        took = [time.monotonic() - began] * len(asked)
    else:

        async def timed(request: ScoreRequest) -> tuple[ScoreResult, float]:
            began = time.monotonic()
            result = await service.compute_score(request)
            return result, time.monotonic() - began

        pairs = await asyncio.gather(*map(timed, asked))
        took = [seconds for _, seconds in pairs]
        results = await service.finish_group(asked, [result for result, _ in pairs])
    for index, result, seconds in zip(indices, results, took, strict=True):
        found[index] = _shown(requests[index], result, seconds)


def _shown(request: ScoreRequest, result: ScoreResult, seconds: float) -> dict[str, Any]:
    named = {**result.metrics, **result.dimensions}
    return {
        "line": request.idempotency_key,
        "score": result.score,
        "status": result.status,
        "seconds": round(seconds, 4),
        "tokens": result.tokens or None,
        "dimensions": {name: round(value, 6) for name, value in named.items()} or None,
        "explanation": result.explanation,
        "error": result.error,
    }


def _run_settings(file: Path) -> tuple[TaskFormat, float]:
    """Return the format of the run's data and the deadline of a score, or their defaults."""
    values = read_yaml(file)
    sections = {name: values.get(name) or {} for name in ("data", "deadlines")}
    form = sections["data"].get("format", {}) if isinstance(sections["data"], Mapping) else {}
    seconds = sections["deadlines"].get("reward") if isinstance(sections["deadlines"], Mapping) else None
    made = structure(TaskFormat, form or {}, "data.format")
    return made, structure(_Deadlines, {} if seconds is None else {"reward": seconds}, "deadlines").reward


@attrs.frozen(kw_only=True)
class _Deadlines:
    reward: float = DEADLINE_SECONDS


def _requests(data: Path, rows: int, field: str | None, form: TaskFormat, seconds: float) -> list[ScoreRequest]:
    records = dict[int, Any]()
    with data.open(encoding="utf-8") as lines:
        for number, line in islice(((n, each) for n, each in enumerate(lines, 1) if each.strip()), rows):
            with _naming(f"{data}:{number}"):
                records[number] = json.loads(line)
    if not records:
        raise DataError("the file has no lines to score", where=str(data))
    responses = {*_FIELDS, field}
    tasks = [
        {name: value for name, value in each.items() if name not in responses} if isinstance(each, dict) else each
        for each in records.values()
    ]
    with _naming(str(data)):
        form = recognised(tasks, form)
    requests = []
    for number, record in records.items():
        with _naming(f"{data}:{number}"):
            requests.append(_request(record, number, data, field, form, seconds))
    return requests


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Name the place of an error in the data."""
    try:
        yield
    except JackfieldError as error:
        error.where = place
        raise
    except ValueError as error:
        raise DataError("a line is not JSON", where=place, expected="a JSON object", found=error) from error


def _request(record: Any, number: int, data: Path, field: str | None, form: TaskFormat, seconds: float) -> ScoreRequest:
    task: Task = form.task(record, f"{data.stem}/{number}", data.stem)
    names = [name for name in (_FIELDS if field is None else (field,)) if name in record]
    if not names:
        expected = f"a field {field}" if field is not None else " or ".join(_FIELDS)
        raise DataError("a line has no response", expected=expected, found=", ".join(record), fix="name it: --response")
    response = plain_text(record[names[0]])
    prompt = "\n\n".join(plain_text([message]) for message in task.messages)
    return ScoreRequest(
        data_source=task.data_source,
        solution_str=response,
        ground_truth=task.ground_truth,
        extra_info={name: value for name, value in record.items() if name != names[0]},
        prompt_str=prompt,
        idempotency_key=str(number),
        group_id=f"{task.data_source} {prompt} {task.ground_truth}",
        messages=task.messages,
        parts=(ResponsePart(author="model", text=response),),
        deadline_seconds=seconds,
    )
