"""The guide about clients of OpenAI's API: a served folder, and the guide's own requests."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import Any

import openai
import pytest

from jackfield_chat_model import save_chat_model

from .test_guides import DOCS, GUIDES

PAGE = DOCS / "guides" / "openai_clients.md"


@pytest.mark.timeout(120)
@pytest.mark.needs("module:llguidance")
def test_the_guides_requests_are_answered(tmp_path: Path) -> None:
    save_chat_model(str(tmp_path))
    serve = runpy.run_path(str(GUIDES / "serve_openai.py"))["serve"]
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert 3 == len(blocks)

    async def served() -> dict[str, Any]:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(str(tmp_path), {"model_name": "policy"}, address.set_result))
        try:
            await asyncio.wait({serving, address}, return_when=asyncio.FIRST_COMPLETED)
            url = await address if address.done() else await serving
            return await asyncio.to_thread(ask, blocks, url)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    namespace = asyncio.run(served())
    choice = namespace["choice"]
    assert 16 == len(choice.model_extra["token_ids"]) == len(choice.logprobs.token_logprobs)
    assert [0] * 16 == choice.model_extra["weight_versions"]
    assert json.loads(namespace["call"].function.arguments)["city"] in ("Oslo", "Rome")


def ask(blocks: list[str], url: str) -> dict[str, Any]:
    """Run the guide's code with the address that was found."""
    namespace: dict[str, Any] = {"print": lambda *_: None}
    for block in blocks:
        exec(block.replace("http://127.0.0.1:8000/v1", url), namespace)
    namespace["client"].close()
    assert isinstance(namespace["client"], openai.OpenAI)
    return namespace
