"""Rotary frequencies that depend on the length: no sample may cross the limit while it is generated, and where rows are
longer than it, log-probs do not depend on the micro-batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield_architectures import save_model
from jackfield_commands import CommandServer

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.needs("module:jackfield_engine_fsdp"),
    pytest.mark.needs("module:jackfield_transport_sql"),
]

LIMIT = 32  #: tokens
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "long_factor": [4.0, 9.0, 16.0, 30.0],
    "short_factor": [1.0, 1.0, 1.0, 1.0],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": {**LONG, "factor": 4.0, "original_max_position_embeddings": LIMIT},
            "original_max_position_embeddings": LIMIT,
            "max_position_embeddings": 4 * LIMIT,
        },
    ),
    "dynamic": (
        "qwen3",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": LIMIT,
        },
    ),
}
ROLES: dict[str, tuple[str, ...]] = {
    "all": (),
    "train": ("--role", "train"),
    "explore": ("--role", "explore"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_model(architecture, folder, **changes)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (made / "model" / file).is_file():
            shutil.copy(made / "model" / file, folder / file)
    return folder


@pytest.mark.parametrize("role", ROLES)
def test_samples_that_could_cross_the_limit_are_refused(
    role: str,
    model: Path,
    jackfield: CommandServer,
    quickstart_settings: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    """In every role that samples or trains, before anything is started."""
    shared = (
        "transfer_queue={name: sql}",
        f"checkpoint_engine={{name: file, folder: {tmp_path / 'weights'}}}",
        f"queue.address={tmp_path / 'address.json'}",
    )
    apart = () if role == "all" else shared
    settings = quickstart_settings(
        "refused", f"model.path={model}", f"cluster.max_model_len={LIMIT + 1}", "data.max_prompt_tokens=20", *apart
    )
    done = jackfield("run", *settings, *ROLES[role])
    assert 1 == done.code, done.error
    assert done.error.startswith("[config.invalid-value] "), done.error
    assert "cluster.max_model_len" in done.error
    assert not (tmp_path / "refused").exists()


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def test_samples_within_the_limit_are_trained_on(
    model: Path, jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    options = (f"model.path={model}", f"cluster.max_model_len={LIMIT}", "schedule.steps=1")
    done = jackfield("run", *quickstart_settings("within", *options))
    assert 0 == done.code, done.error
    for line in steps(tmp_path / "within"):
        assert 1e-4 > line["log_prob_check/rollout/max"]
        assert 1e-4 > line["log_prob_check/train_mode/max"]


def test_without_a_setting_the_limit_is_that_of_the_frequencies(
    model: Path, jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Answers end there, although more tokens were asked for."""
    options = (f"model.path={model}", "schedule.steps=1", "sampling={max_new_tokens: 40, ignore_eos: true}")
    done = jackfield("run", *quickstart_settings("chosen", *options))
    assert 0 == done.code, done.error
    described = json.loads((model / "config.json").read_text())
    assert (described["max_position_embeddings"] > LIMIT) == (f"at most {LIMIT} tokens" in done.error), done.error
    (line,) = steps(tmp_path / "chosen")
    assert 40 > line["response_tokens/max"]
    assert 1e-4 > line["log_prob_check/rollout/max"]


def test_longer_rows_are_trained_on_by_themselves(
    model: Path, jackfield: CommandServer, made: Path, tmp_path: Path
) -> None:
    """Supervised, rows of both sides of the limit: the loss of two steps is that of rows one by one."""
    records = [{"question": f"{n} + 1?", "answer": "#### 1" + " 2" * (0 if n % 2 else 3 * n + LIMIT)} for n in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    quickstart = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "warmup.yaml"
    losses = []
    for name, tokens in (("together", 16384), ("one-by-one", 1)):
        done = jackfield(
            "run", str(quickstart), f"folder={tmp_path / name}", f"model.path={model}", f"data.train={file}",
            "data.groups_per_batch=8", "schedule.steps=2", "optimizer={lr: 1e-2, warmup_steps: 0, scheduler: constant}",
            "evaluation.every=0", "cluster.threads=1", f"cluster.micro_batch_tokens={tokens}",
            "observe={progress: false, curve: false, report_to: []}",
        )  # fmt: skip
        assert 0 == done.code, done.error
        lines = steps(tmp_path / name)
        assert lines[0]["response_tokens/max"] > LIMIT
        assert 1e-4 > lines[0]["log_prob_check/train_mode/max"]
        losses.append([line["policy/loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
