"""The documentation is built without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
#: Pages of the API reference, and what is on them.
API = {
    "jackfield": "jackfield.GRPO",
    "jackfield.abc.reward": "jackfield.abc.reward.RewardAgent",
    "jackfield.compose": "jackfield.compose.run",
}


@pytest.mark.timeout(300)
def test_sphinx_builds_every_page_without_a_warning(tmp_path: Path) -> None:
    """Nothing is taken from an earlier build, which would keep its warnings to itself."""
    options = ["-W", "--keep-going", "--quiet", "--no-color", "--fresh-env", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert (tmp_path / "html" / "index.html").is_file()
    api = tmp_path / "html" / "reference" / "api"
    for module, name in API.items():
        assert f'id="{name}"' in (api / f"{module}.html").read_text(encoding="utf-8")
