"""The inputs that a run reads before it starts: tasks, model, tokenizer, other samples.

Errors in them are raised here, before anything is started and before the run's folder is changed. Reading tasks and
the model's description imports neither torch nor transformers, so that most mistakes show quickly.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.compose.checks import refusal
from jackfield.compose.folder import find_queue
from jackfield.config.sections import MixingConfig, RunConfig
from jackfield.data.task_set import TaskSet
from jackfield.data.tokens import HuggingFaceChatTokenizer, check_vocabulary, encode_answers, encode_prompt
from jackfield.errors import ConfigError, EngineError
from jackfield.queue import TransferQueue, Values
from jackfield.queue.importing import ImportedSamples
from jackfield.queue.sample_files import cell_of, read_samples, saved_samples, shape_of
from jackfield.sdk.archive import SavedSample
from jackfield.sdk.rotary import length_limits

#: Weight files that only torch.load (pickle) could read.
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")

_ENCODED_PROMPTS = 64  #: how many of each file's longest texts are tokenised before the run starts


def read_tasks(config: RunConfig, algorithm: ResolvedAlgorithm) -> dict[str, TaskSet]:
    """Open the task files of the run: train, and eval and expert if they are used.

    Raises:
        ConfigError: ``config.missing-key`` if no file is configured.
        DataError: ``data.missing``, ``data.empty`` or ``data.malformed``, with file and line.
    """
    tasks = {}
    for which, wanted in {"train": True, "eval": config.evaluation.every, "expert": algorithm.experts}.items():
        if not wanted:
            continue
        file: str | None = getattr(config.data, which)
        if file is None:
            what, expected = f"no {which} data is given", "the path of a JSONL file"
            raise refusal(config, f"data.{which}", what, expected, "config.missing-key")
        limit = config.evaluation.tasks if which == "eval" else None
        answers = which == "expert" or (which == "train" and config.mode == "offline")
        tasks[which] = TaskSet(file, config.data.format, limit=limit, answers=answers)
    return tasks


def digests(tasks: Mapping[str, TaskSet]) -> dict[str, str]:
    """Return the digests of the files by name in the configuration, for resumed runs."""
    return {which: each.digest for which, each in tasks.items()}


def read_model(config: RunConfig) -> Mapping[str, Any]:
    """Return the text model's part of the ``config.json`` in the model's folder.

    Raises:
        EngineError: ``engine.model`` if the folder holds no model, or its weights are pickles.
    """
    folder = Path(config.model.path)
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what, found = f"there is no model in the folder {config.model.path!r}", "no such folder"
        if folder.is_dir():
            found = "no config.json" if isinstance(error, FileNotFoundError) else f"config.json: {error}"
        expected = "a Hugging Face folder with config.json, weights and tokenizer"
        fix = f"check the path; the working folder is {Path.cwd()}"
        raise _no_model(what, "model.path", expected, found, fix) from error
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if pickles and not any(folder.glob("*.safetensors")):
        what = "the model's weights are pickles, which could execute code when they are read"
        fix = "load the model in a process that you trust with it, and save_pretrained() it to another folder"
        raise _no_model(what, f"model.path, {folder}", "safetensors", ", ".join(pickles[:4]), fix)
    return {**described, **(described.get("text_config") or {})}


def _no_model(what: str, where: str, expected: str, found: str, fix: str) -> EngineError:
    return EngineError(what, code="engine.model", where=where, expected=expected, found=found, fix=fix)


def prompt_limit(config: RunConfig) -> int | None:
    """Return a prompt's maximum length in tokens, configured or leaving room for a response.

    Raises:
        EngineError: See :func:`read_model`.
        ConfigError: If prompt and response do not fit together, or samples could cross a length beyond which the
            model uses other rotary frequencies.
    """
    model, given = read_model(config), config.cluster.max_model_len
    positions = model.get("max_position_embeddings")
    for kind, limit in length_limits(model).items() if config.mode == "online" else ():
        if (given or positions or 0) > limit:
            what = f"a sample that grows beyond {limit} tokens while it is generated has log-probs that no training "
            what += f"pass computes: the model's rotary frequencies ({kind}) are others there"
            raise refusal(config, "cluster.max_model_len", what, f"at most {limit}")
    rotary = model.get("rope_scaling") or model.get("rope_parameters") or {}
    scaled = rotary.get("rope_type", rotary.get("type", "default")) != "default"
    room = given or (None if scaled else positions)
    prompt, response = config.data.max_prompt_tokens, config.sampling.max_new_tokens
    if prompt is None:
        return None if room is None else room - 1
    if room is not None and prompt + response > room:
        what, fix = "the longest prompt and the longest response do not fit together", "lower one of them"
        source = "cluster.max_model_len" if given else "the model's max_position_embeddings"
        expected = f"data.max_prompt_tokens + sampling.max_new_tokens of at most {room} tokens ({source})"
        found = f"{prompt} + {response}"
        raise ConfigError(what, where="data.max_prompt_tokens", expected=expected, found=found, fix=fix)
    return prompt


def load_tokenizer(config: RunConfig) -> HuggingFaceChatTokenizer:
    """Load the tokenizer of the model, with the configured chat template."""
    template, trusted = config.data.chat_template, config.model.trust_remote_code
    return HuggingFaceChatTokenizer.load(config.model.path, chat_template=template, trust_remote_code=trusted)


def check_tokens(config: RunConfig, tasks: Mapping[str, TaskSet]) -> None:
    """Check that the tokenizer fits the model, prompts are short enough and answers render.

    Only the longest of the texts that were checked on opening a file are tokenised here. If another line is wrong, the
    run fails when it gets there.

    Raises:
        DataError: ``data.missing``, ``data.no-chat-template``, ``data.vocabulary``, ``data.prompt-too-long``, or an
            error of the template, with file and line.
    """
    tokenizer, limit, vocabulary = load_tokenizer(config), prompt_limit(config), read_model(config).get("vocab_size")
    if vocabulary is not None:
        check_vocabulary(tokenizer, vocabulary)
    for each in tasks.values():
        found = (each[number] for number in each.checked)
        for task in heapq.nlargest(_ENCODED_PROMPTS, found, key=lambda task: len(str(task.messages))):
            encode_prompt(tokenizer, task, limit)
            if each.answers:
                encode_answers(tokenizer, task)


def check_samplers(settings: MixingConfig) -> None:
    """Check the samplers of the mixing settings by making them.

    Raises:
        QueueError: If a sampler is unknown.
        ConfigError: If a sampler does not have one of its options.
    """
    for name, mixed in attrs.asdict(settings, recurse=False).items():
        if mixed is not None:
            mixed.sampler.make(f"mixing.{name}.sampler.options")


def check_rows(config: RunConfig) -> None:
    """Check the first sample of each mixed-in file; online, human ones need a reward.

    Raises:
        ConfigError: If a file is empty, or its first sample lacks something that every sample needs.
        QueueError: If a file is not a file of samples.
    """
    for name, file in _files(config.mixing).items():
        needed = ["prompt_ids", "response_ids"]
        if name == "human" and config.mode == "online":
            needed += ["reward", "rollout_log_probs"]
        first = next(_read(file), None)
        if first is None or not first.cells.keys() >= set(needed):
            where, expected = f"mixing.{name}.samples", f"rows with the columns {', '.join(needed)} at least"
            found = file if first is None else ", ".join(sorted(first.cells)) or "no columns"
            raise ConfigError("there are no samples in it", where=where, expected=expected, found=found)


def mixed_samples(settings: MixingConfig, queue: TransferQueue, values: Values) -> list[ImportedSamples]:
    """Return the imports of mixed-in samples, for a new run's start and after losses."""
    return [
        ImportedSamples(queue, values, name, partial(_read, file), file, partial(_completed, expert=name == "expert"))
        for name, file in _files(settings).items()
    ]


def _files(settings: MixingConfig) -> dict[str, str]:
    """Return the files that are mixed in, by partition."""
    return {name: mixed.samples for name in ("expert", "human") if (mixed := getattr(settings, name)) is not None}


def _read(file: str) -> Iterator[SavedSample]:
    path = Path(file)
    if path.is_dir():
        return (sample for sample in saved_samples(find_queue(path)) if sample.batch is not None)
    return read_samples(path)


def _completed(row: SavedSample, *, expert: bool) -> SavedSample:
    """Add the tags that a run needs, and the columns that an expert does not write.

    Weight versions are removed, because those of other runs mean nothing here.
    """
    cells, length = dict(row.cells), shape_of(row.cells["response_ids"])[0]
    cells.setdefault("response_mask", cell_of("response_mask", [True] * length))
    if expert:
        cells.setdefault("rollout_log_probs", cell_of("rollout_log_probs", [0.0] * length))
        cells.setdefault("reward", cell_of("reward", 0.0))
    counts = {
        "prompt_tokens": shape_of(row.cells["prompt_ids"])[0],
        "response_tokens": length,
        "model_tokens": sum(bytes(cells["response_mask"][1])),
    }
    kept = {name: value for name, value in row.tags.items() if not name.startswith("weight_version_")}
    return attrs.evolve(row, cells=cells, tags={**kept, **counts, **({"expert": True} if expert else {})})
