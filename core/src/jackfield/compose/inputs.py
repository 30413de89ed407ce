"""What a run reads before it begins: tasks, the model's description, the tokenizer.

Whatever is wrong with them is refused here, before anything is started and before the run's folder is touched.
Reading tasks and the model's description loads neither torch nor transformers, so that most mistakes show at once.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.config import RunConfig
from jackfield.data.tasks import TaskSet
from jackfield.data.tokens import HuggingFaceChatTokenizer, check_vocabulary, encode_answers, encode_prompt
from jackfield.errors import ConfigError, EngineError
from jackfield.sdk.rotary import length_limits

#: Files of weights that torch.load would read.
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")

_ENCODED_PROMPTS = 64  #: of each file, its longest texts: so many are tokenised before the run begins


@attrs.frozen(kw_only=True)
class Tasks:
    """The data of a run."""

    train: TaskSet
    held_out: TaskSet | None  #: None: the run does not evaluate
    expert: TaskSet | None  #: None: the algorithm has no use for an expert

    @property
    def digests(self) -> dict[str, str]:
        """Return the digest of each file's contents, by its name in the configuration: a resumed run compares them."""
        files = {"train": self.train, "eval": self.held_out, "expert": self.expert}
        return {name: tasks.digest for name, tasks in files.items() if tasks is not None}


@attrs.frozen(kw_only=True)
class ModelDescription:
    """What a model's ``config.json`` says, together with the configuration's limits; None: nothing."""

    vocabulary_size: int | None
    max_prompt_tokens: int | None


def read_tasks(config: RunConfig, algorithm: ResolvedAlgorithm) -> Tasks:
    """Open the task files.

    Raises:
        ConfigError: ``config.missing-key``: no file is named.
        DataError: ``data.missing``, ``data.empty`` or ``data.malformed``, with file and line.
    """
    return Tasks(
        train=_load(config, "train", answers=config.mode == "offline"),
        held_out=_load(config, "eval", limit=config.evaluation.tasks) if config.evaluation.every else None,
        expert=_load(config, "expert", answers=True) if algorithm.experts else None,
    )


def read_model(config: RunConfig) -> ModelDescription:
    """Read the ``config.json`` of the model's folder.

    Raises:
        EngineError: ``engine.model``: there is no model in the folder.
        ConfigError: ``config.invalid-value``: prompt and response do not fit together.
    """
    folder = Path(config.model.path)
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"there is no model in the folder {config.model.path!r}",
            code="engine.model",
            where="model.path",
            expected="a Hugging Face folder with config.json, weights and tokenizer",
            found=_why_unreadable(folder, error),
            fix=f"check the path; the working folder is {Path.cwd()}",
        ) from error
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if pickles and not any(folder.glob("*.safetensors")):
        raise EngineError(
            "the model's weights are pickles, which could execute code when they are read",
            code="engine.model",
            where=f"model.path, {folder}",
            expected="safetensors",
            found=", ".join(pickles[:4]),
            fix="load the model in a process that you trust with it, and save_pretrained() it to another folder",
        )
    text: Mapping[str, Any] = {**described, **(described.get("text_config") or {})}
    rotary = text.get("rope_scaling") or text.get("rope_parameters") or {}
    _check_rotary(config, text)
    scaled = rotary.get("rope_type", rotary.get("type", "default")) != "default"
    return ModelDescription(
        vocabulary_size=text.get("vocab_size"),
        max_prompt_tokens=_prompt_limit(config, None if scaled else text.get("max_position_embeddings")),
    )


def _check_rotary(config: RunConfig, text: Mapping[str, Any]) -> None:
    """Refuse samples that cross a length beyond which rotary frequencies are others."""
    room = config.cluster.max_model_len or text.get("max_position_embeddings") or 0
    for kind, limit in length_limits(text).items():
        if config.mode == "online" and room > limit:
            raise ConfigError(
                f"the model's rotary frequencies ({kind}) are others beyond {limit} tokens, and a sample that grows "
                "beyond them while it is generated has log-probs that no training pass computes",
                where="cluster.max_model_len",
                expected=f"at most {limit}",
                found=config.cluster.max_model_len,
                fix=f"set cluster.max_model_len: {limit}",
            )


def check_tokens(config: RunConfig, tasks: Tasks, model: ModelDescription) -> None:
    """Load the tokenizer, and see that it fits the model, that prompts are not too long and that answers render.

    The longest texts of each file are tokenised here; a line of the others that is refused ends the run when it comes.

    Raises:
        DataError: ``data.missing``, ``data.no-chat-template``, ``data.vocabulary``, ``data.prompt-too-long``, or
            what the template refuses, with file and line.
    """
    tokenizer = HuggingFaceChatTokenizer.load(
        config.model.path,
        chat_template=config.data.chat_template,
        trust_remote_code=config.model.trust_remote_code,
    )
    if model.vocabulary_size is not None:
        check_vocabulary(tokenizer, model.vocabulary_size)
    for each in filter(None, (tasks.train, tasks.held_out, tasks.expert)):
        for number in _longest(each):
            encode_prompt(tokenizer, each[number], model.max_prompt_tokens)
            if each.answers:
                encode_answers(tokenizer, each[number])


def _load(config: RunConfig, which: str, *, limit: int | None = None, answers: bool = False) -> TaskSet:
    file: str | None = getattr(config.data, which)
    if file is None:
        raise ConfigError(
            f"no {which} data is given",
            code="config.missing-key",
            where=f"data.{which}",
            expected="the path of a JSONL file",
            found="nothing",
            fix="name a JSONL file",
        )
    return TaskSet.load(file, config.data.format, limit=limit, answers=answers)


def _why_unreadable(folder: Path, error: Exception) -> str:
    if not folder.is_dir():
        return "no such folder"
    return "no config.json" if isinstance(error, FileNotFoundError) else f"config.json: {error}"


def _prompt_limit(config: RunConfig, positions: int | None) -> int | None:
    """The most tokens that a prompt may have: what is configured, or what leaves room for a response."""
    room = config.cluster.max_model_len or positions
    prompt, response = config.data.max_prompt_tokens, config.sampling.max_new_tokens
    if prompt is None:
        return None if room is None else room - 1
    if room is not None and prompt + response > room:
        source = "cluster.max_model_len" if config.cluster.max_model_len else "the model's max_position_embeddings"
        raise ConfigError(
            "the longest prompt and the longest response do not fit together",
            where="data.max_prompt_tokens",
            expected=f"data.max_prompt_tokens + sampling.max_new_tokens of at most {room} tokens ({source})",
            found=f"{prompt} + {response}",
            fix="lower one of them",
        )
    return prompt


def _longest(tasks: TaskSet) -> Sequence[int]:
    """The numbers of the tasks with the longest texts, of those that were checked when the file was opened."""

    def characters(number: int) -> int:
        return sum(len(str(message.get("content"))) for message in tasks[number].messages)

    return heapq.nlargest(_ENCODED_PROMPTS, tasks.checked(), key=characters)
