"""A run's folder with a tokenizer, and its sample tables, archive and scores as a run writes them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from jackfield.cli import main
from jackfield.observe import ObserveSettings, observers
from jackfield.plugins.hooks import HookManager, RunStarted, SampleRecord, SamplesRecorded
from jackfield.sdk.archive import SavedSample
from jackfield_archive import RewardRecords, write_samples
from jackfield_archive.files import COLUMNS

EVIL = "<script>alert(1)</script> \x1b[31m\x1b]0;title\x07 [bold]not bold[/bold] \u202eturned &amp; ünï💡"
PROMPT = "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call><|im_end|>'
TOOL = f"\n<|im_start|>tool\n{EVIL}<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "It is 4 💡.<|im_end|>"
KEY = "train/0/3/0/1/0"


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, and the end of a turn as a special token."""
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    return made


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def record(key: str = KEY, *parts: tuple[str, int], **changes: Any) -> SampleRecord:
    """A sample whose response has these texts, each with 1 if it is the model's; by default a call and an answer."""
    parts = parts or ((CALL, 1), (TOOL, 0), (ANSWER, 1))
    ids = [(each, mask) for text, mask in parts for each in ids_of(text)]
    count = len(ids)
    made = SampleRecord(
        key=key,
        prompt=PROMPT,
        response="".join(text for text, _ in parts),
        reward=0.75,
        response_ids=tuple(each for each, _ in ids),
        response_mask=tuple(mask for _, mask in ids),
        tags={"task": "sum-3", "turns": 2, "weight_version_min": 4, "weight_version_max": 5, "finish_reason": "stop"},
        log_probs=tuple(-0.01 if place % 7 else -5.0 if mask else 0.0 for place, (_, mask) in enumerate(ids)),
        weight_versions=tuple((4 if place < count // 2 else 5) if mask else -1 for place, (_, mask) in enumerate(ids)),
        token_rewards=tuple(0.75 if place == count - 1 else 0.0 for place in range(count)),
        rollout={
            "turns": 2,
            "metrics": {"tools/add/calls": 1.0},
            "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 2}}],
            "end_reason": "answered",
            "events": [
                {"name": "generate", "at": 0.5, "seconds": 0.5, "tokens": 9, "finish_reason": "stop"},
                {"name": "tool", "at": 0.75, "seconds": 0.2, "tool": "add", "arguments": {"a": 2}, "is_error": True},
                {"name": "note", "at": 0.8, "text": EVIL},
                {"name": "generate", "at": 1.5, "seconds": 0.7, "tokens": 8, "weight_version": 5},
            ],
        },
    )
    return attrs.evolve(made, **changes)


class RunFolder:
    """The folder of a run that nothing runs in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir(parents=True)
        TOKENIZER.save(str(folder / "model" / "tokenizer.json"))
        self.configure()
        (self.listener,) = observers(
            ObserveSettings(metrics_file=False, report_to=(), timeline=False, curve=False, progress=False), folder
        )
        self.records: RewardRecords | None = None
        self.hooks = HookManager([self.listener])
        started = RunStarted(name="run", folder=str(folder), total_steps=9, first_step=0, config={})
        self.hooks.emit(started)

    def configure(self, **sections: Any) -> None:
        """Write config.yaml."""
        config = {"model": {"path": str(self.folder / "model")}, **sections}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))

    def table(self, step: int, *records: SampleRecord, partition: str = "train") -> None:
        """Write records to a sample table as a run does."""
        self.hooks.emit(SamplesRecorded(step=step, partition=partition, samples=records))

    def scores(self, *rows: dict[str, Any], closed: bool = True) -> None:
        """Write rows of the data of rewards; without ``closed``, they are still in the journal."""
        self.records = RewardRecords(self.folder / "scores", "worker-0")
        self.records.add(rows)
        if closed:
            self.records.close()

    def close(self) -> None:
        """Close all files."""
        self.listener.close()
        if self.records is not None:
            self.records.close()

    def archive(self, folder: Path, *records: SampleRecord, step: int = 0) -> Path:
        """Write records to the archive in ``folder``."""
        folder.mkdir(exist_ok=True)
        write_samples(folder / "queue-0000000001.parquet", [_saved(each, step) for each in records])
        return folder


def _saved(one: SampleRecord, step: int) -> SavedSample:
    task = {"data_source": "sums", "ground_truth": "4", "extra_info": {}, "reward": None, "rollout": dict(one.rollout)}
    cells: Any = {
        "prompt_ids": array("q", ids_of(one.prompt)).tobytes(),
        "response_ids": array("q", one.response_ids).tobytes(),
        "response_mask": bytes(one.response_mask),
        "rollout_log_probs": array("f", one.log_probs).tobytes(),
        "weight_versions": array("i", one.weight_versions).tobytes(),
        "reward": array("f", one.token_rewards or (one.reward or 0.0,)).tobytes(),
        "task": json.dumps(task).encode(),
    }
    cells = {name: (COLUMNS[name], content) for name, content in cells.items()}
    place: Any = {"partition": "train", "key": one.key, "steps": (step,), "status": "trained"}
    return SavedSample(cells=cells, tags=one.tags, **place)


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder(tmp_path / "run")
    yield made
    made.close()


Trace = Callable[..., Result]


@pytest.fixture
def trace() -> Trace:
    """``trace(*arguments)``: the command's result; an unexpected exception fails the test."""

    def do(*arguments: object, color: bool = False) -> Result:
        result = CliRunner().invoke(main, ["trace", *map(str, arguments)], color=color)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return do
