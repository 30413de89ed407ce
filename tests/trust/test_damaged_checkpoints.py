"""A checkpoint that a disk, or a person, has changed: nothing in it is executed, and a run says what it does."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from jackfield.queue import read_ledger
from jackfield_commands import CommandServer, Completed

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "grpo.yaml"
OLDER, NEWER = "step_00000001", "step_00000002"
LEDGER = "queue/controller.sqlite"

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., Completed]


def arguments(made: Path, folder: Path, *overrides: str) -> list[str]:
    """Of ``jackfield run`` for a run of seconds with a checkpoint after each step."""
    return [
        str(QUICKSTART),
        f"folder={folder}",
        f"model.path={made / 'model'}",
        f"data.train={made / 'problems.jsonl'}",
        f"data.eval={made / 'held_out.jsonl'}",
        "data.groups_per_batch=2",
        "data.rollouts_per_group=2",
        "sampling.max_new_tokens=3",
        "reward.pattern=null",
        "reward.ground_truth_pattern=null",
        "reward.method=regex",
        "reward.expected='.*[0-4].*'",
        "schedule.steps=2",
        "checkpoint.every=1",
        "evaluation.every=0",
        "cluster.threads=1",
        "log_prob_check.probe_tokens=0",
        "observe.progress=false",
        "observe.curve=false",
        "observe.report_to=[]",
        *overrides,
    ]


@pytest.fixture(scope="module")
def pristine(jackfield: CommandServer, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, with a checkpoint after each; nobody changes it."""
    folder = tmp_path_factory.mktemp("pristine") / "run"
    done = jackfield("run", *arguments(made, folder))
    assert 0 == done.code, done.error
    assert [OLDER, NEWER] == sorted(path.name for path in (folder / "checkpoints").iterdir())
    return folder


@pytest.fixture
def copied(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "run"))


@pytest.fixture
def run(jackfield: CommandServer, made: Path, copied: Path) -> Start:
    """The same command again, for a third step."""

    def start(*overrides: str, steps: int = 3) -> Completed:
        return jackfield("run", *arguments(made, copied, f"schedule.steps={steps}", *overrides))

    return start


def steps(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "step"]


def files(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def refused(ended: Completed, *codes: str) -> None:
    """One of our errors, and no traceback."""
    assert 1 == ended.code, ended.out + ended.error
    assert any(f"[{code}]" in ended.error for code in codes), ended.error
    assert "Traceback" not in ended.error


class Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def payloads(file: Path) -> list[bytes]:
    """A plain pickle, and what ``torch.save`` makes of it."""
    saved = io.BytesIO()
    torch.save(Exploit(file), saved)
    return [pickle.dumps(Exploit(file)), saved.getvalue()]


def attest(checkpoint: Path) -> None:
    """Write a manifest that calls the files right as they are: its format is in docs/decisions/0003-checkpoints.md."""
    record = {name: (checkpoint / name).read_bytes() for name in files(checkpoint) if name != "manifest.json"}
    manifest = {
        "format": 2,
        "step": int(checkpoint.name[-8:]),
        "files": {name: [len(content), xxhash.xxh3_128_hexdigest(content)] for name, content in record.items()},
    }
    text = json.dumps(manifest)
    (checkpoint / "manifest.json").write_text(f'{text[:-1]}, "digest": "{xxhash.xxh3_128_hexdigest(text.encode())}"}}')


def test_the_payloads_work(tmp_path: Path) -> None:
    """Else the tests below could not fail."""
    for number, payload in enumerate(payloads(tmp_path / "made")):
        (tmp_path / "made").unlink(missing_ok=True)
        pickle.loads(payload) if number == 0 else torch.load(io.BytesIO(payload), weights_only=False)
        assert (tmp_path / "made").exists()


def test_no_pickle_in_a_checkpoint_is_executed(
    jackfield: CommandServer, pristine: Path, made: Path, tmp_path: Path
) -> None:
    """Each file of it in turn is a pickle, with a manifest that calls it right; so are files that nobody asked for."""
    names = [name for name in files(pristine / "checkpoints" / NEWER) if name != "manifest.json"]
    assert {"state.json", "actor", "queue"} == {name.partition("/")[0] for name in names}
    executed = tmp_path / "executed"
    for number, name in enumerate(names):
        folder = Path(shutil.copytree(pristine, tmp_path / str(number)))
        checkpoint = folder / "checkpoints" / NEWER
        (checkpoint / name).write_bytes(payloads(executed)[number % 2])
        attest(checkpoint)
        commands = [["run", *arguments(made, folder, "schedule.steps=3")]]
        if name.startswith("queue/"):
            commands.append(["queue", "ls", str(checkpoint)])
        elif "/tensors" in name:
            commands.append(["checkpoint", "export", str(checkpoint), str(folder / "out")])
        for command in commands:
            refused(jackfield(*command), "run.checkpoint-damaged", "engine.failed", "queue.invalid", "queue.store")
            assert not executed.exists(), (name, command)
        shutil.rmtree(folder)


def test_no_pickle_beside_the_files_of_a_checkpoint_is_executed(
    jackfield: CommandServer, copied: Path, run: Start, tmp_path: Path
) -> None:
    """Nor is one that is the manifest, or the mark of the end."""
    checkpoint, executed = copied / "checkpoints" / NEWER, tmp_path / "executed"
    plain, saved = payloads(executed)
    (checkpoint / ".metadata").write_bytes(plain)
    (checkpoint / "actor" / "tensors" / ".metadata").write_bytes(plain)
    (checkpoint / "actor" / "tensors" / "__0_0.distcp").write_bytes(saved)
    (checkpoint / "actor" / "optimizer.pt").write_bytes(saved)
    attest(checkpoint)
    (copied / "finished.json").write_bytes(plain)
    assert 0 == jackfield("checkpoint", "list", str(copied)).code
    assert 0 == jackfield("queue", "ls", str(copied)).code
    assert 0 == jackfield("checkpoint", "export", str(copied), str(tmp_path / "out")).code
    assert 0 == run().code
    for folder in (copied / "checkpoints").iterdir():
        (folder / "manifest.json").write_bytes(plain)
    refused(run(), "run.checkpoint-damaged")
    assert not executed.exists()


def test_no_pickle_of_a_model_is_executed(jackfield: CommandServer, made: Path, tmp_path: Path) -> None:
    for number, payload in enumerate(payloads(tmp_path / "executed")):
        model = Path(shutil.copytree(made / "model", tmp_path / f"model-{number}"))
        for file in model.glob("*.safetensors"):
            file.unlink()
        (model / "pytorch_model.bin").write_bytes(payload)
        ended = jackfield("run", *arguments(made, tmp_path / "run", f"model.path={model}"))
        refused(ended, "engine.model")
        assert not (tmp_path / "executed").exists()
        assert not (tmp_path / "run").exists()


def damage(file: Path, how: str, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if how == "delete":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_names_the_damaged(
    jackfield: CommandServer, pristine: Path, made: Path, tmp_path: Path
) -> None:
    """Whatever file of the newest one has a flipped bit, is cut or is gone: the third step is that of a whole run."""
    draw, whole = random.Random(12), tmp_path / "whole"
    assert 0 == jackfield("run", *arguments(made, whole, "schedule.steps=3")).code
    expected = (whole / "model" / "model.safetensors").read_bytes()
    names = [
        name
        for name in files(pristine / "checkpoints" / NEWER)
        if (pristine / "checkpoints" / NEWER / name).stat().st_size
    ]
    for number, name in enumerate(names):
        folder = Path(shutil.copytree(pristine, tmp_path / "damaged"))
        damage(folder / "checkpoints" / NEWER / name, ("flip", "cut", "delete")[(number + number // 3) % 3], draw)
        if number % 3:  # cheaper, and it looks in the same way
            ended = jackfield("checkpoint", "export", str(folder), str(folder / "out"))
            assert (0, True) == (ended.code, "model of step 1" in ended.out), (name, ended.error)
        else:
            ended = jackfield("run", *arguments(made, folder, "schedule.steps=3"))
            assert 0 == ended.code, (name, ended.error)
            assert [1, 2, 3] == steps(folder), name
            assert expected == (folder / "model" / "model.safetensors").read_bytes(), name
            assert (folder / "checkpoints" / f"{NEWER}.damaged").is_dir()
        assert f"{NEWER} is damaged" in ended.error, name
        assert name in ended.error
        assert "of step 1" in ended.error
        shutil.rmtree(folder)


def test_every_bit_of_the_small_files_counts(jackfield: CommandServer, pristine: Path, tmp_path: Path) -> None:
    """Many flips at once, without a run for each: exporting finds the checkpoint damaged, or it is not damaged."""
    draw = random.Random(3)
    for name in ("manifest.json", "state.json", "actor/engine.json", "queue/controller.sqlite"):
        for _ in range(3):
            folder = Path(shutil.copytree(pristine, tmp_path / "flipped"))
            damage(folder / "checkpoints" / NEWER / name, "flip", draw)
            refused(
                jackfield("checkpoint", "export", str(folder / "checkpoints" / NEWER), str(tmp_path / "out")),
                "run.checkpoint-damaged",
            )
            shutil.rmtree(folder)


def test_a_damaged_older_checkpoint_does_not_matter(copied: Path, run: Start) -> None:
    (copied / "checkpoints" / OLDER / "manifest.json").write_text("{")
    (copied / "checkpoints" / OLDER / "state.json").unlink()
    ended = run()
    assert 0 == ended.code, ended.error
    assert [1, 2, 3] == steps(copied)
    assert not ended.error


def test_without_a_whole_checkpoint_the_run_says_so_and_resume_false_begins_anew(
    jackfield: CommandServer, copied: Path, run: Start, tmp_path: Path
) -> None:
    """Also where nothing in the folder is what it should be."""
    for name in (OLDER, NEWER):
        (copied / "checkpoints" / name / "state.json").write_bytes(b"\xff\x00")
    before = sorted(path.name for path in (copied / "checkpoints").iterdir())
    ended = run()
    refused(ended, "run.checkpoint-damaged")
    assert "checkpoint.resume=false" in ended.error
    assert OLDER in ended.error
    assert NEWER in ended.error
    assert before == sorted(path.name for path in (copied / "checkpoints").iterdir()), "nothing was moved"
    refused(jackfield("checkpoint", "export", str(copied), str(tmp_path / "out")), "run.checkpoint-damaged")
    refused(jackfield("queue", "ls", str(copied / "checkpoints" / "absent")), "run.no-checkpoint")
    for path in copied.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".arrow", ".bin") and "model" not in path.parts:
            path.write_bytes(b"\x80\x04}\xff")
    (copied / "checkpoints" / "step_00000007").write_text("a file")
    ended = run("checkpoint.resume=false", steps=1)
    assert 0 == ended.code, ended.error
    assert "Traceback" not in ended.error
    assert [1] == steps(copied)
    assert ["step_00000001"] == [path.name for path in (copied / "checkpoints").iterdir()]


def test_a_checkpoint_of_an_older_version_is_refused_with_its_format(copied: Path, run: Start) -> None:
    """It is not damaged: what the run did must not be forgotten."""
    old = {"format": 1, "step": 2, "files": {}}
    (copied / "checkpoints" / NEWER / "manifest.json").write_text(json.dumps(old))
    refused(run(), "run.checkpoint-format")
    assert 0 == run("checkpoint.resume=false", steps=1).code


@pytest.mark.parametrize("how", ["flip", "delete", "empty"])
def test_a_damaged_mark_of_the_end_costs_nothing_but_the_model_again(copied: Path, run: Start, how: str) -> None:
    marker, model = copied / "finished.json", (copied / "model" / "model.safetensors").read_bytes()
    if how == "empty":
        marker.write_bytes(b"")
    else:
        damage(marker, how, random.Random(5))
    ended = run(steps=2)
    assert 0 == ended.code, ended.error
    assert (how != "delete") == ("finished.json is damaged" in ended.error)
    assert model == (copied / "model" / "model.safetensors").read_bytes()
    assert [1, 2] == steps(copied)
    assert "holds the finished run" not in ended.out
    assert 0 == run(steps=2).code


def test_checkpoints_are_listed_with_their_damage(jackfield: CommandServer, copied: Path, tmp_path: Path) -> None:
    """And the newest whole one is exported, with a warning."""
    (copied / "checkpoints" / NEWER / "actor" / "engine.json").unlink()
    listed = jackfield("checkpoint", "list", str(copied), "--json")
    assert [(1, False), (2, True)] == [(row["step"], "damaged" in row) for row in json.loads(listed.out)]
    assert "actor/engine.json" in jackfield("checkpoint", "list", str(copied)).out
    done = jackfield("checkpoint", "export", str(copied), str(tmp_path / "out"))
    assert (0, True) == (done.code, "model of step 1" in done.out)
    assert f"{NEWER} is damaged" in done.error
    assert (copied / "checkpoints" / NEWER).is_dir(), "looking changes nothing"


@pytest.mark.parametrize("how", ["half", "delete", "flip", "entry"])
def test_a_ledger_that_is_not_the_checkpoint_s_is_refused(copied: Path, run: Start, how: str) -> None:
    ledger = copied / LEDGER
    content = ledger.read_bytes()
    if how == "half":
        break_ledger(copied)
    elif how == "delete":
        ledger.unlink()
    elif how == "flip":
        flip_ledger(copied)
    else:
        change(ledger, "delete from ledger where number = 2")
    ended = run()
    refused(ended, "queue.ledger")
    assert "checkpoint.resume=false" in ended.error
    if how == "half":
        before = entries(copied, content)
        assert 0 == run().code
        assert [1, 2, 3] == steps(copied)
        assert before == entries(copied)[: len(before)]
    if how == "delete":
        assert 0 == run("checkpoint.resume=false", steps=1).code
        assert [1] == steps(copied)


def entries(folder: Path, restored: bytes | None = None) -> list[Any]:
    """Read the ledger, put back from a copy where one is given."""
    if restored is not None:
        (folder / LEDGER).write_bytes(restored)
    return list(read_ledger(folder))


def change(ledger: Path, statement: str) -> None:
    with closing(sqlite3.connect(ledger)) as db:
        db.execute(statement)
        db.commit()


def test_a_ledger_that_is_damaged_after_the_checkpoint_is_cut_there(copied: Path, run: Start) -> None:
    """What is beyond the checkpoint is done again anyway."""
    before = entries(copied)
    row = (len(before) + 1, '{"event":"ack"}')
    change(copied / LEDGER, f"insert into ledger values({row[0]}, 'ack', null, null, '{row[1]}', '00')")
    ended = run()
    assert 0 == ended.code, ended.error
    assert "the ledger is damaged after the checkpoint" in ended.error
    assert [1, 2, 3] == steps(copied)
    assert before == entries(copied)[: len(before)]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder of a run, but for the lock that says who looked at it last."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.name != ".lock"}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


def break_ledger(folder: Path) -> None:
    """Cut the file in half."""
    ledger = folder / LEDGER
    ledger.write_bytes(ledger.read_bytes()[: ledger.stat().st_size // 2])


def flip_ledger(folder: Path) -> None:
    """Flip a bit inside of an entry."""
    content = bytearray((folder / LEDGER).read_bytes())
    content[content.index(b'{"event":"ack"') + len('{"event":"')] ^= 1
    (folder / LEDGER).write_bytes(content)


def break_every_checkpoint(folder: Path) -> None:
    for name in (OLDER, NEWER):
        (folder / "checkpoints" / name / "state.json").write_text("[]")


def break_newer(folder: Path) -> None:
    """The newest whole checkpoint is of a run with other data."""
    (folder / "checkpoints" / NEWER / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "code", "given"),
    [
        (break_ledger, "queue.ledger", ""),
        (flip_ledger, "queue.ledger", ""),
        (lambda folder: (folder / LEDGER).unlink(), "queue.ledger", ""),
        (break_every_checkpoint, "run.checkpoint-damaged", ""),
        (break_newer, "run.changed", "seed=9"),
    ],
    ids=["half a ledger", "a bit of the ledger", "no ledger", "every checkpoint", "another run"],
)
def test_a_refused_start_changes_nothing(
    run: Start, copied: Path, damage: Callable[[Path], None], code: str, given: str
) -> None:
    """Nothing is repaired, renamed or removed, and nothing is said of going on."""
    (copied / "checkpoints" / "step_00000003.partial").mkdir()
    damage(copied)
    before = contents(copied)
    ended = run(*filter(None, [given]))
    refused(ended, code)
    assert before == contents(copied)
    assert "resumed" not in ended.out + ended.error


def test_a_manifest_that_is_no_object_is_damaged(run: Start, copied: Path) -> None:
    """JSON of another kind: the newest whole checkpoint is taken, and the message is not Python's."""
    (copied / "checkpoints" / NEWER / "manifest.json").write_text("[]")
    ended = run()
    assert 0 == ended.code, ended.error
    assert "TypeError" not in ended.error
    assert f"{NEWER}/manifest.json" in ended.error
    for manifest in copied.glob("checkpoints/step_????????/manifest.json"):
        manifest.write_text("[]")
    ended = run(steps=4)
    refused(ended, "run.checkpoint-damaged")
    assert "TypeError" not in ended.error
