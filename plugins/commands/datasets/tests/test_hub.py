"""Sets of the Hub, from the cache of ``datasets``: without a network, as a cluster's nodes are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the set ``acme/sums``, as if it had been downloaded: configurations ``default`` and ``hard``."""
    import datasets
    from datasets.packaged_modules.parquet.parquet import Parquet

    home = tmp_path_factory.mktemp("home")
    for config, offset in (("default", 0), ("hard", 100)):
        files = {}
        for split, size in (("train", 4), ("test", 2)):
            rows = [{"question": f"{n} + {offset}?", "answer": f"{n + offset}"} for n in range(size)]
            files[split] = str(home / f"{config}-{split}.parquet")
            datasets.Dataset.from_list(rows).to_parquet(files[split])
        folder = home / "datasets" / "acme___sums" / config / "0.0.0" / "0123456789abcdef"
        builder = Parquet(cache_dir=str(home / "other"), dataset_name="sums", config_name=config, data_files=files)
        builder.download_and_prepare(str(folder))
    return home


def data(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `jackfield data show` without a network."""
    own = {"HF_HOME": str(home), "HF_DATASETS_CACHE": str(home / "datasets"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [Path(sys.executable).with_name("jackfield"), "data", "show", "--json", *words]
    environment = {**os.environ, **own, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_a_set_that_is_in_the_cache(home: Path, variable: str) -> None:
    config = ("config=hard",) if variable == "HF_HUB_OFFLINE" else ("config=default",)
    found = data(home, "acme/sums:test", *config, **{variable: "1"})
    assert 0 == found.returncode, found.stdout + found.stderr
    (shown,) = json.loads(found.stdout)
    truths = [task["ground_truth"] for task in shown["tasks"]]
    assert (["100", "101"] if "hard" in config[0] else ["0", "1"]) == truths
    assert ["acme/sums:test has questions (prompt: question, ground truth: answer)"] == shown["notes"]


def test_a_set_that_is_not_in_the_cache(home: Path) -> None:
    found = data(home, "acme/unknown", HF_HUB_OFFLINE="1")
    error: Any = json.loads(found.stdout)["error"]
    assert (1, "data.missing", "acme/unknown") == (found.returncode, error["code"], error["where"])
    assert "HF_HUB_OFFLINE allows only what is in the cache" in error["fix"]
