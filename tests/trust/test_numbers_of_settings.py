"""Every number of a configuration has a range: ``config validate`` refuses what makes no sense, naming the setting.

The settings are those of the reference page, the parts' options those of ``jackfield algorithms list --json``.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield_commands import CommandServer

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "settings.md"
QUICKSTART = str(ROOT / "examples" / "quickstart" / "grpo.yaml")
REFUSED = ("[config.invalid-value]", "[config.wrong-type]")

#: What no number may be: each setting is tried with NaN and with one of these.
NONSENSE = ("1.0e+300", ".inf", "-.inf", "-1.0e+300", "1" + "0" * 400, "-1" + "0" * 40, "many", "true", "[]")

#: Numbers that may be below zero.
SIGNED = {
    *("seed", "sampling.seed", "evaluation.sampling.seed", "algorithm.entropy_coefficient", "options.seed"),
    *("evaluation.success", "schedule.until.reward", "schedule.until.score"),
}
#: Options of parts that may be any finite number.
FREE = {"baseline", "baseline_shift", "threshold", "clip_cov_lower", "seed", "weights"}
#: What a section has to have beside the setting.
BESIDE = {
    "mixing.replay.": ["mixing.replay.ratio=1.0"],
    "mixing.made.": ["mixing.made.ratio=1.0"],
    "mixing.expert.": ["mixing.expert.ratio=1.0", "mixing.expert.samples=rows.jsonl"],
    "mixing.human.": ["mixing.human.ratio=1.0", "mixing.human.samples=rows.jsonl"],
    **{f"data.{name}.": [f"data.{name}={{path: tasks.jsonl}}"] for name in ("train", "eval", "expert")},
    "reward.": ["reward={name: function, path: 'a.py:b'}"],
}


def called(*arguments: str) -> tuple[int, str]:
    """``jackfield ARGUMENTS`` in this process, of which there are hundreds: exit code and output."""
    from jackfield.cli import main

    printed, code = io.StringIO(), 0
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            main(list(arguments))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, printed.getvalue()


def refused(where: str, *overrides: str) -> None:
    """The configuration is not valid, and the message names the setting."""
    code, printed = called("config", "validate", QUICKSTART, *overrides)
    assert 0 < code < 128, (overrides, printed)
    assert printed.startswith(REFUSED), (overrides, printed)
    assert all(part in printed for part in (where, "\n  expected: ", "\n  found: ")), (overrides, printed)


def numbers() -> Iterator[str]:
    """Each setting of the reference page that is a number; ``model.lora`` has tests of its own."""
    for name, kind in re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        if kind.startswith(("integer", "number")) and not name.startswith("model.lora"):
            yield name


def given(name: str, value: str) -> tuple[str, list[str]]:
    """The path of a setting, and overrides that set it."""
    if name.startswith("options."):
        sampler, option = ("random" if name == "options.seed" else "priority"), name.removeprefix("options.")
        replay = f"{{ratio: 1.0, sampler: {{name: {sampler}, options: {{{option}: {value}}}}}}}"
        return f"mixing.replay.sampler.{name}", [f"mixing.replay={replay}"]
    beside = next((beside for start, beside in BESIDE.items() if name.startswith(start)), [])
    return name, [*beside, f"{name}={value}"]


@pytest.mark.parametrize("start", ["abcd", "elmop", "qrs", "w"])
def test_a_setting_takes_no_nonsense(start: str) -> None:
    """NaN, infinity, numbers that no tensor holds, texts; below zero where there is nothing below zero."""
    found = [name for name in numbers() if name[0] in start]
    assert len(found) >= 1
    for name in found:
        values = [".nan", NONSENSE[zlib.crc32(name.encode()) % len(NONSENSE)], *([] if name in SIGNED else ["-1"])]
        for value in values:
            where, overrides = given(name, value)
            refused(where, *overrides)


def test_the_page_lists_numbers() -> None:
    names = set(numbers())
    assert {"optimizer.lr", "sampling.temperature", "data.rollouts_per_group", "deadlines.reward"} <= names
    assert {name[0] for name in names} <= set("abcdelmopqrsw")
    assert len(names) > 60


@pytest.mark.parametrize("kind", ["loss", "advantages"])
def test_an_option_of_a_part_takes_no_nonsense(kind: str) -> None:
    """Of every loss and estimator: nothing that is no number, and nothing beyond the range that is shown."""
    found: list[dict[str, Any]] = json.loads(called("algorithms", "list", "--json")[1])
    tried = 0
    for one in found:
        if one["kind"] != kind:
            continue
        for option, default in one["options"].items():
            bounds = one["ranges"].get(option, "")
            for value in wrong_values(option, default, bounds):
                refused(
                    f"algorithm.{kind}.options.{option}",
                    f"algorithm.{kind}={{name: {one['name']}, options: {{{option}: {value}}}}}",
                )
                tried += 1
    assert tried > 40


def wrong_values(option: str, default: object, bounds: str) -> list[str]:
    """What an option must not be, by its default and the range that is shown of it."""
    if isinstance(default, bool | str):
        return ["2"]
    beyond = [str(float(bound) + 1.0) for bound in re.findall(r"<=? ([\d.]+)", bounds)]
    assert option in FREE | {"clip_cov_upper"} or bounds, f"{option} has no range"
    return [".nan", *([] if option in FREE else ["-5"]), *beyond]


def test_bounds_that_cross_are_refused() -> None:
    for where, settings in (
        ("algorithm.correction.reject_high", "{reject: token, reject_low: 2.0, reject_high: 0.5}"),
        ("algorithm.loss.options.clip_cov_upper", "{name: clip_cov, options: {clip_cov_lower: 5, clip_cov_upper: 1}}"),
        ("algorithm.shaping.clip", "{clip: [1.0, -1.0]}"),
    ):
        refused(where, f"{'.'.join(where.split('.')[:2])}={settings}")
    refused("optimizer.betas", "optimizer.betas=[0.9, 1.0]")


def test_a_run_refuses_it_too(jackfield: CommandServer, quickstart_settings: Callable[..., list[str]]) -> None:
    ended = jackfield("run", *quickstart_settings("run", "algorithm.loss.options.clip_high=-5"))
    assert 0 != ended.code
    assert "[config.invalid-value]" in ended.error
    assert "algorithm.loss.options.clip_high" in ended.error


def test_a_number_that_yaml_reads_as_a_text_is_the_number(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]]
) -> None:
    """To YAML 1e-1 is a text. The loss gets the number."""
    settings = ("schedule.steps=1", "algorithm.loss.options.clip_high=1e-1", "checkpoint.at_end=false")
    ended = jackfield("run", *quickstart_settings("run", *settings))
    assert 0 == ended.code, ended.error
