"""Batches in files, the results of other frameworks, and processes that end badly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from jackfield.errors import JackfieldError
from jackfield_parity.batch import Settings, random_rows, read_batch, write_batch
from jackfield_parity.hosts import Host
from jackfield_parity.launch import Process, _judged


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A batch of three rows."""
    write_batch(random_rows(50, [(2, 3), (4, 1), (1, 5)]), tmp_path / "batch.safetensors")
    return tmp_path / "batch.safetensors"


def test_a_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    made = random_rows(50, [(2, 3), (4, 0), (1, 5)])
    made = attrs.evolve(made, settings=Settings(temperature=0.7), results={"loss": torch.tensor(1.5)})
    write_batch(made, tmp_path / "one")
    found = read_batch(tmp_path / "one")
    assert (made.settings, made.counts) == (found.settings, found.counts)
    for name in ("prompt_ids", "response_ids", "response_mask", "advantages", "old_log_probs"):
        for one, other in zip(getattr(made, name), getattr(found, name), strict=True):
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
    assert 1.5 == float(found.results["loss"])


def _without(name: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, _: tensors.pop(name)


def _with(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, _: tensors.update({name: value})


def _saying(name: str, value: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda _, metadata: metadata.update({name: value})


WRONG = {
    "no-column": _without("advantages"),
    "unknown-column": _with("rewards", torch.ones(3)),
    "two-dimensions": _with("advantages", torch.ones(3, 3)),
    "not-finite": _with("advantages", torch.full((9,), float("nan"))),
    "float-ids": _with("response_ids", torch.ones(9)),
    "no-token": _with("response_mask", torch.zeros(9)),
    "no-prompt": _with("prompt_lengths", torch.tensor([7, 0, 0])),
    "result-shape": _with("result.log_probs", torch.ones(2)),
    "unknown-result": _with("result.speed", torch.ones(2)),
    "format": _saying("format", "other"),
    "no-json": _saying("settings", "{"),
    "no-reference": _saying("settings", '{"loss": {"kl_coefficient": 0.1}}'),
    "unknown-setting": _saying("settings", '{"loss": {"clip": 0.1}}'),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused(file: Path, name: str) -> None:
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata())
    WRONG[name](tensors, metadata)
    save_file(tensors, file, metadata)
    with pytest.raises(JackfieldError) as refused:
        read_batch(file)
    assert ("config.unknown-key" if name == "unknown-setting" else "data.malformed") == refused.value.code


@pytest.mark.parametrize("content", [None, b"", b"no tensors"], ids=["missing", "empty", "text"])
def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "batch").write_bytes(content)
    with pytest.raises(JackfieldError) as refused:
        read_batch(tmp_path / "batch")
    assert "data.malformed" == refused.value.code


@pytest.mark.timeout(300)
def test_the_results_of_a_framework_are_compared(tmp_path: Path, parity: Callable[..., Any]) -> None:
    """The written example agrees with the reference; the same with a changed gradient does not."""
    file = tmp_path / "batch.safetensors"
    assert 0 == parity("--write", file, "--no-trl").exit_code
    assert 0 == parity("--batch", file, "--no-trl").exit_code
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata())
    tensors["result.gradients.lm_head.weight"] *= 1.01
    save_file(tensors, file, metadata)
    result = parity("--batch", file, "--no-trl")
    assert 1 == result.exit_code
    assert 1 == result.stdout.count("BEYOND TOLERANCE")
    assert 0 == parity("--batch", file, "--no-trl", "--tolerance", "gradients=0.1").exit_code


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path, parity: Callable[..., Any]) -> None:
    write_batch(random_rows(5000, [(20, 30)]), tmp_path / "batch")
    result = parity("--batch", tmp_path / "batch", "--json")
    assert (1, True) == (result.exit_code, "config.invalid-value" in result.stdout)


def test_nothing_to_compare_is_a_wrong_usage(parity: Callable[..., Any]) -> None:
    assert 2 == parity().exit_code


def process(folder: Path, number: int) -> Process:
    return Process(name=f"rank {number}", python="", stage=folder / f"{number}.stage", result=folder / f"{number}.json")


def test_a_rank_that_does_not_end_is_named_with_its_stage(tmp_path: Path) -> None:
    host = Host([sys.executable, "-c", "import sys; sys.stdin.read()"], tmp_path / "log")
    try:
        codes = host.run(tmp_path / "plan.json", [tmp_path / "out"] * 2, 0.1)
    finally:
        host.close()
    assert [None, None] == codes
    (tmp_path / "1.stage").write_text("initialize")
    (tmp_path / "0.json").write_text("{}")
    with pytest.raises(JackfieldError) as late:
        _judged([process(tmp_path, 0), process(tmp_path, 1)], [0, None], tmp_path, 0.1)
    assert ("deadline", True) == (late.value.code, "rank 1 (initialize)" in late.value.message)


def test_a_host_that_dies_is_reported(tmp_path: Path) -> None:
    host = Host([sys.executable, "-c", "raise SystemExit('no torch here')"], tmp_path / "log")
    try:
        with pytest.raises(JackfieldError) as died:
            host.run(tmp_path / "plan.json", [tmp_path / "out"], 60.0)
    finally:
        host.close()
    assert ("worker.died", True) == (died.value.code, "no torch here" in str(died.value.found))


def test_a_batch_without_results_compares_nothing(file: Path, parity: Callable[..., Any]) -> None:
    """The exit code says so, because a script that forgot its results would be content."""
    result = parity("--batch", file, "--no-trl")
    assert 1 == result.exit_code
    assert "0 of 0" in result.stdout
    assert "nothing was compared" in result.stderr


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path, parity: Callable[..., Any]) -> None:
    result = parity("--write", tmp_path / "none" / "batch.safetensors", "--no-trl")
    assert 1 == result.exit_code
    assert "--write" in result.stderr
