"""The log-probs of what is trained on are compared with those of inference and of the rollout, on by default.

Each mutant is a third-party plugin that keeps every rule but one; the run stops at the first batch that shows it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield_commands import CommandServer, Completed

pytestmark = pytest.mark.timeout(180)

#: Settings that let a model that knows nothing earn different rewards within a group.
GRADED = (
    "reward.pattern=null",
    "reward.ground_truth_pattern=null",
    "reward.method=regex",
    "reward.expected='.*[0-4].*'",
    "optimizer.warmup_steps=0",
)
ROLLOUT, TRAIN_MODE = "log_prob_check/rollout", "log_prob_check/train_mode"

Settings = Callable[..., list[str]]

PLUGINS = {
    "restless": ("engine", "jackfield_engine_fsdp.config:Config"),
    "misnaming": ("engine", "jackfield_engine_fsdp.config:Config"),
    "shifting": ("rollout", "jackfield_rollout_transformers.config:Config"),
    "wilful": ("agent", "jackfield_agent_single_turn.agent:Config"),
    "retelling": ("agent", "jackfield_agent_single_turn.agent:Config"),
}
MUTANTS = """
    import os

    import attrs

    from jackfield_agent_single_turn.agent import SingleTurnAgent
    from jackfield_engine_fsdp.engine import FSDPEngine
    from jackfield_rollout_transformers.server import TransformersServer


    class Restless(FSDPEngine):
        '''Its training passes are not its inference passes: so it is with dropout.'''

        def forward_backward_batch(self, data, loss_function, forward_only=False):
            output = super().forward_backward_batch(data, loss_function, forward_only)
            return output if forward_only else attrs.evolve(output, log_probs=output.log_probs * 1.1)


    class Misnaming(FSDPEngine):
        '''It publishes a tensor's values under another one's name.'''

        def get_per_tensor_param(self):
            tensors, config = super().get_per_tensor_param()

            def spoilt():
                for name, tensor in tensors:
                    yield name, tensor.flip(0) * 3.0 if name.endswith("layers.0.mlp.down_proj.weight") else tensor

            return spoilt(), config


    class Shifting(TransformersServer):
        '''Its log-probs are of another distribution than its tokens.'''

        async def generate(self, request):
            result = await super().generate(request)
            shift = float(os.environ.get("SHIFT", "0"))
            return attrs.evolve(result, log_probs=tuple(value + shift for value in result.log_probs))


    class Wilful(SingleTurnAgent):
        '''It draws with a temperature of its own in a quarter of its runs.'''

        async def run(self, sampling_params, **fields):
            own = {"temperature": 0.3} if sampling_params["seed"] % 4 == 0 else {}
            return await super().run({**sampling_params, **own}, **fields)


    class Retelling(SingleTurnAgent):
        '''It returns another prompt than it has sent.'''

        async def run(self, sampling_params, **fields):
            output = await super().run(sampling_params, **fields)
            told = [attrs.evolve(one, prompt_ids=one.prompt_ids[2:]) for one in output.sequences]
            return attrs.evolve(output, sequences=tuple(told))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as an installer leaves it, with the plugins of :data:`PLUGINS`."""
    site = tmp_path_factory.mktemp("site")
    package, info = site / "mutants", site / "mutants-0.1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text(textwrap.dedent(MUTANTS))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mutants\nVersion: 0.1.0\n")
    entries: dict[str, list[str]] = {}
    for name, (kind, config) in PLUGINS.items():
        manifest = f'name = "{name}"\nkind = "{kind}"\nabi = "1.0"\nobject = "mutants.parts:{name.title()}"\n'
        manifest += f'config = "{config}"\n[capabilities]\nengine_log_probs = "full"\n'
        (package / f"{name}.toml").write_text(manifest)
        entries.setdefault(f"[jackfield.{kind}s]", []).append(f"{name} = mutants:{name}.toml")
    (info / "entry_points.txt").write_text("\n".join(line for head in entries for line in (head, *entries[head])))
    return site


@pytest.fixture
def run(jackfield: CommandServer, quickstart_settings: Settings, site: Path) -> Callable[..., Completed]:
    """Do a run with the mutants installed."""

    def do(name: str, *overrides: str, environment: dict[str, str] | None = None) -> Completed:
        variables = {"PYTHONPATH": str(site), **(environment or {})}
        return jackfield("run", *quickstart_settings(name, *GRADED, *overrides), environment=variables)

    return do


def steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def checked(lines: list[dict[str, Any]], name: str) -> list[int]:
    """The steps that were compared."""
    return [line["step"] for line in lines if f"{name}/mean" in line]


def refuses(done: Completed, folder: Path, after: int) -> str:
    """A run that the check has ended, with so many steps done; what it says."""
    assert (1, True) == (done.code, "[run.log-probs]" in done.error), done.error
    assert after == len(steps(folder)) if after else not (folder / "metrics.jsonl").exists() or not steps(folder)
    assert not (folder / "model").exists()
    return done.error


# -- honest runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "rollout", "train_mode"),
    [
        (("schedule.steps=10", "log_prob_check.every=4"), [1, 2, 5, 9], [1, 2, 5, 9]),
        (("algorithm.mini_batches=2", "algorithm.epochs=2", "cluster.micro_batch_tokens=64"), [1, 2], [1, 2]),
        (("schedule.sync_interval=2", "schedule.steps=4"), [1, 3], [1, 3]),
        (("sampling.top_p=0.6", "sampling.temperature=0.8"), [1, 2], [1, 2]),
        (("sampling.top_k=4",), [1, 2], [1, 2]),
        (("model.lora={rank: 4, dropout: 0.5}",), [1, 2], [1, 2]),
        (("algorithm.name=m2po",), [1, 2], [1, 2]),
        (("algorithm={name: ppo}", "critic.warmup_steps=1"), [2], [2]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else "",
)
def test_an_honest_run_is_near_zero(
    run: Callable[..., Completed],
    tmp_path: Path,
    overrides: tuple[str, ...],
    rollout: list[int],
    train_mode: list[int],
) -> None:
    """The first batch, the first of published weights, then every so many steps."""
    done = run("honest", "optimizer.lr=1e-2", *overrides)
    assert 0 == done.code, done.error
    lines = steps(tmp_path / "honest")
    assert (rollout, train_mode) == (checked(lines, ROLLOUT), checked(lines, TRAIN_MODE))
    parts = 2 if "algorithm.mini_batches=2" in overrides else 1
    for line in lines:
        if f"{ROLLOUT}/max" in line:
            assert 1e-4 > line[f"{ROLLOUT}/max"] >= line[f"{ROLLOUT}/mean"] >= 0.0
            assert line[f"{ROLLOUT}/tokens"] == line[f"{TRAIN_MODE}/tokens"]
            assert parts > 1 or line["response_tokens/mean"] * 16 == pytest.approx(line[f"{ROLLOUT}/tokens"])
            assert 1e-4 > line[f"{TRAIN_MODE}/max"] or "lora" in " ".join(overrides), "dropout was asked for"


def test_stale_samples_are_compared_with_inference_alone(run: Callable[..., Completed], tmp_path: Path) -> None:
    """One step off-policy: after the first batch, weights have changed since it was generated."""
    done = run("stale", "optimizer.lr=1e-2", "schedule.sync_offset=1", "schedule.steps=4", "log_prob_check.every=1")
    assert 0 == done.code, done.error
    lines = steps(tmp_path / "stale")
    assert [1, 2, 3, 4] == checked(lines, TRAIN_MODE)
    for line in lines:
        assert line["staleness/max"] == 0 or f"{ROLLOUT}/mean" not in line
        assert 1e-4 > line.get(f"{ROLLOUT}/max", 0.0)
        assert 1e-4 > line[f"{TRAIN_MODE}/max"]


def test_rounding_is_let_through(run: Callable[..., Completed], tmp_path: Path) -> None:
    done = run("rounded", "model.dtype=bfloat16")
    assert 0 == done.code, done.error
    line = steps(tmp_path / "rounded")[0]
    assert 0.0 < line[f"{ROLLOUT}/mean"] < 0.25


def test_it_can_be_switched_off(run: Callable[..., Completed], tmp_path: Path) -> None:
    settings = ("log_prob_check.every=0", "rollout.name=shifting", "log_prob_check.probe_tokens=0")
    done = run("unchecked", *settings, environment={"SHIFT": "-1"})
    assert 0 == done.code, done.error
    assert not checked(steps(tmp_path / "unchecked"), TRAIN_MODE)


def test_supervised_training_is_compared_with_inference(
    jackfield: CommandServer, made: Path, site: Path, tmp_path: Path
) -> None:
    """There is no rollout, but there may be dropout."""
    settings = (
        "examples/quickstart/warmup.yaml",
        f"model.path={made / 'model'}",
        f"data.train={made / 'demonstrations.jsonl'}",
        f"data.eval={made / 'held_out.jsonl'}",
        "schedule.steps=2",
        "evaluation.every=0",
        "observe={progress: false, curve: false, report_to: []}",
    )
    root = Path(__file__).resolve().parents[2]
    environment = {"PYTHONPATH": str(site)}
    honest = jackfield("run", *settings, f"folder={tmp_path / 'honest'}", folder=root, environment=environment)
    assert 0 == honest.code, honest.error
    lines = steps(tmp_path / "honest")
    assert ([1, 2], []) == (checked(lines, TRAIN_MODE), checked(lines, ROLLOUT))
    mutant = (*settings, f"folder={tmp_path / 'mutant'}", "engine.name=restless")
    done = jackfield("run", *mutant, folder=root, environment=environment)
    assert "dropout" in refuses(done, tmp_path / "mutant", 0)


# -- mutants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "shift", "after", "cause"),
    [
        (("engine.name=restless",), "0", 0, "(1) dropout"),
        (("engine.name=restless", "sampling.top_k=4"), "0", 0, "(1) dropout"),
        (
            ("engine.name=misnaming", "log_prob_check.probe_tokens=0"),
            "0",
            1,
            "(1) weights that were published as version 1",
        ),
        (("rollout.name=shifting",), "-1", 0, "(1) sampling parameters"),
        (("rollout.name=shifting",), "1", 0, "(1) tokens drawn from a sharper or filtered distribution"),
        (("rollout.name=shifting", "sampling.top_p=0.6"), "1", 0, "(1) tokens drawn from a sharper"),
        (("rollout.name=shifting", "sampling.top_k=8"), "-4", 0, "(1) sampling parameters"),
        (("rollout.name=shifting", "model.dtype=bfloat16"), "-1", 0, "(1) sampling parameters"),
        (("agent.name=wilful",), "0", 0, "(1) the agent's own sampling parameters"),
        (("agent.name=retelling",), "0", 0, "token ids"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_mutant_ends_the_run_at_the_first_batch_that_shows_it(
    run: Callable[..., Completed], tmp_path: Path, overrides: tuple[str, ...], shift: str, after: int, cause: str
) -> None:
    done = run("mutant", *overrides, "optimizer.lr=1e-3", environment={"SHIFT": shift})
    assert cause in refuses(done, tmp_path / "mutant", after)


def test_a_warning_lets_the_run_go_on(run: Callable[..., Completed], tmp_path: Path) -> None:
    done = run("warned", "log_prob_check.on_mismatch=warn", "engine.name=restless")
    assert (0, 3) == (done.code, len(steps(tmp_path / "warned")))
    assert "likely causes: (1) dropout" in done.error
    assert steps(tmp_path / "warned")[0][f"{TRAIN_MODE}/mean"] > 0.001


def test_what_importance_weights_correct_is_a_warning(run: Callable[..., Completed], tmp_path: Path) -> None:
    done = run("corrected", "log_prob_check.on_mismatch=correct", "rollout.name=shifting", environment={"SHIFT": "-1"})
    assert 0 == done.code, done.error
    assert 1.0 == pytest.approx(steps(tmp_path / "corrected")[0][f"{ROLLOUT}/mean"], abs=1e-3)


def test_the_first_batch_after_a_resume_is_compared(run: Callable[..., Completed], tmp_path: Path) -> None:
    """Whatever step it is: another server may be there. A resumed run's metrics are those of a whole one."""
    settings = ("rollout.name=shifting", "checkpoint.every=1", "log_prob_check.probe_tokens=0", "schedule.steps=3")
    assert 0 == run("resumed", *settings).code
    done = run("resumed", *settings[:-1], "schedule.steps=5", environment={"SHIFT": "-1"})
    assert (1, True) == (done.code, "[run.log-probs]" in done.error), done.error
    assert 0 == run("resumed", *settings[:-1], "schedule.steps=5").code
    lines = steps(tmp_path / "resumed")
    assert [1, 2, 3, 4, 5] == [line["step"] for line in lines]
    assert [1, 2] == checked(lines, ROLLOUT)
