"""Each algorithm makes the quickstart's model better, and nothing else does: not with a learning rate of 0, and not
with its sign turned.

The model is the quickstart's, after a short warm-up on its demonstrations. The task is a small one: to subtract, which
the warmed-up model does in about a quarter of its answers. Supervised fine-tuning starts from the model that knows
nothing; preferences are of the same answers, a subtraction over an addition.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from jackfield.algorithms import Part, algorithm, part, registry
from jackfield.compose import RunResult, run
from jackfield.config import load_config
from jackfield.data.tokens import HuggingFaceChatTokenizer

from .conftest import QUICKSTART, metrics

pytestmark = pytest.mark.timeout(240)  # the first one makes the model and warms it up

QUIET = (
    "evaluation.every=0",
    "observe.progress=false",
    "observe.curve=false",
    "observe.report_to=[]",
    "observe.samples_per_step=0",
    "cluster.threads=1",
)
#: 1 where the answer subtracts
SUBTRACTS = "reward={name: rules, method: regex, pattern: null, ground_truth_pattern: null, expected: '.*-.*'}"

#: Settings beside the name, by bundle.
EXPLORING: dict[str, tuple[str, ...]] = {
    "ppo": ("critic.optimizer.lr=3e-3", "critic.warmup_steps=1", "schedule.steps=8"),
    "grpo": (),
    "dr_grpo": (),
    "dapo": ("schedule.max_retries=2",),
    "rloo": (),
    "reinforce_plus_plus": (),
    "gspo": (),
    "cispo": (),
    "opmd": (),
    "opmd_kimi": (),
    "opmd_pairwise": (),
    "mix": ("data.expert={folder}/subtractions.jsonl", "data.expert_samples_per_batch=4"),
}
OFFLINE = ("sft", "dpo")


@pytest.fixture(scope="module")
def warm(made: Path) -> Path:
    """The quickstart's model after some of its warm-up, and an expert's answers and preferences beside it."""
    folder = made / "warm"
    run(
        load_config(
            QUICKSTART / "warmup.yaml",
            [
                f"folder={folder}",
                f"model.path={made / 'model'}",
                f"data.train={made / 'demonstrations.jsonl'}",
                "data.groups_per_batch=32",
                "schedule.steps=60",
                "optimizer.total_steps=60",
                "optimizer.warmup_steps=5",
                "optimizer.lr=2.0e-3",
                *QUIET,
            ],
        )
    )
    records = [json.loads(line) for line in (made / "demonstrations.jsonl").read_text().splitlines()]
    pairs = [{**record, **preference(record["answer"])} for record in records]
    write(folder / "subtractions.jsonl", [{**pair, "answer": pair["better"]} for pair in pairs[:400]])
    write(folder / "pairs.jsonl", pairs[400:1000])
    write(folder / "held_out_pairs.jsonl", pairs[1000:1100])
    return folder


def preference(answer: str) -> dict[str, str]:
    """A subtraction and an addition of an answer's numbers."""
    first, second = (int(number) for number in re.findall(r"\d+", answer)[:2])
    return {
        "better": f"{first} - {second}\n#### {first - second}",
        "worse": f"{first} + {second}\n#### {first + second}",
    }


def write(file: Path, records: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module", autouse=True)
def negated() -> Iterator[None]:
    """Every estimator and loss of this module once more, with its sign turned: ``negated_NAME``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_PARTS", dict(registry._PARTS))
        for name in EXPLORING:
            estimator = part("advantages", algorithm(name).advantages or "")
            turned(estimator, _negative)
        for name in OFFLINE:
            turned(part("loss", name), lambda result: (_negative_terms(result[0]), result[1]))
        yield


def turned(original: Part, change: Callable[[Any], Any]) -> None:
    @functools.wraps(original.function)
    def function(*arguments: Any, **keywords: Any) -> Any:
        return change(original.function(*arguments, **keywords))

    changed = attrs.evolve(original, name=f"negated_{original.name}", function=function)
    registry._PARTS[changed.kind, changed.name] = changed
    if original.preparation is not None:
        registry._PARTS["preparation", changed.name] = original.preparation


def _negative(estimate: Any) -> Any:
    """Negate advantages, and returns where there are such."""
    return tuple(-each for each in estimate) if isinstance(estimate, tuple) else -estimate


def _negative_terms(values: Any) -> Any:
    if isinstance(values, tuple):
        return tuple(attrs.evolve(term, weight=-term.weight) for term in values)
    return -values


Improves = Callable[..., bool]


@pytest.fixture
def improves(warm: Path, made: Path, tmp_path: Path) -> Improves:
    """``improves(name, learning_rate=…, negate=…)``: whether a short run makes the model better."""

    def do(name: str, *, learning_rate: float = 1e-3, negate: bool = False) -> bool:
        if name in OFFLINE:
            settings = [f"algorithm.loss={{name: negated_{name}}}"] if negate else []
            measure = likelier if name == "sft" else prefers
            return measure(warm, made, tmp_path, [*settings, f"optimizer.lr={learning_rate}"])
        bundle = algorithm(name)
        options = json.dumps(dict(bundle.advantages_options))
        other = [f"algorithm.advantages={{name: negated_{bundle.advantages}, options: {options}}}"] if negate else []
        given = [setting.format(folder=warm) for setting in EXPLORING[name]]
        return rewards_rise(name, warm, made, tmp_path, [*given, *other, f"optimizer.lr={learning_rate}"])

    return do


def rewards_rise(name: str, warm: Path, made: Path, folder: Path, settings: list[str]) -> bool:
    """Whether sampled answers subtract far more often at the end than at the beginning.

    A mean of 64 answers has a standard deviation of 0.06 at most: 0.3 is no accident.
    """
    result = run(
        load_config(
            QUICKSTART / "grpo.yaml",
            [
                f"folder={folder}",
                f"model.path={warm / 'model'}",
                f"data.train={made / 'problems.jsonl'}",
                "data.groups_per_batch=8",
                "data.rollouts_per_group=8",
                "sampling.max_new_tokens=4",
                "schedule.steps=5",
                "optimizer.warmup_steps=0",
                "optimizer.scheduler=constant",
                f"algorithm.name={name}",
                SUBTRACTS,
                *QUIET,
                *settings,
            ],
        )
    )
    rewards = [line["reward/mean"] for line in metrics(result.folder) if line["kind"] == "step"]
    return sum(rewards[-2:]) / 2 > rewards[0] + 0.3


def offline(warm: Path, model: Path, data: Path, folder: Path, settings: list[str]) -> RunResult:
    quickstart = [f"folder={folder}", f"model.path={model}", f"data.train={data}", "data.groups_per_batch=16"]
    constant = ["schedule.steps=8", "optimizer.warmup_steps=0", "optimizer.scheduler=constant", "optimizer.lr=2.0e-3"]
    return run(load_config(QUICKSTART / "warmup.yaml", [*quickstart, *constant, *QUIET, *settings]))


def likelier(warm: Path, made: Path, folder: Path, settings: list[str]) -> bool:
    """Whether answers that the run has not seen have become likelier, by a nat per token at least."""
    result = offline(warm, made / "model", made / "demonstrations.jsonl", folder, settings)
    problems = [json.loads(line) for line in (made / "held_out.jsonl").read_text().splitlines()[:64]]
    asked = [(problem["question"], problem["answer"]) for problem in problems]
    before, after = (log_likelihoods(model, asked, mean=True) for model in (made / "model", result.model))
    return bool((after - before).mean() > 1.0)


def prefers(warm: Path, made: Path, folder: Path, settings: list[str]) -> bool:
    """Whether four in five answers that are better have gained more than the worse ones, on pairs not seen."""
    given = ["algorithm.name=dpo", "data.format.response_key=better", "data.format.rejected_key=worse"]
    result = offline(warm, warm / "model", warm / "pairs.jsonl", folder, [*given, *settings])
    pairs = [json.loads(line) for line in (warm / "held_out_pairs.jsonl").read_text().splitlines()]
    gains = []
    for kind in ("better", "worse"):
        asked = [(pair["question"], pair[kind]) for pair in pairs]
        gains.append(log_likelihoods(result.model, asked) - log_likelihoods(warm / "model", asked))
    return bool((gains[0] > gains[1]).double().mean() > 0.8)


def log_likelihoods(model: Path, asked: list[tuple[str, str]], *, mean: bool = False) -> torch.Tensor:
    """log p(answer | question) by a plain forward pass of transformers, ``[N]``; or its mean over tokens."""
    from transformers import AutoModelForCausalLM

    tokenizer = HuggingFaceChatTokenizer.load(model)
    network = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).eval()
    found = []
    for question, answer in asked:
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        response = tokenizer.encode_response(answer)
        with torch.no_grad():
            logits = network(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1)[range(len(response)), list(response)]
        found.append(chosen.mean() if mean else chosen.sum())
    return torch.stack(found)


@pytest.mark.parametrize("name", [*EXPLORING, *OFFLINE])
def test_it_makes_the_model_better(improves: Improves, name: str) -> None:
    assert improves(name)


#: Controls, which show that the test above can fail: one of each kind in CI, all of them in the night.
CONTROLS = [
    name if name in ("ppo", "grpo", *OFFLINE) else pytest.param(name, marks=pytest.mark.nightly)
    for name in (*EXPLORING, *OFFLINE)
]


@pytest.mark.parametrize("name", CONTROLS)
def test_nothing_gets_better_by_itself(improves: Improves, name: str) -> None:
    """The same at a learning rate of 0."""
    assert not improves(name, learning_rate=0.0)


@pytest.mark.parametrize("name", CONTROLS)
def test_the_wrong_sign_makes_nothing_better(improves: Improves, name: str) -> None:
    """The same with advantages (of sft and dpo: the loss) negated."""
    assert not improves(name, negate=True)
