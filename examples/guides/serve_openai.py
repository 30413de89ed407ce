"""Serve a model folder at an OpenAI-compatible address, until Ctrl-C.

    python examples/guides/serve_openai.py MODEL_FOLDER [--port 8000] [--model-name NAME]

Any rollout plugin may take the place of `transformers` that has the setting `openai`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.plugins import load_plugin


async def serve(folder: str, openai: dict[str, Any], ready: Callable[[str], Any] = print) -> None:
    """Start a replica, tell its address, and serve until cancelled."""
    loaded: Any = load_plugin("rollout", "transformers")
    server = loaded.build({"openai": openai}, RolloutContext(model=ModelSpec(path=folder)))
    try:
        info = await server.start()
        ready(info.openai_base_url)
        await asyncio.Event().wait()
    finally:
        await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model-name")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.model, {"port": arguments.port, "model_name": arguments.model_name}))
