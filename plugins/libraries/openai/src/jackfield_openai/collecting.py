"""Keeps the answers of an endpoint as trajectories, and the rewards that users give them later.

A folder has a file of answers and one of rewards for each endpoint that wrote into it. Answers are samples as
``data.samples`` of a run reads them; :func:`collected` adds the rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import ConfigError, RolloutError
from jackfield.sdk import structure
from jackfield_openai.answers import Answer, Choice
from jackfield_openai.bodies import ChatBody

_ANSWERS, _REWARDS = "answers-*.jsonl", "rewards-*.jsonl"
_CLOSE_SECONDS = 10.0  #: for the rest to be written at the end


@attrs.frozen(kw_only=True)
class Feedback:
    """A reward that a user gives to one choice of an answer."""

    id: str  #: the answer's
    index: int = 0  #: the choice's
    reward: float


class Collector:
    """Appends answers and rewards to files in a folder, from a thread, without delaying an answer.

    If the disk is slower than the answers, what is beyond ``most`` lines is dropped and counted. Errors of the disk are
    logged once and counted; they do not reach clients.
    """

    def __init__(self, folder: str, replica: int, most: int) -> None:
        self._folder, self._name = Path(folder), f"{replica}-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        self._lines: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue(most)
        self._writing: asyncio.Task[None] | None = None
        self._failed = False
        self.kept = 0  #: lines in files
        self.dropped = 0  #: lines that were lost, because the disk was too slow or failed

    def start(self) -> None:
        """Create the folder and start to write; ``config.invalid-value`` if that is not possible."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path("answers").touch()
        except OSError as error:
            what, fix = "answers cannot be kept in this folder", "choose another folder"
            raise ConfigError(what, where="openai.collect", found=error, fix=fix) from error
        self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Write what has come and end. May be called again."""
        writing, self._writing = self._writing, None
        if writing is not None:
            ending = asyncio.create_task(self._lines.put(None))
            await asyncio.wait({writing, ending}, timeout=_CLOSE_SECONDS, return_when=asyncio.ALL_COMPLETED)
            for task in (writing, ending):
                task.cancel()
            await asyncio.gather(writing, ending, return_exceptions=True)

    def keep(self, answer: Answer) -> None:
        """Keep the choices of an answer that were generated whole; those of one prompt are a group."""
        for choice in answer.choices:
            if choice.chunks and choice.chunks[-1].finish_reason in ("stop", "length") and choice.completion_tokens:
                self._put("answers", sample_of(answer, choice))

    def reward(self, body: Any) -> None:
        """Keep a user's reward, the fields of a :class:`Feedback`; other fields are a ``RolloutError``."""
        feedback = structure(Feedback, body, error=RolloutError)
        self._put("rewards", {"key": f"{feedback.id}/{feedback.index}", "reward": feedback.reward})

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-{self._name}.jsonl"

    def _put(self, kind: str, line: dict[str, Any]) -> None:
        try:
            self._lines.put_nowait((kind, line))
        except asyncio.QueueFull:
            self.dropped += 1

    async def _write(self) -> None:
        ended = False
        while not ended:
            lines = [await self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get_nowait())
            ended = None in lines
            some = [line for line in lines if line is not None]
            try:
                await asyncio.to_thread(self._append, some)
                self.kept += len(some)
            except OSError as error:
                self.dropped += len(some)
                if not self._failed:
                    logging.getLogger("jackfield").error("answers cannot be kept in %s: %s", self._folder, error)
                self._failed = True

    def _append(self, lines: list[tuple[str, dict[str, Any]]]) -> None:
        for kind in ("answers", "rewards"):
            text = "".join(json.dumps(line) + "\n" for which, line in lines if which == kind)
            if text:
                with self._path(kind).open("a", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())


def sample_of(answer: Answer, choice: Choice) -> dict[str, Any]:
    """Return a choice as a sample without a reward: token ids, log-probs and versions, and its request as a task."""
    tokens = [token for chunk in choice.chunks for token in chunk.token_ids]
    versions = [version for chunk in choice.chunks for version in chunk.weight_versions]
    group = f"{answer.public_id}/{choice.index // answer.body.choices}"
    request = {"messages": answer.body.messages} if isinstance(answer.body, ChatBody) else {}
    return {
        "key": f"{answer.public_id}/{choice.index}",
        "group": group,
        "task": group,
        "tags": {
            "weight_version_min": min(versions, default=0),
            "weight_version_max": max(versions, default=0),
            "finish_reason": choice.chunks[-1].finish_reason,
            "created": answer.created,
        },
        "columns": {
            "prompt_ids": list(choice.prompt),
            "response_ids": tokens,
            "response_mask": [True] * len(tokens),
            "rollout_log_probs": [value for chunk in choice.chunks for value in chunk.log_probs],
            "task": {"data_source": "served", "ground_truth": None, "extra_info": request, "reward": None},
        },
    }


def collected(folder: str | Path, *, scored_only: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the samples in a folder, with the last reward that a user gave to each.

    With ``scored_only``, leave out groups in which a sample has no reward. A line that was cut by a crash is skipped.
    """
    rewards = {line["key"]: line["reward"] for line in _lines(Path(folder), _REWARDS)}
    groups: dict[str, list[dict[str, Any]]] = {}
    for sample in _lines(Path(folder), _ANSWERS):
        if sample["key"] in rewards:
            sample["columns"]["reward"] = rewards[sample["key"]]
        groups.setdefault(sample["group"], []).append(sample)
    for samples in groups.values():
        if not scored_only or all("reward" in sample["columns"] for sample in samples):
            yield from samples


def main() -> None:
    """Write what was collected in a folder to a file that ``data.samples`` of a run reads."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, help="a .jsonl file")
    parser.add_argument("--scored-only", action="store_true", help="leave out groups in which a reward is missing")
    arguments = parser.parse_args()
    if not any(arguments.folder.glob(_ANSWERS)):
        parser.error(f"there are no answers in {arguments.folder}: give the folder that rollout.openai.collect names")
    lines = [json.dumps(sample) + "\n" for sample in collected(arguments.folder, scored_only=arguments.scored_only)]
    partial = arguments.out.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(arguments.out)
    print(f"{len(lines)} samples in {arguments.out}")
    answers = {sample["key"] for sample in _lines(arguments.folder, _ANSWERS)}
    if strange := {line["key"] for line in _lines(arguments.folder, _REWARDS)} - answers:
        print(f"{len(strange)} rewards are for choices that were not kept, for example {min(strange)}", file=sys.stderr)


def _lines(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob(pattern)):
        with file.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.endswith("\n"))


if __name__ == "__main__":
    main()
