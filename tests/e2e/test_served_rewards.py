"""A run whose reward another process serves, which is killed in the middle and starts again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jackfield.queue import effective_acks, read_ledger
from jackfield_commands import Command, CommandServer

pytestmark = pytest.mark.timeout(180)

STEPS, SAMPLES = 4, 16
SECONDS = 60.0
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open("{calls}", "a") as calls:
        calls.write("x\\n")
    return len(solution_str)
"""


def wait_until(done: Callable[[], bool], command: Command) -> None:
    """Wait for something that a command does."""
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end, command.error
        assert command.running, command.error
        time.sleep(0.01)


def test_a_run_survives_the_service_and_the_service_the_run(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The run makes all of its steps although the service is killed; the service scores for a second run, too."""
    calls, folder = tmp_path / "calls", tmp_path / "service"
    (tmp_path / "length.py").write_text(FUNCTION.format(calls=calls))
    reward = {"name": "function", "path": f"{tmp_path / 'length.py'}:compute_score"}
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({"folder": str(folder), "rewards": {"length": {"reward": reward}}}))  # JSON is YAML

    def serve() -> Command:
        service = jackfield.start("rewards", "serve", str(file), "--json")
        wait_until(lambda: "\n" in service.out, service)
        assert json.loads(service.out)["rewards"] == ["length"]
        return service

    def start(name: str) -> Command:
        served = f"reward={{name: service, address: {folder / 'address.json'}, served: length}}"
        return jackfield.start("run", *quickstart_settings(name, f"schedule.steps={STEPS}", served))

    service, run = serve(), start("first")
    wait_until(lambda: calls.is_file() and calls.read_text().count("x") > SAMPLES, run)
    service.kill()
    assert service.wait(30).code == 137
    service = serve()
    assert run.wait(120).code == 0, run.error
    second = start("second")
    assert second.wait(120).code == 0, second.error
    for name in ("first", "second"):
        assert len(effective_acks(read_ledger(tmp_path / name))["trainer"]) == STEPS * SAMPLES
    status = jackfield("rewards", "status", str(folder), "--json")
    assert [each["name"] for each in json.loads(status.out)] == ["length"]
    service.send(15)
    assert service.wait(30).code == 143
