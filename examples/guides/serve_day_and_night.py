"""Serve a model to users, keep what it answers, and take over promoted models without a pause, until Ctrl-C.

    python examples/guides/serve_day_and_night.py MODEL_FOLDER --collect runs/day --promoted runs/promoted.json

Each replica has an OpenAI-compatible address. `promote.py` writes the file that names the promoted model; replicas load
it one after another, between two decode steps, so all of them go on answering. See docs/guides/serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.clock import Clock
from jackfield.errors import JackfieldError
from jackfield.plugins import load_plugin
from jackfield.routing import Replica
from jackfield.weights import WeightSender, WeightSynchronizer

LOOK_SECONDS = 1.0  #: between two looks at the file of the promoted model


def tensors(folder: str) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a model folder under their names."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


def shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model folder."""
    return {name: tuple(tensor.shape) for name, tensor in tensors(folder)}


async def load(replica: Replica, folder: str, version: int) -> None:
    """Load a model's weights into a replica that goes on answering; its receipt proves them."""
    engine: Any = load_plugin("checkpoint_engine", "in_process")
    sender = engine.build({}, CheckpointEngineContext(end="sender"), "checkpoint_engine")
    source = WeightSender(sender, lambda: (tensors(folder), None))
    await WeightSynchronizer(senders=[source], replicas=[replica], name="in_process", clock=Clock()).sync(version)


async def follow(replicas: list[Replica], model: str, promoted: Path) -> None:
    """Load the model that a file names whenever it names a newer one, one replica after another."""
    served, expected = 0, shapes(model)
    while True:
        with contextlib.suppress(FileNotFoundError):
            newest = json.loads(promoted.read_text())
            if newest["version"] > served:
                served = newest["version"]
                if shapes(newest["model"]) == expected:
                    for replica in replicas:
                        await load(replica, newest["model"], served)
                    print(f"serving version {served}: {newest['model']}", flush=True)
                else:
                    print(f"refused version {served}: {newest['model']} has other tensors than {model}", flush=True)
        await asyncio.sleep(LOOK_SECONDS)


async def serve(model: str, count: int, openai: dict[str, Any], promoted: Path) -> None:
    """Start replicas, print their addresses, and serve until cancelled."""
    plugin: Any = load_plugin("rollout", "transformers")
    replicas: list[Replica] = []
    try:
        for number in range(count):
            context = RolloutContext(model=ModelSpec(path=model), replica=number)
            replica = Replica(plugin.build({"openai": openai}, context, "rollout"), number=number)
            replica.info = await replica.server.start()
            replicas.append(replica)
            print(replica.info.openai_base_url, flush=True)
        await follow(replicas, model, promoted)
    finally:
        await asyncio.gather(*(replica.server.stop() for replica in replicas))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=0, help="of the first replica; 0: free ones")
    parser.add_argument("--collect", help="folder for what is answered")
    parser.add_argument("--promoted", type=Path, default=Path("promoted.json"))
    arguments = parser.parse_args()
    openai = {"port": arguments.port, "collect": arguments.collect}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(arguments.model, arguments.replicas, openai, arguments.promoted))
    except JackfieldError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
