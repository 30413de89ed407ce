"""A run of GRPO for an architecture: a tiny random model, the engine ``fsdp`` and the server ``transformers``."""

from __future__ import annotations

import ast
import json
import logging
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from jackfield_architectures import VISION_LANGUAGE, make_model, save_model

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
#: Results of runs by name, which are data of a package, so that an engine's refusal can name who has an architecture.
RESULTS = ROOT / "plugins/libraries/huggingface/src/jackfield_huggingface/architectures.json"
STEPS = 3
TOLERANCE = 1e-3  #: of log-probs between server and engine, in float32
_PLACEHOLDER = 90  #: of an image
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Result = dict[str, Any]


def score(solution_str: str, response_ids: Sequence[int]) -> float:
    """Return a reward that differs between answers of a random model: the share of odd tokens."""
    return sum(token % 2 for token in response_ids) / max(1, len(response_ids))


def run_architecture(name: str, made: Path, folder: Path, *, replays: bool = True) -> Result:
    """Train and serve ``name`` for three steps; ``made`` has the quickstart's files.

    Without ``replays``, router replay is not run. The result says whether it was trained and served
    (True, or the reason of a refusal), how far the log-probs of server and engine are apart at most, how far training
    moved the model's log-probs, and what both chose.
    """
    model = folder / "model"
    save_model(name, model)
    for file in _TOKENIZER:
        if (made / "model" / file).is_file():
            shutil.copyfile(made / "model" / file, model / file)
    found = _facts(name, model)
    heard = _Heard()
    logger, level = logging.getLogger("jackfield"), logging.getLogger("jackfield").level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        found |= _outcome(model, made, folder / "run")
        if found["served"] is True and found["router_replay"] and replays:
            replay = _outcome(model, made, folder / "replayed", "model.router_replay=true", "schedule.steps=1")
            found["router_replay"] = replay["served"]
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    found["attention"] = "eager" if heard.said("attention of") else "sdpa"
    found["cache"] = "rows" if heard.said("computed one after another") else "batch"
    found["packed"] = found["trained"] is True and not heard.said("takes no packed tokens") and not found.pop("bends")
    found.pop("bends", None)
    return found


class _Heard(logging.Handler):
    """Keeps what the packages log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def said(self, words: str) -> bool:
        """Return whether a line has these words."""
        return any(words in line for line in self._lines)


def takes_images(name: str) -> bool:
    """Return whether prompts may have images, where the placeholder is a token of the tiny vocabulary."""
    from jackfield_huggingface.images import ImageInputs

    return name in VISION_LANGUAGE and ImageInputs.of(make_model(name, image_token_id=_PLACEHOLDER)) is not None


def _facts(name: str, model: Path) -> Result:
    """Return what the library says about a model."""
    from jackfield.sdk.jagged import length_limits
    from jackfield_huggingface.names import auto_class
    from jackfield_huggingface.routers import Routers

    module = auto_class(model, False).from_pretrained(model).eval()
    text = module.config.get_text_config()
    plan = getattr(module, "_tp_plan", None) or {}
    return {
        "model_type": module.config.model_type,
        "router_replay": Routers.of(module) is not None,
        "images": takes_images(name),
        "tensor_parallel": any("layers" in pattern for pattern in plan),
        "bends": bool(length_limits(text.to_dict())),
    }


def _outcome(model: Path, made: Path, folder: Path, *settings: str) -> Result:
    """Return what three steps gave."""
    from jackfield.errors import EngineError, JackfieldError

    try:
        result, lines = _run(model, made, folder, *settings)
    except JackfieldError as error:
        if error.code.startswith("config."):  # a mistake here
            raise
        short = _short(error, model)
        return {
            "trained": short if isinstance(error, EngineError) else _trained_alone(model),
            "served": "not tried: the run ends before" if isinstance(error, EngineError) else short,
        }
    steps = [line for line in lines if "log_prob_check/rollout/max" in line]
    return {
        "trained": True,
        "served": True,
        "steps": len(steps),
        "updates": sum(line["kind"] == "weights" for line in lines),
        "difference": _difference(steps),
        "gradient": float(f"{min(line['grad_norm'] for line in steps):.2g}"),
        "moved": float(f"{_moved(model, result / 'model'):.2g}"),
    }


def _difference(steps: Sequence[Result]) -> float:
    """Return the largest difference between log-probabilities of server and engine."""
    apart = ("log_prob_check/rollout/max", "log_prob_check/replica/mean")
    return float(f"{max(line[name] for line in steps for name in apart if name in line):.2g}")


def _run(model: Path, made: Path, folder: Path, *settings: str) -> tuple[Path, list[Result]]:
    """Run three steps; return the run's folder and its metrics."""
    from jackfield.compose import run
    from jackfield.config import load_config

    overrides = [
        f"folder={folder}",
        f"model.path={model}",
        f"data.train={made / 'problems.jsonl'}",
        "data.groups_per_batch=2",
        "data.rollouts_per_group=4",
        "sampling.max_new_tokens=24",
        "sampling.ignore_eos=true",
        f"schedule.steps={STEPS}",
        "evaluation.every=0",
        "observe={progress: false, curve: false, report_to: []}",
        "log_prob_check.every=1",
        "cluster.threads=1",
        "optimizer={lr: 1e-2, warmup_steps: 0, scheduler: constant}",
        f"reward={{name: function, path: '{Path(__file__)}:score'}}",
        *settings,
    ]
    result = run(load_config(QUICKSTART / "grpo.yaml", overrides))
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return result.folder, lines


def _short(error: Exception, model: Path) -> str:
    """Return a refusal on one line, without what to do about it."""
    lines = (line.strip() for line in str(error).splitlines() if not line.strip().startswith("fix:"))
    return " ".join(lines).replace(str(model), "FOLDER").replace("|", "/")[:300]


def accepted(name: str, folder: Path) -> Result:
    """Return whether the engine takes a model with an adapter, and others take it at all; else why not.

    Engines say so by their own checks, servers by their lists of classes.

    A server whose interpreter is not here (``make interpreters``) has no entry.
    """
    from jackfield.abc.engine import LoraSpec, ModelSpec
    from jackfield.errors import JackfieldError
    from jackfield_engine_megatron.architecture import read_architecture

    save_model(name, folder)
    described = json.loads((folder / "config.json").read_text())
    found: Result = {"lora": _trained_alone(folder, lora=LoraSpec(rank=4)), "megatron": True}
    try:
        read_architecture(ModelSpec(path=str(folder)))
    except JackfieldError as error:
        found["megatron"] = f"{error.message}: {error.found}"[:200]
    veomni = _constant(ROOT / "plugins/engines/veomni/src/jackfield_engine_veomni/model.py", "ARCHITECTURES")
    taken = described["model_type"] in veomni and name not in VARIANTS_BY_LENGTH
    found["veomni"] = (
        taken or f"it trains {', '.join(veomni)}, with rotary frequencies that do not depend on the length"
    )
    for server, classes in served_classes().items():
        found[server] = described["architectures"][0] in classes
    return found


#: Variants whose rotary frequencies depend on the length.
VARIANTS_BY_LENGTH = ("phi3 with longrope", "qwen3 with dynamic rope")


def _constant(file: Path, name: str) -> Any:
    """Return a constant of a module whose imports are not installed here."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{file} has no constant {name}")


@cache
def served_classes() -> dict[str, frozenset[str]]:
    """Return the models' classes that vLLM and SGLang list, by server, where their interpreters are."""
    from jackfield_testing import sglang_python, vllm_python

    script = "from vllm.model_executor.models.registry import ModelRegistry as R; print(*R.get_supported_archs())"
    found = {}
    if (python := vllm_python()) is not None:
        done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True, timeout=200)
        found["vllm"] = frozenset(done.stdout.splitlines()[-1].split())
    if (python := sglang_python()) is not None:
        (models,) = python.parents[1].glob("lib/python3*/site-packages/sglang/srt/models")
        lines = [line for file in models.glob("*.py") for line in _entries(file)]
        found["sglang"] = frozenset(lines)
    return found


def _entries(file: Path) -> list[str]:
    """Return the classes that a module of SGLang's models offers."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "EntryClass":
            return [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
    return []


def split_rows(names: Sequence[str], folder: Path) -> Result:
    """Return by name whether the engine ``fsdp`` splits a model's rows over two ranks, else why not.

    The engine compares one split pass with a whole one before it takes a model.
    """
    for number, name in enumerate(names):
        save_model(name, folder / str(number))
    torch.multiprocessing.spawn(_split, args=(len(names), folder), nprocs=2)
    return {name: json.loads((folder / f"{number}.json").read_text()) for number, name in enumerate(names)}


def _split(rank: int, count: int, folder: Path) -> None:
    """Build the engine for each model as one of two ranks; rank 0 writes what came of it."""
    from jackfield.abc.engine import EngineContext, ModelSpec
    from jackfield.errors import JackfieldError
    from jackfield.plugins import discover

    torch.set_num_threads(1)
    plugin = discover().load("engine", "fsdp")
    for number in range(count):
        model = ModelSpec(path=str(folder / str(number)))
        outcome: bool | str = True
        place: Any = {"rank": rank, "world_size": 2, "init_method": f"file://{folder}/{number}.store"}
        engine: Any = plugin.build({"sequence_parallel": 2}, EngineContext(role="actor", model=model, **place))
        try:
            engine.initialize()
        except JackfieldError as error:
            outcome = f"{error.message}: {error.found}"[:200]
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        finally:
            engine.close()
        if rank == 0:
            (folder / f"{number}.json").write_text(json.dumps(outcome))


def _trained_alone(model: Path, **settings: Any) -> bool | str:
    """Return whether the engine loads a model that the server refused, or with an adapter, else why not."""
    from jackfield.abc.engine import EngineContext, ModelSpec
    from jackfield.errors import JackfieldError
    from jackfield.plugins import discover

    context = EngineContext(role="actor", model=ModelSpec(path=str(model), **settings))
    engine: Any = discover().load("engine", "fsdp").build({}, context)
    try:
        engine.initialize()
    except JackfieldError as error:
        return _short(error, model)
    finally:
        engine.close()
    return True


def _moved(first: Path, last: Path) -> float:
    """Return the largest difference between two models' log-probs of some tokens."""
    from jackfield_huggingface.names import auto_class

    ids = torch.arange(2, 26)[None]
    found = []
    with torch.no_grad():
        for folder in (first, last):
            module = auto_class(folder, False).from_pretrained(folder, dtype=torch.float32).eval()
            found.append(module(input_ids=ids, use_cache=False).logits.log_softmax(-1).gather(2, ids[..., None]))
    return float((found[0] - found[1]).abs().max())


def runs(result: Result) -> bool:
    """Return whether an architecture was trained and served, and what was served is what was trained."""
    if result["trained"] is not True or result["served"] is not True:
        return False
    near, changed = result["difference"] <= TOLERANCE, result["moved"] > 100 * max(result["difference"], 1e-6)
    return bool(result["steps"] == result["updates"] == STEPS and near and changed)
