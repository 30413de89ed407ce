"""What the guide to tools shows can be configured as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jackfield.config import load_config
from jackfield.sdk import structure
from jackfield_agent_tool.settings import Config
from jackfield_tools import check_tools

REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "docs" / "guides" / "tools.md"
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.M | re.S)]
INLINE = [text for text in re.findall(r"`((?:mcp|sandbox|search): \{.*?\})`", GUIDE.read_text()) if "…" not in text]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_are_valid(block: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    check_tools(block.get("tools", {}))
    agent = dict(block["agent"])
    assert "tool" == agent.pop("name")
    structure(Config, agent)


@pytest.mark.parametrize("text", INLINE)
def test_tools_in_the_text_are_valid(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents.jsonl").touch()
    check_tools({"tool": yaml.safe_load(text)})


@pytest.mark.parametrize("name", ["calculator_tool", "mcp_tool"])
def test_the_examples_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = load_config(REPOSITORY / "examples" / name / "grpo.yaml")
    check_tools(config.tools)
    load_config(REPOSITORY / "examples" / name / "warmup.yaml")
