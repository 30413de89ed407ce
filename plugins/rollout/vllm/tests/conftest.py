"""One real vLLM for the whole session, in an interpreter of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.plugins import PluginRecord, discover
from jackfield_conformance.support.rollout import greedy
from jackfield_conformance.support.rollout_model import model_folder
from jackfield_kept_process import KeptRolloutProcess
from jackfield_testing import vllm_python

HERE = Path(__file__).parent
PLUGIN = HERE.parent / "src" / "jackfield_rollout_vllm"
START_SECONDS = 300.0  #: imports of torch and vLLM in three processes, on a busy machine


@attrs.frozen
class Kept:
    """The plugin ``vllm_kept``, as an environment variable shows it to vLLM's interpreter."""

    record: PluginRecord
    site: Path
    environment: Mapping[str, str] = MappingProxyType({})

    def server(self, context: RolloutContext, **settings: Any) -> KeptRolloutProcess:
        # one worker in the core's process, vLLM's own default on one GPU: a process less to start
        own = {"eager": True, "kv_cache_bytes": 1 << 26, "engine": {"distributed_executor_backend": "uni"}}
        return KeptRolloutProcess(
            {**own, **settings},
            context,
            record=self.record,
            python=str(vllm_python()),
            seconds=START_SECONDS,
            environment={
                "PYTHONPATH": str(self.site),
                "OMP_NUM_THREADS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with 1, vLLM gives the worker a process on a CPU all the same
                **self.environment,
            },
        )

    async def warm_up(self, *models: ModelSpec) -> None:
        """Start vLLM for each model and generate with it, which takes longer than a check may: both import much."""
        for model in models:
            server = self.server(RolloutContext(model=model))
            await server.start()
            await server.generate(greedy("warm-up", 2))
            await server.stop()


def install(site: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Kept:
    """Install the plugin ``vllm_kept`` in a folder."""
    shutil.copytree(HERE / "kept", site / "vllm_kept")
    manifest = (PLUGIN / "plugin.toml").read_text(encoding="utf-8")
    manifest = manifest.replace('name = "vllm"', 'name = "vllm_kept"')
    manifest = manifest.replace("jackfield_rollout_vllm.server:VllmServer", "vllm_kept.server:KeptServer")
    (site / "vllm_kept" / "plugin.toml").write_text(manifest, encoding="utf-8")
    info = site / "vllm_kept-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-kept\nVersion: 0.1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[jackfield.rollouts]\nvllm_kept = vllm_kept:plugin.toml\n")
    found = Kept(discover([str(site)]).resolve("vllm_kept", "rollout"), site, environment)
    assert found.record.error is None, found.record.error
    return found


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """vLLM, started and idle."""
    found = install(tmp_path_factory.mktemp("site"))

    asyncio.run(found.warm_up(ModelSpec(path=model_folder())))
    yield found
    KeptRolloutProcess.end_all()


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:  # it has ended
                continue
            parents[int(entry)] = int(text.rpartition(")")[2].split()[1])
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}
