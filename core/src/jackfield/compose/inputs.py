"""What a run reads before it begins: tasks, the model's description, the tokenizer.

Whatever is wrong with them is refused here, before anything is started and before the run's folder is touched.
Reading tasks and the model's description loads neither torch nor transformers, so that most mistakes show at once.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.config import RunConfig
from jackfield.data.tasks import Task, TaskSet
from jackfield.data.tokens import HuggingFaceChatTokenizer, check_vocabulary, encode_answers, encode_prompt
from jackfield.errors import ConfigError, EngineError
from jackfield.sdk.rotary import length_limits

#: Files of weights that torch.load would read.
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")

_ENCODED_PROMPTS = 64  #: of each file, its longest texts: so many are tokenised before the run begins


def read_tasks(config: RunConfig, algorithm: ResolvedAlgorithm) -> dict[str, TaskSet]:
    """Open the task files that the run reads: train, and eval and expert where it has a use for them.

    Raises:
        ConfigError: ``config.missing-key``: no file is named.
        DataError: ``data.missing``, ``data.empty`` or ``data.malformed``, with file and line.
    """
    tasks = {}
    for which, wanted in {"train": True, "eval": config.evaluation.every, "expert": algorithm.experts}.items():
        if not wanted:
            continue
        file: str | None = getattr(config.data, which)
        if file is None:
            message, where = f"no {which} data is given", f"data.{which}"
            raise ConfigError(message, code="config.missing-key", where=where, expected="the path of a JSONL file")
        limit = config.evaluation.tasks if which == "eval" else None
        answers = which == "expert" or (which == "train" and config.mode == "offline")
        tasks[which] = TaskSet(file, config.data.format, limit=limit, answers=answers)
    return tasks


def digests(tasks: Mapping[str, TaskSet]) -> dict[str, str]:
    """Return the digest of each file's contents, by its name in the configuration: a resumed run compares them."""
    return {which: each.digest for which, each in tasks.items()}


@attrs.frozen(kw_only=True)
class ModelDescription:
    """What a model's ``config.json`` says, together with the configuration's limits; None: nothing."""

    vocabulary_size: int | None
    max_prompt_tokens: int | None


def read_model(config: RunConfig) -> ModelDescription:
    """Read the ``config.json`` of the model's folder.

    Raises:
        EngineError: ``engine.model``: there is no model in the folder, or its weights are pickles.
        ConfigError: ``config.invalid-value``: prompt and response do not fit together, or samples would cross a length
            beyond which rotary frequencies are others.
    """
    folder = Path(config.model.path)
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = "no config.json" if isinstance(error, FileNotFoundError) else f"config.json: {error}"
        raise EngineError(
            f"there is no model in the folder {config.model.path!r}",
            code="engine.model",
            where="model.path",
            expected="a Hugging Face folder with config.json, weights and tokenizer",
            found=found if folder.is_dir() else "no such folder",
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
    return ModelDescription(vocabulary_size=text.get("vocab_size"), max_prompt_tokens=_prompt_limit(config, text))


def _prompt_limit(config: RunConfig, text: Mapping[str, Any]) -> int | None:
    """The most tokens that a prompt may have: what is configured, or what leaves room for a response."""
    given, positions = config.cluster.max_model_len, text.get("max_position_embeddings")
    for kind, limit in length_limits(text).items() if config.mode == "online" else ():
        if (given or positions or 0) > limit:
            raise ConfigError(
                f"the model's rotary frequencies ({kind}) are others beyond {limit} tokens, and a sample that grows "
                "beyond them while it is generated has log-probs that no training pass computes",
                where="cluster.max_model_len",
                expected=f"at most {limit}",
                found=given,
            )
    rotary = text.get("rope_scaling") or text.get("rope_parameters") or {}
    scaled = rotary.get("rope_type", rotary.get("type", "default")) != "default"
    room = given or (None if scaled else positions)
    prompt, response = config.data.max_prompt_tokens, config.sampling.max_new_tokens
    if prompt is None:
        return None if room is None else room - 1
    if room is not None and prompt + response > room:
        source = "cluster.max_model_len" if given else "the model's max_position_embeddings"
        raise ConfigError(
            "the longest prompt and the longest response do not fit together",
            where="data.max_prompt_tokens",
            expected=f"data.max_prompt_tokens + sampling.max_new_tokens of at most {room} tokens ({source})",
            found=f"{prompt} + {response}",
            fix="lower one of them",
        )
    return prompt


def load_tokenizer(config: RunConfig) -> HuggingFaceChatTokenizer:
    """Load the tokenizer of the model, with the configured chat template."""
    template, trusted = config.data.chat_template, config.model.trust_remote_code
    return HuggingFaceChatTokenizer.load(config.model.path, chat_template=template, trust_remote_code=trusted)


def check_tokens(config: RunConfig, tasks: Mapping[str, TaskSet]) -> None:
    """Load the tokenizer, and see that it fits the model, that prompts are not too long and that answers render.

    The longest texts of each file, of those that were checked when it was opened, are tokenised here; a line of the
    others that is refused ends the run when it comes.

    Raises:
        DataError: ``data.missing``, ``data.no-chat-template``, ``data.vocabulary``, ``data.prompt-too-long``, or
            what the template refuses, with file and line.
    """
    tokenizer, model = load_tokenizer(config), read_model(config)
    if model.vocabulary_size is not None:
        check_vocabulary(tokenizer, model.vocabulary_size)
    for each in tasks.values():
        found = (each[number] for number in each.checked)
        for task in heapq.nlargest(_ENCODED_PROMPTS, found, key=_characters):
            encode_prompt(tokenizer, task, model.max_prompt_tokens)
            if each.answers:
                encode_answers(tokenizer, task)


def _characters(task: Task) -> int:
    return sum(len(str(message.get("content"))) for message in task.messages)
