"""Training from Python, as somebody who comes from TRL does it: in scripts, in notebooks, with models of the Hub."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import nbclient
import nbformat
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import jackfield
from jackfield import DAPO, DPO, GRPO, PPO, RLOO, SFT, Result, Training
from jackfield.compose import run
from jackfield.config import load_config
from jackfield_testing import refused, vllm_python

from .hub import REVISION, serve_hub

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "python"
SMALL: dict[str, Any] = {
    "data": {"groups_per_batch": 2, "rollouts_per_group": 2},
    "sampling": {"max_new_tokens": 4},
    "cluster.threads": 1,
    "observe": {"report_to": [], "curve": False},
    "steps": 2,
}
PROBLEMS = [{"question": f"Ben has {number} cups.", "answer": f"#### {number}"} for number in range(6)]


def python(folder: Path, *words: str, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a folder."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {**known, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert code in (None, done.returncode), done.stderr
    return done


@pytest.fixture
def quickstart(made: Path, tmp_path: Path) -> Path:
    """A working folder with what `make quickstart` creates."""
    for name in ("made", "warmup"):  # the second as if it had learned nothing
        (tmp_path / "runs" / "quickstart" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / "quickstart" / name).symlink_to(made)
    return tmp_path


@pytest.mark.timeout(120)
def test_the_script_trains_and_the_same_script_finds_its_run(quickstart: Path) -> None:
    """Its function cannot be imported: it runs in the script's process, which is said."""
    first = python(quickstart, str(EXAMPLES / "six_lines.py"))
    assert "runs/trained" == first.stdout.strip()
    assert "the reward reward runs in a thread of this process" in first.stderr
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (quickstart / "runs" / "trained").iterdir()
    }
    steps = (quickstart / "runs" / "grpo" / "metrics.jsonl").read_text()
    again = python(quickstart, str(EXAMPLES / "six_lines.py"), code=1)
    assert "[run.storage] the folder for the model is not empty at runs/trained" in again.stderr
    assert steps == (quickstart / "runs" / "grpo" / "metrics.jsonl").read_text(), "the finished run does nothing"


STOPPED = """
import os, signal

calls = 0

def stopping(completions, **columns):
    global calls
    calls += 1
    if calls == 4:  # the first tries the reward, two more are of the first step
        os.kill(os.getpid(), signal.SIGINT)
    return [float(len(str(each)) % 3) for each in completions]

training = GRPO(
    model=f"{QUICKSTART}/warmup/model", train=f"{QUICKSTART}/made/problems.jsonl", reward=stopping,
    steps=3, folder="runs/stopped",
    data={"groups_per_batch": 2, "rollouts_per_group": 4}, sampling={"max_new_tokens": 4},
)
try:
    training.run(quiet=True)
except KeyboardInterrupt:
    done = max(row["step"] for row in training.result.metrics)
    print(f"interrupted after {done} of 3 steps")
"""


@pytest.mark.timeout(120)
def test_the_notebook_runs_and_shows_its_progress_and_its_curve(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel has an event loop; the reward is a function of a cell. The stop button leaves the kernel alive."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(quickstart / "ipython"))
    notebook = nbformat.read(EXAMPLES / "six_lines.ipynb", as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in (STOPPED, "training.run(quiet=True).steps")]
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(quickstart)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    shown = json.dumps(outputs[2])
    assert "application/vnd.jupyter.widget-view+json" in shown, "tqdm's bar"
    assert "run ended well: 4 steps" in shown
    assert outputs[3][0].data["image/png"].startswith("iVBOR")
    assert 4 == len(json.loads(outputs[4][0].data["text/plain"]))
    assert "<table" in outputs[5][0].data["text/html"]
    assert (quickstart / "runs" / "notebook_model" / "model.safetensors").is_file()
    assert any(f"interrupted after {done} of 3 steps" in json.dumps(outputs[7]) for done in (1, 2))
    assert "3" == outputs[8][0].data["text/plain"]


def test_importing_jackfield_is_cheap(tmp_path: Path) -> None:
    loaded = "import jackfield, sys; print(len([each for each in sys.modules if each.startswith('jackfield')]))"
    assert "1" == python(tmp_path, "-c", loaded).stdout.strip()
    assert "Commands:" in python(tmp_path, "-m", "jackfield", "--help").stdout
    assert "python -m jackfield" in python(tmp_path, "-m", "jackfield", "nonsense", code=2).stderr
    assert {"GRPO", "SFT"} <= set(dir(jackfield))
    with pytest.raises(AttributeError, match="nonsense"):
        jackfield.nonsense  # noqa: B018


def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Differs between completions."""
    return [float(len(str(completion)) % 3) for completion in completions]


PAIRS = [{"prompt": f"Ben has {number} cups.", "chosen": str(number), "rejected": "no"} for number in range(4)]


@pytest.mark.parametrize(
    ("kind", "train"),
    [(GRPO, PROBLEMS), (DAPO, PROBLEMS), (RLOO, PROBLEMS), (PPO, PROBLEMS), (SFT, PAIRS), (DPO, PAIRS)],
)
def test_each_class_trains(kind: type[Training], train: list[dict[str, Any]], made: Path, tmp_path: Path) -> None:
    """Records are a data set here, and lists of dicts elsewhere."""
    given = {} if kind in (SFT, DPO) else {"reward": reward, "schedule": {"max_retries": 100}}
    data = datasets.Dataset.from_list(train)
    result = kind(model=made / "model", train=data, folder=tmp_path / "run", **given, **SMALL).run(quiet=True)
    assert 2 == result.steps == len([row for row in result.metrics if row["kind"] == "step"])
    assert kind.algorithm == load_config(result.folder / "config.yaml").algorithm.name
    assert train == [json.loads(line) for line in (result.folder / "data" / "train.jsonl").read_text().splitlines()]
    assert result.model.is_dir()
    if kind is GRPO:
        assert {"train"} == {row["table"] for row in result.samples}
        assert result.samples.to_pandas()["reward"].isin([0, 1, 2]).all()
        assert "<img" in result._repr_html_()


def test_the_same_run_from_python_and_from_its_yaml(made: Path, tmp_path: Path) -> None:
    """In a running event loop, with a plugin's reward; the file gives the same samples, bit by bit."""
    options: dict[str, Any] = {"model": str(made / "model"), "train": PROBLEMS, "eval": PROBLEMS[:2], **SMALL}
    training = GRPO(reward={"name": "rules", "method": "exact"}, folder=tmp_path / "run", seed=3, **options)

    async def main() -> Any:
        return training.run(quiet=True)

    result = asyncio.run(main())
    text = training.to_yaml(tmp_path / "run.yaml")
    assert not text.startswith("#")
    assert [0, 1, 2] == [row["step"] for row in result.metrics if row["kind"] == "evaluation"]
    other = run(load_config(tmp_path / "run.yaml", [f"folder={tmp_path / 'other'}", "observe.progress=false"]))
    samples = [(folder / "samples" / "train.jsonl").read_bytes() for folder in (result.folder, other.folder)]
    assert samples[0] == samples[1]
    assert run(load_config(tmp_path / "run.yaml")).finished_before, "the command goes on with Python's run"


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_run_with_a_checkpoint_and_not_the_program(
    number: signal.Signals, raised: type[BaseException], made: Path, tmp_path: Path
) -> None:
    """SIGINT arrives while the run is in a thread, because an event loop runs here."""
    calls, before = list[int](), signal.getsignal(number)

    def reward(completions: list[str], **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 4:  # in the second step; the first call tries the reward
            os.kill(os.getpid(), number)
        return [float(len(str(completion)) % 3) for completion in completions]

    options = {**SMALL, "steps": 3, "folder": tmp_path / "run", "model": made / "model", "train": PROBLEMS}
    training = GRPO(reward=reward, **options)

    async def main() -> None:
        training.run(quiet=True)

    with pytest.raises(raised):
        asyncio.run(main()) if number == signal.SIGINT else training.run(quiet=True)
    assert before == signal.getsignal(number)
    (step,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert step.name in ("step_00000001", "step_00000002")
    assert int(step.name[-1]) == max(row["step"] for row in training.result.metrics)
    assert training.result.save(tmp_path / "early").joinpath("model.safetensors").is_file(), "of the checkpoint"
    assert 3 == training.run(quiet=True).steps


HUB = """
from jackfield import GRPO

train = [{"question": "Ben has 4 cups.", "answer": "#### 4"}] * 4
reward = lambda solution_str: len(solution_str) % 3
training = GRPO(model="acme/tiny", train=train, reward=reward, folder="run", **SMALL)
result = training.run(quiet=True)
print(result.push_to_hub("acme/trained"))
SMALL["model.lora"] = {"rank": 2}
training = GRPO(model="acme/tiny", train=train, reward=reward, folder="adapter", **SMALL)
training.run(quiet=True).push_to_hub("acme/adapter")
"""


@pytest.mark.timeout(120)
def test_models_come_from_the_hub_and_go_there(made: Path, tmp_path: Path) -> None:
    """The model is downloaded once, and found offline afterwards; its sampling defaults are named."""
    files = {file.name: file.read_bytes() for file in (made / "model").iterdir()}
    generation = json.dumps({"eos_token_id": [1, 2], "pad_token_id": 0, "temperature": 0.6, "top_p": 0.95}).encode()
    script = f"SMALL = {SMALL!r}\n{HUB}"
    with serve_hub() as hub:
        hub.models["acme/tiny"] = {**files, "generation_config.json": generation, "pytorch_model.bin": b"pickle"}
        environment = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_of_this_test"}
        done = python(tmp_path, "-c", script, **environment)
        assert f"{hub.address}/acme/trained" == done.stdout.strip()
        assert (
            "defaults of generation_config.json are not used, sampling.* is: temperature 0.6, top_p 0.95" in done.stderr
        )
        pushed, card = hub.models["acme/trained"], hub.models["acme/trained"]["README.md"].decode()
        assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= pushed.keys()
        assert 'base_model: "acme/tiny"' in card
        assert "acme/tiny" == json.loads(hub.models["acme/adapter"]["adapter_config.json"])["base_model_name_or_path"]
        assert not any("pytorch_model.bin" in each for each in hub.asked), "no pickle is downloaded"
        path = load_config(tmp_path / "run" / "config.yaml").model.path
        assert path.endswith(f"models--acme--tiny/snapshots/{REVISION}")
        asked = len(hub.asked)
        python(tmp_path, "-m", "jackfield", "run", "run/config.yaml", "model.path=acme/tiny", "folder=other",
               "reward={name: rules, method: exact}", **environment, HF_HUB_OFFLINE="1")  # fmt: skip
        assert asked == len(hub.asked)
        wrong = ["-m", "jackfield", "run", "run/config.yaml", "folder=none", "reward={name: rules, method: exact}"]
        absent = python(tmp_path, *wrong, "model.path=acme/nothing", code=1, **environment)
        offline = python(tmp_path, *wrong, "model.path=acme/nothing", code=1, **environment, HF_HUB_OFFLINE="1")
    for said, why in ((absent.stderr, "RepositoryNotFoundError"), (offline.stderr, "not asked (HF_HUB_OFFLINE)")):
        assert "[engine.model] the model 'acme/nothing' is neither a folder nor a model of the Hub" in said
        assert why in said
        assert f"nothing in the cache {tmp_path / 'home' / 'hub'}" in said
    assert not (tmp_path / "none").exists()


def test_what_is_wrong_is_refused_with_what_to_write(made: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": str(made / "model"), "folder": tmp_path / "run", **SMALL}
    for given, code, names in (
        ({"learning_rate": 1e-5}, "config.unknown-key", ["learning_rate", "**{'optimizer.lr': ...}"]),
        ({"max_new_tokens": 5}, "config.unknown-key", ["sampling.max_new_tokens"]),
        ({"reward_funcs": reward}, "config.unknown-key", ["write reward"]),
        ({"stepz": 3}, "config.unknown-key", ["did you mean 'steps'"]),
        *(
            ({name: 1}, "config.unknown-key", [name, f"write {where}"])
            for name, where in (
                ("max_prompt_length", "**{'data.max_prompt_tokens': ...}"),
                ("num_iterations", "**{'algorithm.epochs': ...}"),
                ("epsilon_high", "**{'algorithm.loss.options.clip_high': ...}"),
                ("per_device_train_batch_size", "**{'data.groups_per_batch': ...}"),
                ("callbacks", "run(hooks=[...])"),
                ("use_vllm", "**{'rollout.name': ...}"),
            )
        ),
        ({"optimizer": {"lrr": 1.0}}, "config.unknown-key", ["optimizer.lrr", "did you mean 'lr'"]),
        ({"optimizer": {"lr": 1.0}, "optimizer.lr": 2.0}, "config.invalid-value", ["given twice"]),
        ({"optimizer.lr": "fast"}, "config.wrong-type", ["optimizer.lr"]),
        ({"reward": 3}, "config.wrong-type", ["this is no reward"]),
        ({"reward": [(reward, "much")]}, "config.wrong-type", ["weight is not a number"]),
        ({"reward": []}, "config.wrong-type", ["no reward in the list"]),
        ({"train": datasets.DatasetDict(train=datasets.Dataset.from_list(PROBLEMS))}, "data.malformed", ["split"]),
        ({"train": []}, "data.malformed", ["no records"]),
        ({"train": iter(PROBLEMS)}, "data.malformed", ["list(it)"]),
        ({"reward": lambda text: 1.0, "cluster.name": "ray"}, "config.invalid-value", ["cluster.name", "lambda"]),
    ):
        with refused(code, *names):
            GRPO(**{**options, "train": PROBLEMS, **given})
    with refused("config.invalid-value", "no effect on given answers", "give eval"):
        SFT(model=str(made / "model"), train=PROBLEMS, reward=reward)
    with refused("data.malformed", "train[1]", "type set"):
        GRPO(train=[PROBLEMS[0], {"question": "q", "answer": {1}}], reward=reward, **options).run()
    with refused("reward.function", "solution", "has no value"):
        GRPO(train=PROBLEMS, reward=lambda solution: 1.0, **options).run(quiet=True)
    shutil.rmtree(tmp_path / "run")
    GRPO(train=PROBLEMS, reward=reward, **options).run(quiet=True)
    with refused("run.changed", "other records", "resume"):
        GRPO(train=PROBLEMS[:3], reward=reward, **options).run(quiet=True)
    text = GRPO(train=PROBLEMS, reward=lambda solution_str: 1.0, **options).to_yaml(tmp_path / "run.yaml")
    assert text.startswith("# The reward lambda is an object of the Python program that wrote this")
    assert {"name": "callable", "path": "lambda"} == yaml.safe_load(text)["reward"]
    with refused("config.invalid-value", "this process does not have it", "FILE.py:lambda"):
        run(load_config(tmp_path / "run.yaml", [f"folder={tmp_path / 'yaml'}", "observe.progress=false"]))


def test_several_sets_of_tasks_are_named_as_in_a_file(made: Path, tmp_path: Path) -> None:
    """A record may have a column ``path``, too."""
    sets = [{"path": made / "problems.jsonl", "weight": 3}, {"path": str(made / "held_out.jsonl"), "weight": 1}]
    options: dict[str, Any] = {"model": made / "model", "reward": "rules", "folder": tmp_path / "run"}
    training = GRPO(train=sets, eval=[made / "held_out.jsonl"], **options)
    written = [{**each, "path": str(each["path"])} for each in sets]
    data = yaml.safe_load(training.to_yaml())["data"]
    assert (written, [str(made / "held_out.jsonl")]) == (data["train"], data["eval"])
    rows = [{"path": "a", **record} for record in PROBLEMS]
    assert str(tmp_path / "run" / "data" / "train.jsonl") == GRPO(train=rows, **options).config.data.train


def test_all_end_tokens_of_the_generation_config_end_a_response(made: Path, tmp_path: Path) -> None:
    model = shutil.copytree(made / "model", tmp_path / "model")
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(vocabulary))}))
    training = GRPO(model=model, train=PROBLEMS, reward=reward, folder=tmp_path / "run", **{**SMALL, "steps": 1})
    (step,) = (row for row in training.run(quiet=True).metrics if row["kind"] == "step")
    assert 1 == step["response_tokens/max"]


def test_an_adapter_without_its_base_model_is_refused(made: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(made / "none")}))
    (tmp_path / "adapter_model.safetensors").touch()
    with refused("engine.model", "its base model", made / "none"):
        GRPO(model=tmp_path, train=PROBLEMS, reward=reward, folder=tmp_path / "run", **SMALL).run(quiet=True)


def test_several_rewards_have_weights(made: Path, tmp_path: Path) -> None:
    """A function of this module, a closure and a plugin."""
    rewards = [(lambda solution_str: 1.0, 0.5), ("rules", 2.0), reward]
    training = GRPO(model=made / "model", train=PROBLEMS, reward=rewards, folder=tmp_path / "run", **SMALL)
    section = yaml.safe_load(training.to_yaml())["reward"]
    assert {"lambda": 0.5, "rules": 2.0, "reward": 1.0} == section["weights"]
    result = training.run(quiet=True)
    assert all(row["reward"] % 0.5 == 0 and row["reward"] >= 0.5 for row in result.samples)


@pytest.fixture(scope="module")
def trained(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved folders: a whole model and an adapter that have seen some demonstrations."""
    folder = tmp_path_factory.mktemp("trained")
    options = {**SMALL, "steps": 12, "model": made / "model", "train": made / "demonstrations.jsonl"}
    options |= {"optimizer.lr": 5e-3, "data": {"groups_per_batch": 16}, "sampling": {}}
    for name, more in (("whole", {}), ("adapter", {"model.lora": {"rank": 4}})):
        SFT(folder=folder / f"run-{name}", **options, **more).run(quiet=True).save(folder / name)
    return {name: folder / name for name in ("whole", "adapter")}


def loaded(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example of the guide prints."""
    monkeypatch.setattr(sys, "argv", [name, str(folder)])
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    return capsys.readouterr().out.strip()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_transformers_and_peft_load_what_was_saved(
    trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Adapter and merged model give the same answer."""
    assert loaded("load_transformers", trained["whole"], monkeypatch, capsys)
    merged = Result(folder=trained["adapter"].with_name("run-adapter")).save(tmp_path / "merged", merge=True)
    answers = [
        loaded("load_peft", trained["adapter"], monkeypatch, capsys),
        loaded("load_transformers", merged, monkeypatch, capsys),
    ]
    assert answers[0] == answers[1] != ""
    assert "peft" in (trained["adapter"] / "README.md").read_text()


@pytest.mark.timeout(180)
def test_a_saved_adapter_is_a_model_for_the_next_run(
    made: Path, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is merged into its base model, all of whose weights the run trains."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    options = {**SMALL, "steps": 2, "train": made / "demonstrations.jsonl", "optimizer.lr": 1e-3, "sampling": {}}
    result = SFT(model=trained["adapter"], folder=tmp_path / "run", **options).run(quiet=True)
    [merged] = (tmp_path / "cache" / "jackfield" / "merged").iterdir()
    before, after = (load_file(folder / "model.safetensors") for folder in (merged, result.model))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.allclose(before[name].float(), after[name].float(), atol=0.05) for name in before)
    lora = {"model.lora": {"rank": 2}}
    SFT(model=trained["adapter"], folder=tmp_path / "again", **options, **lora).run(quiet=True).save(tmp_path / "two")
    described = json.loads((tmp_path / "two" / "adapter_config.json").read_text())
    assert (str(made / "model"), 4 + 2) == (described["base_model_name_or_path"], described["r"])
    for folder, kind in ((result.model, "transformers"), (tmp_path / "two", "peft")):
        card = (folder / "README.md").read_text()
        assert f'base_model: "{made / "model"}"\nlibrary_name: "{kind}"' in card
        assert f"| adapter that was merged into it before | {trained['adapter']} |" in card
        assert str(tmp_path / "cache") not in card


@pytest.mark.needs("vllm")
@pytest.mark.timeout(600)  # vLLM takes a minute to start on a busy machine
def test_vllm_loads_what_was_saved(
    trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each token of its greedy answer is the likeliest for transformers, too, or as likely but for the kernels."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [str(vllm_python()), str(EXAMPLES / "load_vllm.py"), str(trained["whole"])]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr
    assert loaded("load_transformers", trained["whole"], monkeypatch, capsys)
    found = done.stdout.strip().splitlines()[-1].strip()
    tokenizer, model = (kind.from_pretrained(trained["whole"]) for kind in (AutoTokenizer, AutoModelForCausalLM))
    asked = [{"role": "user", "content": "Ben has 6 cups. Then Ben finds 1. How many cups now?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    said = tokenizer(found, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].float()
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(said)[:, None])[:, 0]
    assert len(said) >= 4, found
    assert behind.max() < 0.05, (found, behind)
