"""A run in a Ray cluster whose two ranks send the replica their rows, each by a link of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from textwrap import dedent

import pytest
from safetensors.torch import load_file

pytest.importorskip("ray")

from .conftest import QUICKSTART, metrics
from .test_modes import GRADED, steps

pytestmark = pytest.mark.timeout(400)

STEPS = 2
#: A checkpoint engine, installed beside the others, that notes what each process sends in each transfer.
NOTING = {
    "noting/__init__.py": "",
    "noting/plugin.toml": """
        name = "noting"
        kind = "checkpoint_engine"
        abi = "1.0"
        object = "noting.engine:NotingEngine"
        config = "jackfield_transport_zmq.config:EngineConfig"
        description = "Notes what zmq sends"
    """,
    "noting/engine.py": """
        import json, os
        from jackfield_transport_zmq.engine import ZMQCheckpointEngine

        class NotingEngine(ZMQCheckpointEngine):
            async def send_weights(self, weights):
                sent = {}

                def noted():
                    for name, tensor in weights:
                        sent[name] = [tensor.numel(), tensor.nbytes]
                        yield name, tensor

                await super().send_weights(noted())
                with open(f"{os.environ['NOTES']}/{os.getpid()}.jsonl", "a") as file:
                    file.write(json.dumps([self.version, sent]) + "\\n")
    """,
    "noting-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: noting\nVersion: 1.0\n",
    "noting-1.0.dist-info/entry_points.txt": "[jackfield.checkpoint_engines]\nnoting = noting:plugin.toml\n",
}


def install(folder: Path) -> dict[str, str]:
    """Install the engine into a folder; return the environment of processes that have it, and note there."""
    for name, text in NOTING.items():
        (folder / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / name).write_text(dedent(text).lstrip())
    (folder / "notes").mkdir()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([str(folder / "site"), *paths]), "NOTES": str(folder / "notes")}


def test_both_ranks_send_their_rows_and_the_replica_answers_as_the_engine(
    made: Path, tmp_path: Path, ray_environment: dict[str, str], ray_interpreters: str
) -> None:
    """Each element is sent once, about half of the bytes by either link. The receipts of all pieces are verified, and
    the replica's log-probs are the engine's."""
    settings = [
        f"folder={tmp_path / 'run'}", f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl",
        "data.groups_per_batch=4", "data.rollouts_per_group=4", "sampling.max_new_tokens=6",
        f"schedule.steps={STEPS}", "evaluation.every=0", "observe.progress=false", "observe.curve=false",
        "observe.report_to=[]", "checkpoint={every: 0, at_end: false}", "checkpoint_engine.name=noting",
        "cluster={name: ray, threads: 1, ray: {num_cpus: 3, engine_ranks: 2, object_store_bytes: 200000000}}",
        ray_interpreters, *GRADED,
    ]  # fmt: skip
    command = [str(Path(sys.executable).with_name("jackfield")), "run", str(QUICKSTART / "grpo.yaml"), *settings]
    environment = ray_environment | install(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=350, check=False)
    assert 0 == done.returncode, done.stderr[-3000:]

    model = load_file(made / "model" / "model.safetensors")
    workers = json.loads((tmp_path / "run" / "workers.json").read_text())
    elements: dict[int, Counter[str]] = defaultdict(Counter)
    links: dict[int, dict[str, int]] = defaultdict(dict)
    for name in ("the actor engine, rank 0", "the actor engine, rank 1"):
        notes = (tmp_path / "notes" / f"{workers[name]['pid']}.jsonl").read_text().splitlines()
        for version, sent in map(json.loads, notes):
            for piece, (count, _) in sent.items():
                elements[version][piece.partition("[")[0]] += count
            links[version][name] = sum(size for _, size in sent.values())
    assert list(range(1, STEPS + 1)) == sorted(elements)
    for version, found in elements.items():
        assert {name: tensor.numel() for name, tensor in model.items()} == found
        smaller, larger = sorted(links[version].values())
        assert 0.8 * larger < smaller

    lines = metrics(tmp_path / "run")
    total = sum(tensor.nbytes for tensor in model.values())
    assert [total] * STEPS == [line["sent_bytes"] for line in lines if line["kind"] == "weights"]
    assert all(line["log_prob_check/replica/mean"] < 1e-4 for line in steps(lines)[1:])
