"""Dropout: off whatever a model's config names, on in training passes alone where ``model.dropout`` asks for it.

A tiny GPT-2 whose ``config.json`` names dropout of 0.5 is trained by GRPO, DPO and SFT, with ``model.dropout`` and
without.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield_architectures import save_model
from jackfield_commands import CommandServer

pytestmark = [pytest.mark.timeout(240), pytest.mark.needs("module:jackfield_engine_fsdp")]

QUIET = ("cluster.threads=1", "evaluation.every=0", "observe={progress: false, curve: false, report_to: []}")
CHECK = "log_prob_check"
Line = dict[str, Any]


@pytest.fixture(scope="module")
def model(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's tokenizer, and a model that drops half of everything where its config is obeyed."""
    folder = tmp_path_factory.mktemp("gpt2")
    save_model("gpt2", folder, attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (made / "model" / file).is_file():
            shutil.copy(made / "model" / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def offline(made: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of a run over eight pairs of answers."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    records = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}", "worse": f"#### {n}"} for n in range(8)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ("mode=offline", f"data.train={file}", "data.groups_per_batch=8", "data.rollouts_per_group=1")


@pytest.fixture(scope="module")
def first_steps(
    jackfield: CommandServer,
    made: Path,
    model: Path,
    offline: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, float | None], Line]:
    """``first_steps("grpo", 0.1)``: the metrics of a run's only step; None: dropout is not set."""
    settings = {
        "grpo": (
            f"data.train={made / 'problems.jsonl'}", "data.groups_per_batch=4", "data.rollouts_per_group=4",
            "sampling.max_new_tokens=6", "algorithm.kl.coefficient=0.01", "reward.method=regex",
            "reward.pattern=null", "reward.ground_truth_pattern=null", "reward.expected='.*[0-4].*'",
        ),
        "dpo": (*offline, "algorithm={name: dpo}", "data.format={response_key: answer, rejected_key: worse}"),
        "sft": (*offline, "algorithm={name: sft}"),
    }  # fmt: skip

    def do(name: str, dropout: float | None) -> Line:
        folder = tmp_path_factory.mktemp(name)
        file = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "grpo.yaml"
        asked = () if dropout is None else (f"model.dropout={dropout}",)
        done = jackfield(
            "run", str(file), f"folder={folder / 'run'}", f"model.path={model}", "schedule.steps=1",
            *QUIET, *settings[name], *asked,
        )  # fmt: skip
        assert 0 == done.code, done.error
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        [step] = [line for line in lines if line["kind"] == "step"]
        return step

    return do


@pytest.mark.parametrize("name", ["grpo", "dpo", "sft"])
def test_dropout_is_what_the_setting_says(name: str, first_steps: Callable[[str, float | None], Line]) -> None:
    """Without the setting a training pass is an inference pass, to the bit; with it the pass that is trained on drops,
    and nothing else does: the rollout's, old and reference log-probs are those of the whole model."""
    plain, dropped = first_steps(name, None), first_steps(name, 0.1)
    assert 0.0 == plain[f"{CHECK}/train_mode/max"]
    assert 0.01 < dropped[f"{CHECK}/train_mode/mean"], "the training pass dropped nothing"
    assert plain[f"{CHECK}/train_mode/tokens"] == dropped[f"{CHECK}/train_mode/tokens"] > 0
    assert plain["grad_norm"] != pytest.approx(dropped["grad_norm"], rel=1e-3)
    if name == "grpo":
        assert 1e-5 > plain[f"{CHECK}/rollout/max"] == dropped[f"{CHECK}/rollout/max"], "the old log-probs are the same"
        assert plain["reward/mean"] == dropped["reward/mean"], "the same samples"
        assert (1.0, 0.0) == (plain["policy/ratio"], plain["policy/kl"])
        assert dropped["policy/ratio"] != pytest.approx(1.0, abs=1e-6)
        assert dropped["policy/kl"] > 1e-4
    elif name == "dpo":  # the policy is the reference: each pair's margin is 0 as long as neither has dropout
        assert [math.log(2)] * 2 == [pytest.approx(line["policy/loss"], abs=1e-6) for line in (plain, dropped)]
        assert [0.0, 0.0] == [line["policy/preference_margin"] for line in (plain, dropped)]
    else:
        assert plain["policy/loss"] != pytest.approx(dropped["policy/loss"], abs=1e-4)
