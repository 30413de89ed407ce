"""``jackfield rewards rescore``: the rewards of samples that a run has scored, computed again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from jackfield import __version__
from jackfield.abc.reward import ScoreResult
from jackfield.errors import ConfigError, RunError
from jackfield.files import digest_of, replace_file
from jackfield.runtime.reward_service import RewardService
from jackfield_archive import ArchiveFile, RecordFile, ScoredRow, check_new, files_of, open_files
from jackfield_rewards.differences import Pair, compared, table
from jackfield_rewards.settings import ServedReward, load_reward, read_yaml
from jackfield_rewards.trying import DEADLINE_SECONDS, opened

_LINEAGE = "lineage.json"


@attrs.frozen(kw_only=True)
class _Source:
    """Where samples come from."""

    files: list[Path]
    config: Path | None  #: of the run, if it is known


async def rescore(source: Path, file: Path | None, out: Path | None, model: str | None, largest: int) -> dict[str, Any]:
    """Compute rewards again and return the differences; write new files to ``out``.

    Without ``file``, the reward of the run is used. It raises ``queue.invalid`` if there are no samples,
    ``config.missing-key`` if no reward is known, and ``run.storage`` if files would be overwritten.
    """
    found = _find(source)
    config = file or found.config
    if config is None:
        fix = "name a file with the section reward: --with FILE"
        raise ConfigError("no reward is known", code="config.missing-key", where=str(source), fix=fix)
    reward, seconds = load_reward(config), _deadline(found.config)
    opened_files = open_files(found.files, lambda: _decoder(model, found.config))
    if out is not None:
        check_new(out, [*(each.path.name for each in opened_files), _LINEAGE])
    pairs, written = list[Pair](), dict[str, Any]()
    async with opened(reward, "rescore") as service:
        for each in opened_files:
            rows = each.rows(seconds)
            results = await _scored(service, rows)
            pairs += [_pair(row, result) for row, result in zip(rows, results, strict=True)]
            if out is not None:
                lineage = _lineage(each, reward, service.version)
                out.mkdir(parents=True, exist_ok=True)
                each.write(out / each.path.name, number := each.number(), results, lineage)
                written[each.path.name] = {"column": number, **lineage}
        named = {"reward": reward.reward.name, "version": service.version}
    if out is not None:
        replace_file(out / _LINEAGE, json.dumps({"files": written}, indent=2))
    return {**named, "files": len(opened_files), "out": None if out is None else str(out), **compared(pairs, largest)}


def shown(found: Mapping[str, Any]) -> str:
    """Return the differences as text."""
    version = f", version {found['version']}" if found["version"] else ""
    head = f"{found['all']['samples']} samples of {found['files']} files by {found['reward']}{version}\n\n"
    return head + table(found) + (f"\nwritten to {found['out']}\n" if found["out"] else "")


async def _scored(service: RewardService, rows: Sequence[ScoredRow]) -> list[ScoreResult]:
    """Score rows in their groups. A sample that is there twice is scored once."""
    groups: dict[str, dict[str, ScoredRow]] = {}
    for row in rows:
        groups.setdefault(row.request.group_id, {})[row.request.idempotency_key] = row
    asked = [[attrs.evolve(row.request, group_size=len(group)) for row in group.values()] for group in groups.values()]
    results = await asyncio.gather(*map(service.score_group, asked))
    by_key = {
        (request.group_id, request.idempotency_key): result
        for requests, own in zip(asked, results, strict=True)
        for request, result in zip(requests, own, strict=True)
    }
    return [by_key[row.request.group_id, row.request.idempotency_key] for row in rows]


def _pair(row: ScoredRow, result: ScoreResult) -> Pair:
    request, new = row.request, result.score if result.status == "ok" else None
    place: Any = {"key": request.idempotency_key, "group": request.group_id, "data_source": request.data_source}
    return Pair(old=row.score, new=new, error=result.error, **place)


def _lineage(each: RecordFile | ArchiveFile, reward: ServedReward, version: str | None) -> dict[str, Any]:
    return {
        "reward": reward.reward.name,
        "version": version,
        "settings": dict(reward.reward.settings),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "jackfield": __version__,
        "source": str(each.path.absolute()),
        "digest": digest_of(each.path),  # xxh3_128 of the source
    }


def _find(source: Path) -> _Source:
    """Find the files of a run, an archive, or a folder of rewards, and the run's configuration."""
    if not source.is_dir():
        return _Source(files=files_of(source), config=_config(source.parent.parent))
    config = _config(source)
    if config is None:
        return _Source(files=files_of(source), config=_config(source.parent))
    places = source / "scores", source / "rewards" / "scores"  # the latter is of the role reward
    for kept in places:
        if any(kept.glob("*.parquet")):
            return _Source(files=files_of(kept), config=config)
    archive = (read_yaml(config).get("queue") or {}).get("archive")
    if archive is None:
        expected, fix = "scores/*.parquet, or queue.archive", "keep them: reward_service.keep: true"
        found = "neither"
        if any(any(kept.glob(".*.jsonl")) for kept in places):
            found, fix = "their journal", "let the run end; if it was killed, resume it"
        details: Any = {"where": str(source), "expected": expected, "found": found, "fix": fix}
        raise RunError("the run has no files of rewards", code="queue.invalid", **details)
    return _Source(files=files_of(Path(archive)), config=config)


def _config(folder: Path) -> Path | None:
    file = folder / "config.yaml"
    return file if file.is_file() else None


def _deadline(config: Path | None) -> float:
    values = {} if config is None else read_yaml(config)
    return float((values.get("deadlines") or {}).get("reward", DEADLINE_SECONDS))


def _decoder(model: str | None, config: Path | None) -> Callable[[Sequence[int]], str]:
    """Return the function that makes text of an archive's tokens."""
    path = model or ((read_yaml(config).get("model") or {}).get("path") if config is not None else None)
    if path is None:
        fix = "name the folder of the model whose tokens these are: --model PATH"
        raise ConfigError("an archive has tokens, and no text", code="config.missing-key", where="--model", fix=fix)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=Path(path).is_dir())

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    return decode
