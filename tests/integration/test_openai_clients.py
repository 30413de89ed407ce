"""Client libraries against one served model, each in a process of an environment of their own (``make interpreters``).

What works is in ``openai_clients/results.json``, and the guide's table is made of it: ``tools/clients_reference.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.plugins import load_plugin
from jackfield_chat_model import save_chat_model
from jackfield_testing import clients_python

HERE = Path(__file__).parent / "openai_clients"
FOUND = Path(__file__).parents[2] / "build" / "openai_clients"
RESULTS: dict[str, Any] = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
pytestmark = [pytest.mark.needs("clients", "module:llguidance"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a replica of the tiny chat model, in a thread of this process."""
    folder = str(tmp_path_factory.mktemp("model"))
    save_chat_model(folder)
    loaded: Any = load_plugin("rollout", "transformers")
    server = loaded.build({"openai": {"model_name": "policy"}}, RolloutContext(model=ModelSpec(path=folder)))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(60).openai_base_url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.mark.parametrize("client", sorted(RESULTS))
def test_a_client_can_do_what_the_guide_says(client: str, url: str, tmp_path: Path) -> None:
    """Chats, streams, tools, JSON, log-probs: every feature that the library has works."""
    hidden = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV")
    done = subprocess.run(
        [str(clients_python()), "-W", "ignore", str(HERE / "clients.py"), client, url],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in hidden} | {"HOME": str(tmp_path)},
    )
    lines = done.stdout.strip().splitlines()
    assert 0 == done.returncode, done.stderr[-3000:]
    found = json.loads(lines[-1])
    FOUND.mkdir(parents=True, exist_ok=True)
    (FOUND / f"{client}.json").write_text(json.dumps(found), encoding="utf-8")
    assert {"works"} == set(found["features"].values()), f"{found}\n{done.stderr[-3000:]}"
    assert RESULTS[client] == found, "python tools/clients_reference.py notes it"
