"""Bad input to ``jackfield run``: one error that says what to do, exit code 1, no process left, nothing lost.

The real command runs in a process of its own, on plugins and data that are wrong in one way each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from jackfield.queue import read_ledger
from jackfield.trainer.checkpoint import CheckpointStore
from jackfield_commands import CommandServer, Completed

from .conftest import metrics

pytestmark = pytest.mark.timeout(180)  # seconds apart from each other; on a busy machine, imports alone take a minute

JACKFIELD = shutil.which("jackfield", path=str(Path(sys.executable).parent))

#: What a run left in its folder before, and a run that is refused leaves as it is.
EARLIER = {"metrics.jsonl": "of an earlier run\n", "model/config.json": "{}", "config.yaml": "name: earlier\n"}

REWARD = """
from jackfield.abc.reward import RewardAgent, ScoreResult

class Agent(RewardAgent):
    async def compute_score(self, request):
        return ScoreResult(score=1.0)
"""
CONFIG = """
import attrs

@attrs.frozen
class Config:
    pass
"""
MANIFEST = (
    'name = "{name}"\nkind = "{kind}"\nabi = "1.0"\nobject = "{name}.plugin:Agent"\nconfig = "{name}.config:Config"\n'
)


@attrs.frozen
class Ended:
    """How a command ended."""

    stderr: str
    folder: Path  #: of the run


class Workplace:
    """A folder with tasks, a configuration, and distributions that only the command sees."""

    def __init__(self, folder: Path, model: Path, server: CommandServer) -> None:
        self.folder, self.run, self.site = folder, folder / "run", folder / "site"
        self.server, self.of_its_own = server, False
        self.tasks = folder / "tasks.jsonl"
        self.tasks.write_text("".join(f'{{"question": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(1, 9)))
        self.config = folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(self.settings(model)))
        self.site.mkdir()

    def settings(self, model: Path) -> dict[str, Any]:
        """Of four small steps."""
        return {
            "folder": str(self.run),
            "model": {"path": str(model)},
            "data": {"train": str(self.tasks), "groups_per_batch": 2, "rollouts_per_group": 2},
            "sampling": {"max_new_tokens": 4},
            "schedule": {"steps": 4, "max_retries": 1},
            "reward": {"name": "rules", "pattern": None, "ground_truth_pattern": None},
            "checkpoint": {"every": 1},
            "observe": {"progress": False, "curve": False, "report_to": []},
        }

    def install(self, name: str, kind: str = "reward", manifest: str = MANIFEST, **modules: str) -> None:
        """What an installer leaves of a plugin: a package, and metadata with an entry point."""
        files = {"__init__": "", "config": CONFIG, "plugin": REWARD, **modules}
        package, info = self.site / name, self.site / f"{name}-0.1.0.dist-info"
        package.mkdir()
        info.mkdir()
        for module, text in files.items():
            (package / f"{module}.py").write_text(textwrap.dedent(text))
        (package / "plugin.toml").write_text(manifest.format(name=name, kind=kind))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[jackfield.{kind}s]\n{name} = {name}:plugin.toml\n")

    def without_torch(self) -> None:
        """Let an import of torch or transformers be an error of another kind than the one that is expected.

        A command has an interpreter of its own then; else it is a fork of one that has imported them.
        """
        self.of_its_own = True
        for name in ("torch", "transformers"):
            (self.site / name).mkdir()
            (self.site / name / "__init__.py").write_text(f"raise AssertionError('{name} was imported')")

    def fails(self, code: str, *overrides: str, through: Sequence[str] = (), seconds: float = 170.0) -> Ended:
        """Run the command, ``through`` another one; it has to end with one error of this code, and leave no process."""
        mark = uuid.uuid4().hex
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.site), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "JACKFIELD_TEST_MARK": mark,
        }
        arguments = ["run", str(self.config), *overrides]
        if through or self.of_its_own:
            assert JACKFIELD is not None
            completed = subprocess.run(
                [*through, JACKFIELD, *arguments],
                cwd=self.folder,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            done = Completed(completed.returncode, completed.stdout, completed.stderr)
        else:
            done = self.server(*arguments, environment=environment, folder=self.folder, seconds=seconds)
        assert 1 == done.code, done.out + done.error
        assert [] == list(marked(mark))
        assert "Traceback" not in done.error
        assert done.error.startswith(f"[{code}] "), done.error
        for part in ("expected", "found", "fix"):
            assert f"\n  {part}: " in done.error, f"no {part}: {done.error}"
        return Ended(done.error, self.run)

    def refuses(self, code: str, *overrides: str, seconds: float = 170.0) -> str:
        """The same, and what an earlier run left is not touched; the error's text."""
        for name, text in EARLIER.items():
            (self.run / name).parent.mkdir(parents=True, exist_ok=True)
            (self.run / name).write_text(text)
        ended = self.fails(code, *overrides, seconds=seconds)
        files = {str(file.relative_to(self.run)): file.read_text() for file in self.run.rglob("*") if file.is_file()}
        assert EARLIER == files
        return ended.stderr


def marked(mark: str) -> Iterator[str]:
    """Command lines of the processes that have inherited an environment with this mark."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                yield f"{process.name}: {(process / 'cmdline').read_text()}"
        except OSError:  # it has ended, or is another user's
            continue


@pytest.fixture
def place(tmp_path: Path, made: Path, jackfield: CommandServer) -> Workplace:
    return Workplace(tmp_path, made / "model", jackfield)


@pytest.fixture
def quick(place: Workplace) -> Workplace:
    """A workplace where torch and transformers cannot be imported: what is refused here is refused at once."""
    place.without_torch()
    return place


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_unknown_plugin(quick: Workplace) -> None:
    """The error lists what is installed, and what cannot be used and why."""
    quick.install("whole")
    quick.install("damaged", manifest="name = ")
    quick.install("raising", plugin="raise RuntimeError('boom')")
    error = quick.refuses("plugin.not-found", "reward=unheard-of")
    installed = error.partition("installed: ")[2].partition(";")[0].split(", ")
    assert {"function", "rules", "whole"} <= set(installed)
    assert "damaged ([plugin.manifest-invalid] the manifest is not TOML)" in error
    assert "raising cannot be used: importing raising.plugin failed: RuntimeError: boom" in error
    assert "whole cannot be used" not in error


def test_a_slip_of_the_pen_is_answered_without_importing_an_engine(quick: Workplace) -> None:
    assert "did you mean 'fsdp'?" in quick.refuses("plugin.not-found", "engine=fdsp")


def test_plugin_of_a_newer_abi(quick: Workplace) -> None:
    quick.install("newer", manifest=MANIFEST.replace("1.0", "1.99"))
    assert "pip install --upgrade jackfield" in quick.refuses("plugin.abi", "reward=newer")


def test_broken_manifest(quick: Workplace) -> None:
    quick.install("damaged", manifest=MANIFEST + "colour = 'red'\n")
    error = quick.refuses("plugin.manifest-invalid", "reward=damaged")
    assert "unknown key 'colour'" in error
    assert str(quick.site / "damaged" / "plugin.toml") in error


def test_import_error_inside_a_plugin(quick: Workplace) -> None:
    quick.install("raising", plugin="import package_that_nobody_has")
    error = quick.refuses("plugin.import", "reward=raising")
    assert "No module named 'package_that_nobody_has'" in error
    assert "pip install 'package_that_nobody_has'" in error


def test_manifest_names_a_missing_interpreter(quick: Workplace) -> None:
    quick.install("elsewhere", manifest=MANIFEST + "[env]\npython = '/nowhere/bin/python'\n")
    assert "/nowhere/bin/python" in quick.refuses("plugin.interpreter", "reward=elsewhere")


def test_manifest_names_another_interpreter(quick: Workplace) -> None:
    """One process cannot have two: nobody is told that it would be used."""
    other = quick.folder / "python"
    other.symlink_to(sys.executable)
    quick.install("elsewhere", manifest=MANIFEST + f"[env]\npython = '{other}'\n")
    assert f"found: {other}" in quick.refuses("plugin.interpreter", "reward=elsewhere")


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "code", "told"),
    [
        ("schedule.steps=many", "config.wrong-type", "'many' is of type str"),
        ("schedule.stepz=3", "config.unknown-key", "did you mean 'steps'?"),
        ("reward.ignore_kase=true", "config.unknown-key", "did you mean 'ignore_case'?"),
        ("data.max_prompt_tokens=126", "config.invalid-value", "126 + 4"),
        ("model.path=no/such/folder", "engine.model", "no such folder"),
        ("reward={name: function, path: a.py:f, python: no/python}", "plugin.interpreter", "reward.python"),
    ],
)
def test_wrong_setting(quick: Workplace, override: str, code: str, told: str) -> None:
    error = quick.refuses(code, override)
    assert override.partition("=")[0] in error
    assert told in error


# -- data and tokens ---------------------------------------------------------------------------------------------------


def test_missing_data_file(quick: Workplace) -> None:
    assert "nowhere.jsonl" in quick.refuses("data.missing", "data.train=nowhere.jsonl")


@pytest.mark.parametrize(
    ("line", "told"),
    [('{"question": "1 +', "a line is not JSON"), ('{"question": "1 + 1 ="}', "field 'answer' is missing")],
    ids=["no JSON", "a field is missing"],
)
def test_malformed_data_line(quick: Workplace, line: str, told: str) -> None:
    lines = quick.tasks.read_text().splitlines()
    quick.tasks.write_text("\n".join([*lines[:4], line, *lines[4:]]))
    error = quick.refuses("data.malformed")
    assert f"{quick.tasks}:5" in error
    assert told in error


def changed_model(place: Workplace, file: str, **values: Any) -> str:
    """An override: the model, with some values of one of its files changed."""
    source = Path(yaml.safe_load(place.config.read_text())["model"]["path"])
    model = place.folder / "model"
    shutil.copytree(source, model)
    content: Mapping[str, Any] = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps({**content, **values}))
    return f"model.path={model}"


def test_tokenizer_without_a_chat_template(place: Workplace) -> None:
    override = changed_model(place, "tokenizer_config.json")
    (place.folder / "model" / "chat_template.jinja").unlink()
    assert "data.chat_template" in place.refuses("data.no-chat-template", override)


def test_vocabulary_of_another_model(place: Workplace) -> None:
    assert "below 20" in place.refuses("data.vocabulary", changed_model(place, "config.json", vocab_size=20))


def test_prompt_longer_than_the_limit(place: Workplace) -> None:
    with place.tasks.open("a") as file:
        file.write('{"question": "' + "1 + " * 40 + '1 =", "answer": "41"}\n')
    error = place.refuses("data.prompt-too-long", "cluster.max_model_len=32")
    assert f"{place.tasks}:9" in error
    assert "at most 31 tokens" in error


# -- while it runs -----------------------------------------------------------------------------------------------------


def kept_first_step(ended: Ended) -> None:
    """What a step before the failure wrote is there, and so is the traceback of the failure."""
    assert 1 in [line["step"] for line in metrics(ended.folder) if line["kind"] == "step"]
    ledger = list(read_ledger(ended.folder))
    assert "commit" in [entry["event"] for entry in ledger]
    assert list((ended.folder / "checkpoints").iterdir())
    assert (ended.folder / "samples" / "train.jsonl").stat().st_size > 0
    assert "Traceback" in (ended.folder / "error.txt").read_text()


def test_not_a_number(place: Workplace) -> None:
    ended = place.fails(
        "engine.not-finite",
        "reward={name: rules, method: regex, expected: '.*[0-4].*', pattern: null, ground_truth_pattern: null}",
        "optimizer={lr: 1e30, clip_grad: null}",
        "data.rollouts_per_group=8",
    )
    assert "the gradients overflowed" in ended.stderr
    kept_first_step(ended)


def write_reward(place: Workplace, text: str) -> str:
    """An override: a reward function of one's own."""
    file = place.folder / "my_reward.py"
    file.write_text(textwrap.dedent(text))
    return f"reward={{name: function, path: '{file}:compute_score', try_first: false}}"


def test_reward_function_that_raises(place: Workplace) -> None:
    override = write_reward(
        place,
        """
        calls = []

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            calls.append(ground_truth)
            if len(calls) > 8:  # in the third step
                raise LookupError("no such answer")
            return 1.0
        """,
    )
    ended = place.fails("reward.too-many-failures", override)
    assert "LookupError: no such answer" in ended.stderr
    assert f"{place.folder / 'my_reward.py'}" in ended.stderr
    kept_first_step(ended)


def test_reward_function_that_never_returns(place: Workplace) -> None:
    """Its process, and what it has started, are gone when the command ends."""
    override = write_reward(
        place,
        """
        import subprocess

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            subprocess.run(["sleep", "1000"])
        """,
    )
    ended = place.fails("reward.too-many-failures", override, "deadlines.reward=0.5")
    assert "reward timeout: " in ended.stderr
    assert "waited 0.5 s" in ended.stderr


SERVER = '''
"""A server in a process of its own, which dies in the third step."""

import asyncio
import json
import sys

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.rollout import (
    BaseRolloutServer, GenerateResult, HealthReport, ServerInfo, WeightReceipt, WorkerReceipt
)
from jackfield.plugins import load_plugin
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver

PROGRAM = """
import json, sys
for number, line in enumerate(sys.stdin):
    if number == 10:
        sys.exit(9)
    print(json.dumps([3, 4]), flush=True)
"""


class Agent(BaseRolloutServer):
    async def start(self):
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdin=pipe, stdout=pipe)
        self.turn, self.version = asyncio.Lock(), 0
        return ServerInfo(replica=self.context.replica)

    async def generate(self, request):
        async with self.turn:
            self.process.stdin.write(b"generate\\n")
            answer = await self.process.stdout.readline()
        if not answer:
            raise ConnectionResetError("the server closed the connection")
        tokens = tuple(json.loads(answer))
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tokens,
            log_probs=(-1.0,) * len(tokens),
            weight_versions=(self.version,) * len(tokens),
            finish_reason="length",
        )

    async def update_weights(self, request):
        """Take the weights, and do without them."""
        loaded = load_plugin("checkpoint_engine", request.checkpoint_engine)
        receiver = WeightReceiver(loaded.build({}, CheckpointEngineContext(end="receiver")))
        received = receiver.tensors(request.connect[0], request.version)
        digests = {name: digest(tensor) async for name, tensor in received}
        self.version = request.version
        receipt = WorkerReceipt(worker=0, digests=digests)
        return WeightReceipt(version=request.version, replica=self.context.replica, workers=(receipt,))

    async def health(self):
        code = await self.process.wait()
        return HealthReport(healthy=False, detail=f"exit code {code}")

    async def stop(self):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def generate_stream(self, request):
        raise NotImplementedError

    async def abort(self, request):
        raise NotImplementedError

    pause = resume = sleep = wake_up = abort
'''


def test_rollout_server_that_dies_in_the_middle_of_a_step(place: Workplace) -> None:
    place.install("mortal", kind="rollout", plugin=SERVER)
    unchecked = ("log_prob_check.probe_tokens=0", "log_prob_check.every=0")  # its log-probs are made up
    ended = place.fails("rollout.stopped", "rollout=mortal", *unchecked)
    assert "rollout replica 0 died" in ended.stderr
    assert "the server closed the connection" in ended.stderr
    assert "exit code 9" in ended.stderr
    kept_first_step(ended)


# -- a full disk -------------------------------------------------------------------------------------------------------

#: The run's folder is on a disk of its own, which only the command sees; what is on it in the end is copied.
SMALL_DISK = """
mount -t tmpfs -o size="$1" tmpfs "$2" && cp -a "$3/." "$2"; disk="$2"; kept="$3"; shift 3
"$@"; code=$?
cp -a "$disk/." "$kept"; exit $code
"""


def small_disk(place: Workplace, size: str) -> tuple[tuple[str, ...], Path]:
    """What a command goes through, and where the contents of the disk are before and after."""
    kept = place.folder / "kept"
    for folder in (kept, place.run):
        folder.mkdir(exist_ok=True)
    return ("unshare", "--mount", "sh", "-c", SMALL_DISK, "sh", size, str(place.run), str(kept)), kept


@pytest.mark.needs("mount")
def test_no_room_for_the_configuration(quick: Workplace) -> None:
    """Before the run begins; what an earlier run left is as it was."""
    through, kept = small_disk(quick, "8k")  # two pages: the file that is there, and the lock
    (kept / "config.yaml").write_text(EARLIER["config.yaml"])
    ended = quick.fails("run.storage", "cluster.name=ray", through=through)
    assert "No space left on device (0 MB of the disk were free)" in ended.stderr
    assert EARLIER["config.yaml"] == (kept / "config.yaml").read_text()
    assert {".lock", "config.yaml"} == {file.name for file in kept.iterdir()}


@pytest.mark.needs("mount")
def test_no_room_for_a_checkpoint(place: Workplace) -> None:
    """Earlier checkpoints are whole. ``test_kill.py`` goes on from there."""
    through, kept = small_disk(place, "10m")
    ended = place.fails("run.checkpoint-write", through=through)
    assert re.search(r"\(\d MB of the disk were free\)", ended.stderr), ended.stderr
    kept_first_step(Ended(ended.stderr, kept))
    assert CheckpointStore(kept / "checkpoints", keep=2).newest() is not None, "its files are as the manifest says"
