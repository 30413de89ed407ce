"""The table of modes (docs/reference/modes.md): what it says works on every runtime; the rest is refused by name."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from jackfield.compose.modes import MODES, PLACEMENTS, RUNTIMES, why_not
from jackfield_commands import CommandServer

from .test_collected import lines, ok, wait_until
from .test_modes import GRADED

pytestmark = pytest.mark.timeout(240)

Settings = Callable[..., list[str]]
SMALL = (
    "data.groups_per_batch=2",
    "data.rollouts_per_group=2",
    "sampling.max_new_tokens=3",
    "schedule.steps=2",
    *GRADED,
)
CELLS = list(product(MODES, RUNTIMES, PLACEMENTS))
WORKING = [cell for cell in CELLS if why_not(*cell) is None]


@pytest.fixture(scope="module")
def collected(jackfield: CommandServer, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with samples for the mode train."""
    file = Path(__file__).parents[2] / "examples" / "quickstart" / "grpo.yaml"
    folder = tmp_path_factory.mktemp("collected")
    settings = (f"folder={folder}", f"model.path={made / 'model'}", f"data.train={made / 'problems.jsonl'}")
    ok(jackfield("run", str(file), "mode=explore", "evaluation.every=0", "observe.progress=false", *settings, *SMALL))
    return folder


@pytest.fixture
def arguments(quickstart_settings: Settings, made: Path, tmp_path: Path, collected: Path) -> Callable[..., list[str]]:
    def of(mode: str, placement: str, *more: str) -> list[str]:
        chosen = {
            "offline": ("algorithm={name: sft}", f"data.train={made / 'demonstrations.jsonl'}"),
            "train": (f"data.samples={collected}",),
        }
        weights = f"checkpoint_engine={{name: file, folder: {tmp_path / 'weights'}}}"
        settings = (f"mode={mode}", f"cluster.placement={placement}", weights, *SMALL, *chosen.get(mode, ()), *more)
        return quickstart_settings("run", *settings)

    return of


@pytest.mark.parametrize(("mode", "placement"), [(mode, place) for mode, name, place in WORKING if name == "inline"])
def test_inline(
    jackfield: CommandServer, arguments: Callable[..., list[str]], tmp_path: Path, mode: str, placement: str
) -> None:
    ok(jackfield("run", *arguments(mode, placement)))
    assert [1, 2] == [line["step"] for line in lines(tmp_path / "run")]


@pytest.mark.parametrize(
    ("mode", "placement"), [(mode, place) for mode, name, place in WORKING if name == "distributed"]
)
def test_distributed(
    jackfield: CommandServer, arguments: Callable[..., list[str]], tmp_path: Path, mode: str, placement: str
) -> None:
    command = arguments(mode, placement)
    with ExitStack() as stack:
        controller = jackfield.start("queue", "serve", *command)
        stack.callback(controller.wait)
        stack.callback(controller.send, signal.SIGTERM)
        wait_until(controller, lambda: "is served" in controller.out)
        joined = ["--role", "explore"]
        main = ["--role", "train", *command]
        if mode == "explore":
            main = [*command, f"queue.address={tmp_path / 'run' / 'queue' / 'address.json'}"]
        others = [] if mode == "train" else [jackfield.start("run", *joined, *command)]
        ok(jackfield("run", *main))
        for other in others:
            ok(other.wait())
    assert [1, 2] == [line["step"] for line in lines(tmp_path / "run")]


@pytest.mark.parametrize(("mode", "placement"), [(mode, place) for mode, name, place in WORKING if name == "ray"])
def test_ray(
    jackfield: CommandServer,
    arguments: Callable[..., list[str]],
    ray_environment: dict[str, str],
    ray_interpreters: str,
    ray_cluster: str,
    tmp_path: Path,
    mode: str,
    placement: str,
) -> None:
    ray = ("cluster.name=ray", f"cluster.ray.address={ray_cluster}", ray_interpreters)
    ok(jackfield("run", *arguments(mode, placement, *ray), environment=ray_environment))
    assert [1, 2] == [line["step"] for line in lines(tmp_path / "run")]


@pytest.mark.parametrize(("mode", "runtime", "placement"), [cell for cell in CELLS if cell not in WORKING])
def test_what_does_not_work_is_refused_by_name(
    jackfield: CommandServer,
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    mode: str,
    runtime: str,
    placement: str,
) -> None:
    more = ("cluster.name=ray",) if runtime == "ray" else ()
    role = ("--role", "train") if runtime == "distributed" else ()
    command = (*role, *arguments(mode, placement, *more))
    refused = jackfield("run", *command)
    assert refused.error == jackfield("config", "validate", *command).error
    no = why_not(mode, runtime, placement)
    assert no is not None
    assert 1 == refused.code
    assert f"at {no[0]}" in refused.error
    assert no[1] in refused.error
    assert not (tmp_path / "run").exists()


def test_the_old_name_of_the_placement_is_refused_with_the_new_one(
    jackfield: CommandServer, quickstart_settings: Settings
) -> None:
    refused = jackfield("run", *quickstart_settings("run", "cluster.ray.placement=colocated"))
    assert 1 == refused.code
    assert "cluster.ray.placement" in refused.error
    assert "cluster.placement: shared" in refused.error
