"""What a run reads before it begins: tasks, the model's description, the tokenizer, samples that are mixed in.

Whatever is wrong with them is refused here, before anything is started and before the run's folder is touched.
Reading tasks and the model's description loads neither torch nor transformers, so that most mistakes show at once.
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
from jackfield.sdk.arrow import SavedSample
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
            what, expected = f"no {which} data is given", "the path of a JSONL file"
            raise refusal(config, f"data.{which}", what, expected, "config.missing-key")
        limit = config.evaluation.tasks if which == "eval" else None
        answers = which == "expert" or (which == "train" and config.mode == "offline")
        tasks[which] = TaskSet(file, config.data.format, limit=limit, answers=answers)
    return tasks


def digests(tasks: Mapping[str, TaskSet]) -> dict[str, str]:
    """Return the digest of each file's contents, by its name in the configuration: a resumed run compares them."""
    return {which: each.digest for which, each in tasks.items()}


def read_model(config: RunConfig) -> Mapping[str, Any]:
    """Read the ``config.json`` of the model's folder: what it says of the text model.

    Raises:
        EngineError: ``engine.model``: there is no model in the folder, or its weights are pickles.
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
    """Return the most tokens that a prompt may have: what is configured, or what leaves room for a response.

    Raises:
        EngineError: as :func:`read_model`.
        ConfigError: prompt and response do not fit together, or samples would cross a length beyond which rotary
            frequencies are others.
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
    """Load the tokenizer, and see that it fits the model, that prompts are not too long and that answers render.

    The longest texts of each file, of those that were checked when it was opened, are tokenised here; a line of the
    others that is refused ends the run when it comes.

    Raises:
        DataError: ``data.missing``, ``data.no-chat-template``, ``data.vocabulary``, ``data.prompt-too-long``, or
            what the template refuses, with file and line.
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
    """Make each sampler of what is mixed in.

    Raises:
        QueueError: an unknown sampler.
        ConfigError: options that a sampler does not have.
    """
    for name, mixed in attrs.asdict(settings, recurse=False).items():
        if mixed is not None:
            mixed.sampler.make(f"mixing.{name}.sampler.options")


def check_rows(config: RunConfig) -> None:
    """Look at the first row of each file that is mixed in; those from elsewhere need rewards where the run has them.

    Raises:
        ConfigError: there is no row, or it lacks what every row needs.
        QueueError: it is no file of rows.
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
    """List what fills the partitions that are mixed in: before the first step of a new run, and again where lost."""
    return [
        ImportedSamples(queue, values, name, partial(_read, file), file, partial(_completed, expert=name == "expert"))
        for name, file in _files(settings).items()
    ]


def _files(settings: MixingConfig) -> dict[str, str]:
    """Return the files that are mixed in, by their partitions."""
    return {name: mixed.samples for name in ("expert", "human") if (mixed := getattr(settings, name)) is not None}


def _read(file: str) -> Iterator[SavedSample]:
    path = Path(file)
    if path.is_dir():
        return (sample for sample in saved_samples(find_queue(path)) if sample.batch is not None)
    return read_samples(path)


def _completed(row: SavedSample, *, expert: bool) -> SavedSample:
    """Add the tags that a run counts by, and to an expert's row the columns that an expert does not write.

    Versions of other runs' weights say nothing here.
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
