"""What the command makes of a run's file, and how it prints addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.config import make_config
from jackfield_gateway.command import gateway_config, told_addresses


def settings(tmp_path: Path, agent: dict[str, Any], **options: Any) -> dict[str, Any]:
    values = {"folder": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "agent": agent}
    config = gateway_config(make_config(values), options.get("host"), options.get("port"))
    assert "gateway" == config.agent.name
    return dict(config.agent.settings)


def test_another_agent_is_replaced_by_the_gateway(tmp_path: Path) -> None:
    """The settings of the file's agent do not count; the options do."""
    found = settings(tmp_path, {"name": "single_turn"}, port=8000)
    expected = {"address_file": f"{tmp_path}/gateway.txt", "program": {"external": True}, "port": 8000}
    assert expected == found


def test_the_gateway_s_own_settings_count(tmp_path: Path) -> None:
    """Its program becomes an external one, and keeps what external programs have."""
    program = {"call": "a.py:f", "process": True, "workers": 3, "claim_seconds": 5}
    given = {"name": "gateway", "host": "127.0.0.1", "port": 1, "repeats": "branch", "program": program}
    found = settings(tmp_path, given, host="127.0.0.2")
    assert ("127.0.0.2", 1, "branch") == (found["host"], found["port"], found["repeats"])
    assert {"external": True, "claim_seconds": 5} == found["program"]


def test_addresses_are_printed_once_and_those_of_an_earlier_start_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each worker writes a line to the file; the command prints it with its use."""
    values = {"folder": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    config = gateway_config(make_config(values), None, None)
    file = tmp_path / "gateway.txt"
    file.write_text("http://old/v1\n")
    said = ""
    with told_addresses(config):
        file.write_text("http://one/v1\nhttp://two/v1\n")
        while "gateway: http://two/v1" not in said:
            said += capsys.readouterr().out
    said += capsys.readouterr().out
    assert "old" not in said
    assert 1 == said.count("gateway: http://one/v1")
    assert "OPENAI_BASE_URL=http://two/v1 OPENAI_API_KEY=GROUP/1" in said


def test_a_file_that_is_wrong_is_refused_as_by_run(tmp_path: Path) -> None:
    """The command has the errors of the configuration."""
    file = tmp_path / "run.yaml"
    file.write_text("nonsense: 1\n")
    found = CliRunner().invoke(main, ["gateway", str(file)])
    assert 1 == found.exit_code
    assert "config.unknown-key" in found.output
