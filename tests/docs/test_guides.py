"""What the guides say can be done as they say it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shlex
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

from jackfield.abc.reward import RewardContext, ScoreRequest
from jackfield.abc.transfer_queue import PutRequest, TransferQueueContext
from jackfield.cli import main
from jackfield.compose import run
from jackfield.compose.checks import check_settings
from jackfield.compose.modes import check_stages
from jackfield.compose.resolve import resolve_algorithm
from jackfield.compose.run import run_stages
from jackfield.config import load_config, load_stages, make_config, plugin_settings
from jackfield.plugins import HookManager, Registry
from jackfield.plugins.hooks import StepEnded
from jackfield.sdk.cells import column_from_rows
from jackfield.simulation import check_seeds

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
GUIDES = REPOSITORY / "examples" / "guides"
PAGES = sorted([*(DOCS / "guides").glob("*.md"), *(DOCS / "reference").glob("*.md"), *(DOCS / "plugins").glob("*.md")])

OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=.*", re.DOTALL)


def blocks(language: str) -> list[Any]:
    """The fenced blocks of a language in all pages."""
    found = []
    for page in PAGES:
        for number, text in enumerate(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)):
            found.append(pytest.param(text, id=f"{page.stem}-{number}"))
    return found


def commands() -> list[Any]:
    """The commands of all pages that take overrides."""
    found = []
    for block in blocks("console"):
        for line in block.values[0].splitlines():
            words = shlex.split(line.removeprefix("$ "))
            if {"run", "config", "bench", "plan"} & set(words) or any(word.endswith("quickstart.py") for word in words):
                found.append(pytest.param(words, id=" ".join(words)))
    return found


@pytest.mark.parametrize("text", [block for block in blocks("yaml") if "model:" in block.values[0]])
def test_configurations_in_the_documentation_are_valid(documented: Registry, text: str) -> None:
    config = make_config(yaml.safe_load(text))
    plugin_settings(config, documented)
    resolve_algorithm(config, documented.resolve(config.rollout.name, "rollout").usable())


@pytest.mark.parametrize("words", commands())
def test_commands_in_the_documentation_are_valid(documented: Registry, words: list[str]) -> None:
    overrides = [word for word in words if OVERRIDE.fullmatch(word)]
    file = next((word for word in words if word.endswith(".yaml")), "examples/quickstart/grpo.yaml")
    role: Any = words[words.index("--role") + 1] if "--role" in words else "all"
    stages = load_stages(REPOSITORY / file, overrides, served=role != "all")
    check_stages(stages, lambda config: check_settings(config, documented, role))


def small(folder: Path, model_folder: Path, tasks: Path, *more: str) -> list[str]:
    return [
        f"folder={folder}",
        f"model.path={model_folder}",
        f"data.train={tasks}",
        f"data.eval={tasks}",
        "data.groups_per_batch=2",
        "data.rollouts_per_group=4",
        "sampling.max_new_tokens=4",
        "evaluation.sampling.max_new_tokens=4",
        "schedule.steps=3",
        "observe.progress=false",
        "observe.report_to=[]",
        "observe.curve=false",
        *more,
    ]


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def test_own_model_own_data_own_reward_and_one_line_changed(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    reward = f"{GUIDES / 'my_reward.py'}:compute_score"
    overrides = small(tmp_path, model_folder, tasks, "reward.name=function", f"reward.path={reward}")
    result = run(load_config(GUIDES / "minimal.yaml", [*overrides, "schedule.sync_offset=1"]))
    assert 3 == result.steps == len(steps(tmp_path))
    assert {0.0, 1.0} >= {step["staleness/max"] for step in steps(tmp_path)}
    assert any(step["reward/max"] > 0 for step in steps(tmp_path))
    for name in ("config.yaml", "queue/controller.sqlite", "trace.json", "samples/train.jsonl", "samples/eval.jsonl"):
        assert (tmp_path / name).is_file(), name


def test_the_engine_of_the_guide(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """What is frozen stays, the rest moves, and the average is exported."""
    reward = ("reward.name=function", f"reward.path={GUIDES / 'my_reward.py'}:compute_score", "optimizer.lr=0.01")
    overrides = small(tmp_path / "run", model_folder, tasks, "evaluation.every=0", "checkpoint.every=1", *reward)
    result = run(load_config(GUIDES / "engine.yaml", overrides))
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "averaged"), "--averaged"]
    assert 0 == CliRunner().invoke(main, command).exit_code
    before, after, mean = (
        load_file(folder / "model.safetensors") for folder in (model_folder, result.model, tmp_path / "averaged")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed
    assert changed == {name for name in mean if not torch.equal(mean[name], after[name])}
    assert [0.0] * 3 == [step["updates_skipped"] for step in steps(tmp_path / "run")]


def test_the_stages_of_the_guide(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """SFT, then GRPO from its model until 16 samples are used."""
    reward = ("reward.name=function", f"reward.path={GUIDES / 'my_reward.py'}:compute_score")
    given = [each for each in small(tmp_path, model_folder, tasks, *reward) if not each.startswith("schedule.steps")]
    ends = ("stages.sft.schedule.steps=1", "stages.grpo.schedule.until.samples=16")
    said: list[str] = []
    result = run_stages(load_stages(GUIDES / "stages.yaml", [*given, *ends]), said.append)
    assert [f"stage 1 of 2: sft, in {tmp_path / '1-sft'}", f"stage 2 of 2: grpo, in {tmp_path / '2-grpo'}"] == said
    assert (tmp_path / "2-grpo" / "model", 2) == (result.model, len(steps(result.folder)))


def test_samples_are_collected_and_then_trained_on(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    reward = ("reward.name=function", f"reward.path={GUIDES / 'my_reward.py'}:compute_score")
    overrides = small(tmp_path / "collected", model_folder, tasks, "evaluation.every=0", *reward)
    run(load_config(GUIDES / "minimal.yaml", [*overrides, "mode=explore"]))
    learns = ("mode=train", f"data.samples={tmp_path / 'collected'}", "data.epochs=2", "schedule.steps=50")
    overrides = small(tmp_path / "learned", model_folder, tasks, "evaluation.every=0", *reward, *learns)
    assert 6 == run(load_config(GUIDES / "minimal.yaml", overrides)).steps


def test_a_class_judges_and_metrics_are_the_further_numbers(build: Any) -> None:
    async def main(path: str, **settings: Any) -> Any:
        agent = build("reward", "function", RewardContext(), path=f"{GUIDES}/{path}", **settings)
        await agent.start()
        request = ScoreRequest(data_source="t", solution_str="maybe 7", ground_truth="so 7", deadline_seconds=30)
        result = await agent.compute_score(request)
        await agent.close()
        return result

    judged = asyncio.run(main("my_judge.py:Judge", keywords={"forbidden": ["maybe"]}))
    assert ("ok", 0.0) == (judged.status, judged.score)
    scored = asyncio.run(main("my_reward.py:compute_score", keywords={"brevity": 0.3}))
    assert ("ok", 1.1, 2.0) == (scored.status, pytest.approx(scored.score), scored.metrics["words"])


def test_checkpoints_are_benched_and_compared_task_by_task(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    sets = (
        f"evaluation.sets={{hard: {{file: {tasks}, rollouts: 4, sampling: {{temperature: 1.0, max_new_tokens: 4}}}}}}"
    )
    overrides = small(tmp_path, model_folder, tasks, sets, "evaluation.every=0", "checkpoint.every=1")
    overrides += ["reward.pattern=null", "reward.ground_truth_pattern=null"]
    file = str(GUIDES / "bench.yaml")
    run(load_config(file, [*overrides, "schedule.steps=2"]))
    ended = CliRunner().invoke(main, ["bench", file, *overrides, "--all", "--base"])
    assert 0 == ended.exit_code, ended.output
    results = json.loads((tmp_path / "bench" / "bench.json").read_text())["results"]
    assert ["base", "step_00000001", "step_00000002"] == [each["model"] for each in results if each["set"] == "hard"]
    means = {each["model"]: each["metrics"]["mean@4"] for each in results if each["set"] == "hard"}
    compare = load(GUIDES / "compare_models.py").difference
    gain, _ = compare(tmp_path / "bench", "base", "step_00000002", "hard")
    assert means["step_00000002"] - means["base"] == pytest.approx(gain)


def load(path: Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_advantages(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    estimate = load(GUIDES / "own_advantages.py").leave_one_out
    rewards = torch.tensor([1.0, 0.0, 5.0, 3.0, 2.0])
    advantages, _ = estimate(
        token_rewards=torch.stack([torch.zeros(5), rewards], dim=1),
        response_mask=torch.ones(5, 2),
        group_ids=torch.tensor([0, 0, 1, 0, 1]),
    )
    expected = [1.0 - 1.5, 0.0 - 2.0, 5.0 - 2.0, 3.0 - 0.5, 2.0 - 5.0]
    assert [[value, value] for value in expected] == advantages.tolist()
    overrides = small(tmp_path, model_folder, tasks, "schedule.steps=1", "algorithm.advantages={name: leave_one_out}")
    overrides += ["reward.pattern=null", "reward.ground_truth_pattern=null"]
    assert 1 == run(load_config(GUIDES / "minimal.yaml", overrides)).steps


def test_schedules_are_simulated_and_checked() -> None:
    """A batch that is generated ahead hides generation, and no fault breaks an invariant."""
    guide = load(GUIDES / "simulate_schedule.py")
    seconds = guide.compare(4)
    assert seconds[1] < 0.8 * seconds[0]
    check_seeds(range(20), guide.with_a_fault)


@pytest.mark.timeout(180)
def test_a_schedule_is_planned_as_the_guide_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented command, with fewer steps, finds what the guide says of the file and of the best schedule."""
    monkeypatch.chdir(REPOSITORY)
    (shown,) = [block.values[0] for block in blocks("console") if block.values[0].startswith("$ jackfield plan")]
    command = shlex.split(shown.splitlines()[0].removeprefix("$ jackfield"))
    assert "examples/guides/stage_times.json" in command
    ended = CliRunner().invoke(main, [*command, "--steps", "4", "--json"])
    assert 0 == ended.exit_code, ended.output
    found = json.loads(ended.output)
    (own,) = [float(seconds) for seconds in re.findall(r"a step takes ([\d.]+) s", shown)]
    assert own == pytest.approx(found["own"]["step_time"], rel=0.05)
    assert " ".join(found["best"]["overrides"]) in shown
    fastest = re.search(r"^STEP.*\n([\d.]+) s", shown, re.M)
    assert fastest
    assert float(fastest[1]) == pytest.approx(found["others"][0]["step_time"], rel=0.05)


def test_the_archive_of_a_run_is_read_and_learnt_from(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    overrides = small(tmp_path / "run", model_folder, tasks, f"queue.archive={archive}", "schedule.steps=2")
    overrides += ["reward.pattern=null", "reward.ground_truth_pattern=null", "evaluation.every=0"]
    assert 2 == run(load_config(GUIDES / "minimal.yaml", overrides)).steps
    found = load(GUIDES / "read_archive.py").rewards_by_step(archive)
    expected = {step["step"] - 1: pytest.approx(step["reward/mean"], abs=1e-6) for step in steps(tmp_path / "run")}
    assert expected == found
    learning = small(tmp_path / "sft", model_folder, archive, "schedule.steps=1", "evaluation.every=0")
    learning += ["mode=offline", "algorithm.name=sft", "data.rollouts_per_group=1"]
    assert 1 == run(load_config(GUIDES / "minimal.yaml", learning)).steps


def test_a_rollout_is_traced(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """From the tables of a run, and from its archive what they leave out."""
    archive, folder = tmp_path / "archive", tmp_path / "run"
    reward = ("reward.name=function", f"reward.path={GUIDES / 'my_reward.py'}:compute_score")
    more = (f"queue.archive={archive}", "schedule.steps=2", "evaluation.every=0", "observe.samples_per_step=3")
    run(load_config(GUIDES / "minimal.yaml", small(folder, model_folder, tasks, *more, *reward)))

    def trace(*arguments: object) -> str:
        done = CliRunner().invoke(main, ["trace", str(folder), *map(str, arguments)])
        assert 0 == done.exit_code, done.output
        return done.output

    listed = [each for each in json.loads(trace("--json")) if each["rollout"].startswith("train/")]
    assert {1: 8, 2: 8} == Counter(each["step"] for each in listed)
    sources = set()
    for each in listed:
        found = json.loads(trace(each["rollout"], "--json"))
        (sequence,) = found["sequences"]
        (score,) = sequence["scores"]
        assert pytest.approx(sequence["reward"]) == score["score"]
        assert all(token["text"] and token["log_prob"] <= 0 and token["is_model"] for token in sequence["tokens"])
        sources.add(Path(found["source"]).suffix)
    assert {".jsonl", ".parquet"} == sources
    shown = trace(listed[0]["rollout"])
    assert "turn 1" in shown
    trace(listed[0]["rollout"], "--html", tmp_path / "one.html")
    assert listed[0]["rollout"] in (tmp_path / "one.html").read_text()
    assert 8 == len(json.loads(trace("--step", 2, "--export", "sharegpt")))
    tokens = load(GUIDES / "surprising_tokens.py").surprising(folder)
    assert {each["rollout"] for each in listed if each["step"] == 2} == set(tokens)


def test_a_run_goes_on_and_its_ledger_counts_every_sample_once(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    reward = ("reward.pattern=null", "reward.ground_truth_pattern=null")
    for length in (1, 3):
        overrides = small(tmp_path, model_folder, tasks, f"schedule.steps={length}", "schedule.sync_offset=1", *reward)
        assert length == run(load_config(GUIDES / "minimal.yaml", overrides)).steps
    assert [1, 2, 3] == [step["step"] for step in steps(tmp_path)]
    assert {0: 8, 1: 8, 2: 8} == load(GUIDES / "read_ledger.py").samples_by_step(tmp_path)


def test_a_profile_of_a_step_says_where_its_time_went(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """The trace has the passes of the engine and, in other threads, those of the replica in the same process."""
    overrides = small(tmp_path, model_folder, tasks, "profile=step:2", "log_prob_check.probe_tokens=0")
    overrides += ["reward.pattern=null", "reward.ground_truth_pattern=null", "reward.method=regex"]
    overrides += ["reward.expected='w[1-3].*'", "algorithm.old_log_probs=engine", "algorithm.kl.coefficient=0.1"]
    assert 3 == run(load_config(GUIDES / "minimal.yaml", overrides)).steps
    folder = tmp_path / "profile" / "step-2"
    assert {"actor-0.json.gz", "controller.html"} == {file.name for file in folder.iterdir()}
    assert [folder] == list(folder.parent.iterdir())
    passes, operators = load(GUIDES / "read_profile.py").times(folder / "actor-0.json.gz")
    assert {"actor 0: forward", "actor 0: train", "reference 0: forward"} <= passes.keys()
    assert all(seconds > 0 for seconds in passes.values())
    assert operators["aten::mm"] + operators["aten::addmm"] > 0
    assert min(operators.values()) > -1e-4, "an operator has no less than no time of its own"
    events = json.loads(gzip.decompress((folder / "actor-0.json.gz").read_bytes()))["traceEvents"]
    multiply = {event["tid"] for event in events if event["name"] in ("aten::mm", "aten::addmm")}
    labelled = {event["tid"] for event in events if event["name"] == "actor 0: train"}
    assert (1, True) == (len(labelled), bool(multiply - labelled)), "the replica's thread multiplies matrices, too"


def test_samples_are_kept_in_a_database_and_read_with_sql(
    model_folder: Path, tasks: Path, tmp_path: Path, build: Any
) -> None:
    """Of a run that was interrupted and went on: each sample is there once, with its text."""
    reward = f"{GUIDES / 'my_reward.py'}:compute_score"
    database = ("transfer_queue.name=sql", f"transfer_queue.tokenizer={model_folder}")
    for length in (1, 2):
        overrides = small(tmp_path, model_folder, tasks, "reward.name=function", f"reward.path={reward}", *database)
        assert length == run(load_config(GUIDES / "minimal.yaml", [*overrides, f"schedule.steps={length}"])).steps
    file = tmp_path / "queue" / "samples.sqlite"
    statements = [text for text in (GUIDES / "samples.sql").read_text().split(";") if text.strip()]
    with closing(sqlite3.connect(file)) as opened:
        versions, spread, worst = [opened.execute(statement).fetchall() for statement in statements]
        query = "SELECT state, count(*) FROM jackfield_experiences WHERE partition = 'train' GROUP BY state"
        states = opened.execute(query).fetchall()
    assert ([(0, 8), (1, 8)], [("done", 16)]) == ([row[:2] for row in versions], states)
    assert spread
    assert all(prompt.startswith("<user> w") for _, _, prompt, _ in worst)


def test_tensors_are_read_without_jackfield(tmp_path: Path, build: Any) -> None:
    async def keep() -> None:
        backend = build("transfer_queue", "sql", TransferQueueContext(folder=str(tmp_path)))
        await backend.start()
        column = column_from_rows([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)])
        await backend.put(PutRequest(partition="train", keys=("a", "b"), columns={"ids": column}))
        await backend.close()

    asyncio.run(keep())
    found = load(GUIDES / "read_tensors.py").read_column(tmp_path / "samples.sqlite", "ids")
    assert {"a": [1, 2], "b": []} == {key: values.tolist() for key, values in found.items()}


def test_own_loss_and_algorithm_from_a_hook(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """The plugin's module is heard as a hook; the reference is there because the loss names it."""
    overrides = small(tmp_path, model_folder, tasks, "algorithm.name=anchored_policy_gradient", "optimizer.lr=1e-2")
    overrides += ["reward.pattern=null", "reward.method=regex", "reward.expected='w[1-3].*'"]
    overrides += ["reward.ground_truth_pattern=null"]
    run(load_config(GUIDES / "minimal.yaml", overrides), hooks=[load(GUIDES / "own_loss.py")])
    distances = [step["policy/distance"] for step in steps(tmp_path)]
    assert 0.0 == pytest.approx(distances[0], abs=1e-6)
    assert distances[-1] > 1e-4


def test_the_hook_of_the_documentation_hears_steps(capsys: pytest.CaptureFixture[str]) -> None:
    manager = HookManager([load(Path(__file__).with_name("hooks_example.py"))])
    manager.emit(StepEnded(step=3, metrics={"policy/loss": 99.0}))
    assert "step 3: the loss is 99" in capsys.readouterr().out


TROUBLE = (DOCS / "guides" / "when_something_is_wrong.md").read_text(encoding="utf-8")


def test_what_is_seen_when_something_is_wrong_is_what_is_said() -> None:
    """The codes exist, the messages are in the sources word for word, and the settings are there."""
    sources = [*REPOSITORY.glob("core/src/**/*.py"), *REPOSITORY.glob("plugins/*/*/src/**/*.py")]
    said = "".join(file.read_text(encoding="utf-8") for file in sources)
    settings = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    codes = re.findall(r"^\| `([a-z.-]+)`", (DOCS / "reference" / "errors.md").read_text(encoding="utf-8"), re.M)
    rows = re.findall(r"^\| `([a-z.-]+)` \| (.*) \| (.*) \|$", TROUBLE, re.M)
    assert len(rows) > 20
    for code, seen, meaning in rows:
        assert code in codes
        messages = re.findall("“(.*?)”", seen)
        assert messages, code
        absent = [part for message in messages for part in message.split("…") if part.strip("' ") not in said]
        assert [] == absent, code
        named = re.findall(r"`([a-z]+\.[a-z_.]+)", meaning)
        assert [] == [name for name in named if f"`{name}`" not in settings and f"`{name}." not in settings], code


def test_what_is_wrong_in_the_tests_is_in_the_guide() -> None:
    tested = re.findall(
        r"(?:refuses|fails)\(\s*\"([a-z.-]+)\"", (REPOSITORY / "tests" / "e2e" / "test_bad_input.py").read_text()
    )
    assert len(tested) > 15
    assert [] == [code for code in tested if f"| `{code}` |" not in TROUBLE]


def test_the_mixture_of_the_guide(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and stories are recognised, come 3 to 1, and are scored by two rewards."""
    monkeypatch.chdir(REPOSITORY)  # its paths are from there
    given = small(tmp_path, model_folder, Path("none"), "data.eval=null", "data.groups_per_batch=4", "schedule.steps=2")
    given += ["data.max_prompt_tokens=56", "observe.samples_per_step=16"]
    given = [each for each in given if not each.startswith(("data.train", "data.eval=none", "evaluation."))]
    run(load_config(GUIDES / "data.yaml", given))
    found = steps(tmp_path)
    assert all({"reward/rules/mean", "reward/compute_score/mean"} <= step.keys() for step in found)
    rows = [json.loads(line) for line in (tmp_path / "samples" / "train.jsonl").read_text().splitlines()]
    sets = [row["tags"]["task"].partition(":")[0] for row in rows if row["step"] == 1]
    assert {"sums", "stories"} == {*sets}


def test_the_curriculum_of_the_guide(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """It draws from bins by difficulty, which rules have written."""
    overrides = small(tmp_path / "run", model_folder, tasks, "schedule.steps=2", "evaluation.every=0")
    overrides += ["reward.pattern=null", "reward.ground_truth_pattern=null"]
    assert 2 == run(load_config(GUIDES / "curriculum.yaml", overrides)).steps
    found = steps(tmp_path / "run")
    assert all(step["curriculum/tasks"] >= 1.0 for step in found)
    assert any(name.startswith("curriculum/pass_rate/") for name in found[-1])


def test_the_shaping_of_the_guide(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """Each operator leaves its metric, and the reward before is reported, too."""
    overrides = small(tmp_path / "run", model_folder, tasks, "schedule.steps=2", "evaluation.every=0")
    overrides += ["reward.pattern=null", "reward.ground_truth_pattern=null"]
    assert 2 == run(load_config(GUIDES / "shaping.yaml", overrides)).steps
    (_, found) = steps(tmp_path / "run")
    names = ("unshaped", "diversity", "quality", "length_loss", "utility")
    assert {f"reward/{name}/mean" for name in names} <= found.keys()
    listed = CliRunner().invoke(main, ["data", "sets", str(tmp_path / "run"), "--json"])
    assert 4 == len(json.loads(listed.output))
