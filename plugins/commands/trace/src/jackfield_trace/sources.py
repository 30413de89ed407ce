"""Where rollouts come from: the sample tables of a run, the archive of its queue, and its scores."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import yaml

from jackfield.errors import ConfigError, QueueError, did_you_mean
from jackfield.files import read_lines
from jackfield.sdk.archive import SavedSample, import_pyarrow
from jackfield_archive import files_of, read_samples
from jackfield_trace.rollouts import Rollout, Score, Token, TokenSequence
from jackfield_trace.texts import Decode, load_decoder, plain, token_texts

_SCORES = ("scores", "rewards/scores")  #: the latter is of the role reward
_NUMBERS = {"prompt_ids": "q", "response_ids": "q", "response_mask": "B", "weight_versions": "i"}
_NUMBERS |= {"rollout_log_probs": "f", "reward": "f"}
_JSON = ("dimensions", "metrics")
_NO_MODEL = "no tokenizer was found, so tokens are shown by their ids: name a model's folder with --model"


@attrs.frozen(kw_only=True)
class Listed:
    """One rollout in the list of a run."""

    key: str
    step: int | None
    rows: tuple[Mapping[str, Any], ...]  #: of a sample table, or key and tags in an archive
    file: Path


@attrs.define(eq=False, slots=False)
class Source:
    """A run's folder, or an archive. Errors are ``queue.invalid`` and ``queue.unknown-sample``."""

    folder: Path
    model: str | None = None  #: the tokenizer's model; None: that of the run

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration; empty if there is none."""
        file = (self.folder if self.folder.is_dir() else self.folder.parent) / "config.yaml"
        try:
            found = yaml.safe_load(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            fix = "name the folder of a run"
            raise ConfigError("the run's configuration is damaged", where=str(file), found=error, fix=fix) from error
        return found if isinstance(found, dict) else {}

    def listed(self, step: int | None = None) -> list[Listed]:
        """Return all rollouts, in the order of the files, tables before the archive; of one step, if it is given."""
        found = [each for each in self._tables() if step in (None, each.step)]
        known = {each.key for each in found}
        found += [each for each in self._archived() if each.key not in known and step in (None, each.step)]
        if not found and step is None:
            expected = "samples/*.jsonl (observe.sample_table), or an archive (queue.archive)"
            fix = "name the folder of a run or of one of its stages, or an archive"
            raise QueueError("there are no samples", where=str(self.folder), expected=expected, found="none", fix=fix)
        return found

    def find(self, name: str, step: int | None = None) -> Rollout:
        """Return the rollout with this key, or with a sample of it; the latest one, if no step is given."""
        found = self.listed(step)
        named = [each for each in found if name == each.key or name in (row["key"] for row in each.rows)]
        if not named:
            what = f"there is no sample {name!r}" + ("" if step is None else f" of step {step}")
            keys = [each.key for each in found]
            details: Any = {"where": str(self.folder), "expected": f"one of {len(keys)} rollouts", "found": name}
            fix = f"jackfield trace {self.folder} lists them{plain(did_you_mean(name, keys))}"
            raise QueueError(what, code="queue.unknown-sample", **details, fix=fix)
        return self.read(max(named, key=lambda each: -1 if each.step is None else each.step))

    def read(self, listed: Listed) -> Rollout:
        """Return a listed rollout with all that is known of it."""
        if listed.file.suffix == ".jsonl":
            rows = list(listed.rows)
        else:
            keys = {row["key"] for row in listed.rows}
            rows = [self._row(each) for each in read_samples(listed.file) if each.key in keys]
        keys_, scores = [row["key"] for row in rows], self._scores([row["key"] for row in rows])
        times = [each.time for key in keys_ for each in scores.get(key, ()) if each.time is not None]
        told = max((row.get("rollout") or {} for row in rows), key=len, default={})  # the first sequence has the events
        return Rollout(
            key=listed.key,
            step=listed.step,
            source=str(listed.file),
            sequences=tuple(self._sequence(row, at, scores.get(row["key"], ())) for at, row in enumerate(rows)),
            told=told,
            time=min(times, default=listed.file.stat().st_mtime),
            model=str((self.config.get("model") or {}).get("path") or self.model or ""),
            notes=() if self._decode else (_NO_MODEL,),
        )

    # -- tables

    def _tables(self) -> Iterator[Listed]:
        files = sorted(self.folder.glob("samples/*.jsonl")) if self.folder.is_dir() else []
        for file in files:
            if file.stem == "failed":
                continue
            together: dict[tuple[int | None, str], list[Mapping[str, Any]]] = {}
            for row in read_lines(file):
                if "key" in row and "response_ids" in row:
                    together.setdefault((row.get("step"), _rollout_of(row)), []).append(row)
            for (step, key), rows in together.items():
                yield Listed(key=key, step=step, rows=tuple(rows), file=file)

    # -- archive

    @cached_property
    def _files(self) -> list[Path]:
        """The files of the archive, if there is one."""
        if not self.config and (self.folder.is_file() or any(self.folder.glob("*.parquet"))):
            return files_of(self.folder)
        place = (self.config.get("queue") or {}).get("archive")
        return files_of(Path(place)) if place and any(Path(place).glob("*.parquet")) else []

    def _archived(self) -> Iterator[Listed]:
        for file in self._files:
            together: dict[tuple[int | None, str], list[Mapping[str, Any]]] = {}
            for row in _columns(file, ("key", "steps", "tags")):
                key = str(row["key"] or "")
                step = max(row["steps"] or (), default=None)
                step = None if step is None else step + 1  # steps of acks count from 0, those of tables from 1
                entry = {"key": key, "tags": json.loads(row["tags"] or "{}")}
                together.setdefault((step, key.rpartition("/")[0] or key), []).append(entry)
            for (step, key), rows in together.items():
                yield Listed(key=key, step=step, rows=tuple(rows), file=file)

    def _row(self, sample: SavedSample) -> dict[str, Any]:
        """Return a sample of an archive as a row of a table."""
        cells, decode = sample.cells, self._decode
        names = [name for name in _NUMBERS if name in cells]
        values = {name: array(_NUMBERS[name], bytes(cells[name][1])).tolist() for name in names}
        prompt, reward = values.get("prompt_ids", []), values.get("reward")
        task = json.loads(bytes(cells["task"][1])) if "task" in cells else {}
        return {
            "key": sample.key,
            "prompt": decode(prompt) if decode else "".join(token_texts(prompt, None)),
            "response_ids": values.get("response_ids", []),
            "response_mask": values.get("response_mask") or [1] * len(values.get("response_ids", [])),
            "log_probs": values.get("rollout_log_probs", []),
            "weight_versions": values.get("weight_versions", []),
            "token_rewards": reward if reward and len(reward) > 1 else [],
            "reward": sum(reward) if reward else None,
            "tags": sample.tags,
            "rollout": task.get("rollout") or {},
        }

    # -- what both have

    @cached_property
    def _decode(self) -> Decode | None:
        if self.model is not None:
            return load_decoder(self.model, chosen=True)
        named = (self.config.get("model") or {}).get("path")
        places = [str(self.folder / "model"), *([str(named)] if named else [])]
        return next(filter(None, (load_decoder(place, chosen=False) for place in places if _may_load(place))), None)

    def _sequence(self, row: Mapping[str, Any], place: int, scores: Iterable[Score]) -> TokenSequence:
        ids, tags = list(row["response_ids"]), row.get("tags") or {}
        mask = [bool(each) for each in row.get("response_mask") or [1] * len(ids)]
        columns = [_filled(row.get(name), len(ids)) for name in ("log_probs", "weight_versions", "token_rewards")]
        texts = token_texts(ids, self._decode)
        parts = zip(ids, texts, mask, *columns, strict=True)
        tokens = tuple(
            Token(id=each, text=text, is_model=own, log_prob=log_prob, version=version if own else None, reward=reward)
            for each, text, own, log_prob, version, reward in parts
        )
        parent, end = tags.get("parent"), str(row["key"]).rpartition("/")[2]
        return TokenSequence(
            key=row["key"],
            number=int(end) if end.isdecimal() and "ground_truth" not in tags else place,
            prompt=str(row.get("prompt", "")),
            tokens=tokens,
            reward=row.get("reward"),
            parent=int(parent) if isinstance(parent, int) and parent >= 0 else None,
            relation=str(tags.get("relation") or ""),
            name=str(tags.get("agent_name") or ""),
            finish_reason=str(tags.get("finish_reason") or ""),
            tags=tags,
            scores=tuple(scores),
        )

    def _scores(self, keys: list[str]) -> dict[str, list[Score]]:
        """Return the scores of samples by key: of the files, and of journals that are not a file yet."""
        found: dict[str, list[Score]] = {}
        for folder in [self.folder / name for name in _SCORES] if self.folder.is_dir() else []:
            for file in sorted(folder.glob("*.parquet")):
                for row in _columns(file, None, keys):
                    found.setdefault(row["key"], []).append(_score(row))
            for file in sorted(folder.glob(".*.jsonl")):
                for row in read_lines(file):
                    if row.get("key") in keys:
                        found.setdefault(row["key"], []).append(_score(row))
        return found


def _rollout_of(row: Mapping[str, Any]) -> str:
    """Return the key of a table's rollout: the sample's without its number; an evaluation's, with that of a rollout."""
    key, tags = str(row["key"]), row.get("tags") or {}
    if "ground_truth" not in tags:  # a sample of the queue
        return key.rpartition("/")[0] or key
    return f"{key}/{tags['rollout']}" if tags.get("rollout") else key


def _filled(values: Any, length: int) -> list[Any]:
    return list(values) if isinstance(values, list) and len(values) == length else [None] * length


def _may_load(place: str) -> bool:
    """Whether a place can be a tokenizer's: a folder that is there, or a name on the Hub."""
    return Path(place).is_dir() or not (place.startswith((".", "/")) or place.count("/") != 1)


def _columns(file: Path, names: tuple[str, ...] | None, keys: list[str] | None = None) -> list[dict[str, Any]]:
    """Return rows of a Parquet file, of some keys only, if they are given; ``queue.invalid`` if it is damaged."""
    pyarrow = import_pyarrow()
    from pyarrow import parquet

    chosen: Callable[..., Any] = parquet.read_table
    try:
        table = chosen(file, columns=names and list(names), filters=keys and [("key", "in", keys)])
        return list(table.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        details: Any = {"where": str(file), "expected": "a Parquet file of samples", "found": error}
        raise QueueError("a file cannot be read", **details) from error


def _score(row: Mapping[str, Any]) -> Score:
    """Return a row of the data of rewards."""
    objects: dict[str, Any] = {name: row.get(name) for name in _JSON}
    objects = {name: json.loads(each) if isinstance(each, str) else each or {} for name, each in objects.items()}
    time, status = row.get("time"), str(row.get("status") or "ok")
    return Score(
        score=row.get("score"),
        status=status,
        name=str(row.get("reward") or ""),
        explanation=str(row.get("explanation") or ""),
        error=str(row.get("error") or ""),
        seconds=row.get("seconds"),
        time=time if isinstance(time, float | int | None) else time.timestamp(),
        task={name: row.get(name) for name in ("data_source", "ground_truth")},
        **objects,
    )
