"""Score the samples of an archive with another reward, into another archive."""

from __future__ import annotations

import asyncio
import json
import tomllib
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import attrs

from jackfield.abc.reward import ResponsePart, RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import ConfigError, DeadlineExceeded, PluginNotFound, QueueError, described
from jackfield.sdk.archive import SavedSample
from jackfield_archive.files import COLUMNS, files_of, read_samples, trained, write_samples

#: Columns that follow from the reward, which another reward makes invalid.
_FROM_REWARD = {"reward", "reward_dimensions", "advantages", "returns", "rewards"}


def load_reward(settings: Mapping[str, Any]) -> RewardAgent:
    """Make the reward agent of a section ``reward`` of a configuration, by its name and its settings.

    If no plugin of this name is installed, raise ``plugin.not-found``; if a setting is wrong, ``config.invalid-value``.
    """
    options = dict(settings)
    name = options.pop("name", None)
    found = entry_points(group="jackfield.rewards", name=str(name))
    if not found:
        known = ", ".join(sorted(entry_points(group="jackfield.rewards").names)) or "none is installed"
        raise PluginNotFound(f"no reward plugin is named {name!r}", where="name", expected=known, found=name)
    module, _, file = next(iter(found)).value.partition(":")
    manifest = tomllib.loads((files(module) / file).read_text(encoding="utf-8"))
    try:
        return cast(RewardAgent, _load(manifest["object"])(_load(manifest["config"])(**options), RewardContext()))
    except (TypeError, ValueError) as error:
        raise ConfigError("a setting of the reward is wrong", where=f"reward {name}", found=error) from error


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def request_of(
    sample: SavedSample, decode: Callable[[Sequence[int]], str], deadline_seconds: float = 60.0
) -> ScoreRequest:
    """Return the request by which a run has scored a sample; ``queue.invalid`` if it has no task."""
    if "task" not in sample.cells:
        expected = "the column task, which samples of rollouts have"
        raise QueueError("a sample cannot be scored", where=sample.key, expected=expected, found=list(sample.cells))
    task = json.loads(bytes(sample.cells["task"][1]))
    made = task.get("rollout") or {}
    prompt, response = (_tokens(sample, name) for name in ("prompt_ids", "response_ids"))
    mask = tuple(bytes(sample.cells["response_mask"][1])) if "response_mask" in sample.cells else (1,) * len(response)
    ends = [0, *(at for at, (one, other) in enumerate(pairwise(mask), 1) if one != other), len(mask)]
    authors: Any = ("tool", "model")
    parts = [
        ResponsePart(author=authors[mask[at]], text=decode(response[at:to])) for at, to in pairwise(ends) if to > at
    ]
    return ScoreRequest(
        data_source=task["data_source"],
        solution_str=decode(response),
        ground_truth=task["ground_truth"],
        extra_info=task["extra_info"],
        prompt_str=decode(prompt),
        response_ids=tuple(response),
        response_mask=mask,
        parts=tuple(parts),
        turns=made.get("turns", 1),
        metrics=made.get("metrics", {}),
        tool_calls=tuple(made.get("tool_calls", ())),
        idempotency_key=sample.key,
        group_id=sample.group or sample.key,
        deadline_seconds=deadline_seconds,
    )


@attrs.frozen(kw_only=True)
class _Scorer:
    agent: RewardAgent
    decode: Callable[[Sequence[int]], str]
    seconds: float
    turns: Any

    async def group(self, samples: Sequence[SavedSample]) -> list[SavedSample]:
        """Return the samples of a whole group with their new rewards."""
        requests = [request_of(sample, self.decode, self.seconds) for sample in samples]
        if self.agent.compares:
            results = await self._called(self.agent.score_group(requests), requests)
        else:
            alone = [self._called(self._alone(request), [request]) for request in requests]
            scored = [result for one in await asyncio.gather(*alone) for result in one]
            results = await self._called(self.agent.finish_group(requests, scored), requests)
        return [_scored(sample, result) for sample, result in zip(samples, results, strict=True)]

    async def _alone(self, request: ScoreRequest) -> list[ScoreResult]:
        return [await self.agent.compute_score(request)]

    async def _called(
        self, work: Awaitable[Sequence[ScoreResult]], requests: Sequence[ScoreRequest]
    ) -> Sequence[ScoreResult]:
        """Wait for results; an error or a passed deadline is a status of each."""
        async with self.turns:
            try:
                who = f"the reward of sample {requests[0].idempotency_key}"
                return await self.agent.context.clock.wait_for(work, self.seconds, who)
            except DeadlineExceeded as error:
                failed = ScoreResult(status="timeout", error=error.message)
            except Exception as error:
                failed = ScoreResult(status="failed", error=described(error))
        return [failed] * len(requests)


async def rescore(
    archive: Path,
    out: Path,
    agent: RewardAgent,
    decode: Callable[[Sequence[int]], str],
    *,
    deadline_seconds: float = 60.0,
) -> Counter[str]:
    """Write the trained samples of an archive to the folder ``out``, with the rewards of an agent that is not started.

    ``decode`` returns the text of tokens. Each file becomes a file of the same name, complete or absent. What follows
    from the old reward is left out: advantages, returns, and the reward's metrics. Return the numbers of samples by
    status; one without a score gets the status ``failed``, its reason as a tag, and no reward. If ``out`` is the
    archive itself, or a sample has no task, raise ``queue.invalid``.
    """
    counts = Counter[str]()
    if out.resolve() == (archive if archive.is_dir() else archive.parent).resolve():
        raise QueueError("an archive is not overwritten", where=str(out), expected="another folder", found=str(out))
    sources = files_of(archive)
    out.mkdir(parents=True, exist_ok=True)
    try:
        await agent.start()  # it knows now how many calls it handles
        turns = nullcontext() if agent.concurrency is None else asyncio.Semaphore(agent.concurrency)
        scorer = _Scorer(agent=agent, decode=decode, seconds=deadline_seconds, turns=turns)
        for file in sources:
            groups: dict[str, list[SavedSample]] = {}
            for sample in trained(read_samples(file)):
                groups.setdefault(sample.group or sample.key, []).append(sample)
            made = [sample for group in await asyncio.gather(*map(scorer.group, groups.values())) for sample in group]
            counts.update(str(sample.status) for sample in made)
            write_samples(out / file.name, made)
    finally:
        await agent.close()
    return counts


def _scored(sample: SavedSample, result: ScoreResult) -> SavedSample:
    """Return a sample with another reward, or without one."""
    cells = {name: cell for name, cell in sample.cells.items() if name not in _FROM_REWARD}
    tags = {name: value for name, value in sample.tags.items() if not name.startswith("reward/")}
    if result.status != "ok":
        return attrs.evolve(sample, cells=cells, tags={**tags, "reason": result.error}, status="failed")
    scores = result.token_scores or (float(result.score or 0.0),)
    tags |= {f"reward/{name}": float(value) for name, value in result.metrics.items()}
    return attrs.evolve(sample, cells={**cells, "reward": (COLUMNS["reward"], array("f", scores).tobytes())}, tags=tags)


def _tokens(sample: SavedSample, name: str) -> list[int]:
    found = array("q")
    found.frombytes(bytes(sample.cells[name][1]))
    return found.tolist()
