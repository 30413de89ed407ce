"""Model cards, and exports that are refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jackfield.compose.export import export_checkpoint, write_card
from jackfield.config import as_plain, make_config
from jackfield.errors import RunError
from jackfield.trainer.checkpoint import Checkpoint


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Base\n", "apache-2.0"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("# Base\n", None),
        (None, None),
    ],
)
def test_a_card_names_base_license_and_run(tmp_path: Path, card: str | None, expected: str | None) -> None:
    """The license is that in the head of the base's card, if there is one."""
    base, out = tmp_path / 'a "base"', tmp_path / "out"
    base.mkdir()
    out.mkdir()
    if card is not None:
        (base / "README.md").write_text(card)
    config = make_config({"name": "mine", "model": {"path": str(base)}, "algorithm": {"name": "gspo"}})
    write_card(out, config, 12)
    head, body = (out / "README.md").read_text().removeprefix("---\n").split("\n---\n")
    fields = dict(line.split(": ", 1) for line in head.split("\n") if ": " in line)
    assert json.dumps(str(base)) == fields["base_model"]
    assert '"transformers"' == fields["library_name"]
    assert expected == (json.loads(fields["license"]) if "license" in fields else None)
    for line in (
        "# mine",
        "| steps | 12 |",
        "| algorithm | gspo |",
        f"| license of the base model | {expected or 'not known'} |",
    ):
        assert line in body


def test_an_adapter_is_named_as_one(tmp_path: Path) -> None:
    """The library of its card is PEFT."""
    (tmp_path / "adapter_config.json").write_text("{}")
    write_card(tmp_path, make_config({"model": {"path": "somewhere"}}), 1)
    text = (tmp_path / "README.md").read_text()
    assert 'library_name: "peft"' in text
    assert "a LoRA adapter for the base model" in text


@pytest.mark.parametrize(
    ("options", "code"), [({"merge": True}, "run.no-adapter"), ({"averaged": True}, "run.no-average")]
)
def test_what_a_run_has_not_made_is_not_exported(tmp_path: Path, options: dict[str, Any], code: str) -> None:
    """Neither an adapter nor an average."""
    config = as_plain(make_config({"model": {"path": "somewhere"}}))
    (tmp_path / "state.json").write_text(json.dumps({"config": config}))
    with pytest.raises(RunError) as caught:
        export_checkpoint(Checkpoint(folder=tmp_path, step=1, files={}), tmp_path / "out", **options)
    assert code == caught.value.code
