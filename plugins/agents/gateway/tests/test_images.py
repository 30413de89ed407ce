"""Images that programs show: what reaches the model and the sequences, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import openai
import pytest

PIXELS = {"red": b"\x01\x02", "blue": b"\x03\x04", "green": b"\x05\x06"}


def image(name: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(PIXELS[name]).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def see(name: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [image(name), {"type": "text", "text": text}]}


class Seeing:
    """A tokenizer whose images are two bytes each, shown as a letter."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def placeholders(self) -> tuple[int, ...]:
        return (-1,)

    def encode_multi_modal(self, messages: Any, **tools: Any) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        return self._tokenizer.encode_chat(self._shown(messages), **tools), self._pixels(messages)

    def encode_multi_modal_turn(self, messages: Any, **how: Any) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        return self._tokenizer.encode_turn(self._shown(messages), **how), self._pixels(messages)

    def _shown(self, messages: Any) -> list[dict[str, Any]]:
        return [{**each, "content": self._text(each["content"])} for each in messages]

    def _text(self, content: Any) -> str:
        return content if isinstance(content, str) else "".join(each.get("text", "#") for each in content)

    def _pixels(self, messages: Any) -> Mapping[str, Any]:
        parts = [part for each in messages if isinstance(each["content"], list) for part in each["content"]]
        urls = [part["image_url"]["url"].partition(",")[2] for part in parts if part["type"] == "image_url"]
        rows = [list(base64.b64decode(url)) for url in urls]
        return {"pixel_values": np.array(rows, np.float32)} if rows else {}


def client(served: Any, rollout: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url, api_key=rollout.key, max_retries=0)


async def chat(api: Any, *messages: Any) -> Any:
    return (await api.chat.completions.create(model="m", messages=list(messages))).choices[0].message


def pixels(*names: str) -> list[list[float]]:
    return [list(map(float, PIXELS[name])) for name in names]


def test_images_of_any_turn_are_recorded_with_their_sequence(
    serve: Any, exact: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation and its branch have the images before each answer, and no others."""

    async def run() -> None:
        async with serve() as served:
            monkeypatch.setattr(served.shared.gateway, "_images", True)
            served.tokenizer = Seeing(tokenizer)
            async with served.rollout() as rollout, client(served, rollout) as api:
                first = see("red", "first")
                one = await chat(api, first)
                two = await chat(api, first, one, see("blue", "second"))
                again = await chat(api, first, one, see("blue", "second"))
                await chat(api, first, one, see("green", "other"))
                await chat(api, first, one, see("blue", "second"), two, {"role": "user", "content": "third"})
                assert two.content == again.content
                assert [pixels("red"), pixels("red", "blue"), pixels("red", "green"), pixels("red", "blue")] == [
                    each.multi_modal_data["pixel_values"].tolist() for each in served.model.asked
                ]
                sequences = rollout.recording.sequences()
                assert [None, "branch"] == [each.relation for each in sequences]
                assert [pixels("red", "blue"), pixels("red", "green")] == [
                    each.multi_modal_inputs["pixel_values"].tolist() for each in sequences
                ]
                exact(served.model, sequences)
            async with served.rollout() as rollout, client(served, rollout) as api:
                parts = [{"type": "input_text", "text": "first"}]
                parts += [{"type": "input_image", "image_url": image("red")["image_url"]["url"]}]
                await api.responses.create(model="m", input=[{"role": "user", "content": parts}])  # type: ignore[list-item]
                [sequence] = rollout.recording.sequences()
                assert pixels("red") == sequence.multi_modal_inputs["pixel_values"].tolist()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("shows", "url", "told"),
    [
        (False, "data:image/png;base64,AAAA", "text: nothing else is served"),
        (True, "https://example.com/one.png", "nothing is downloaded"),
        (True, "pictures/one.png", "nothing is downloaded"),
        (True, None, "nothing is downloaded"),
    ],
    ids=["agent without images", "web address", "file", "nothing"],
)
def test_what_is_no_image_here_is_refused(
    serve: Any, monkeypatch: pytest.MonkeyPatch, shows: bool, url: Any, told: str
) -> None:
    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            monkeypatch.setattr(served.shared.gateway, "_images", shows)
            part = {"type": "image_url", "image_url": {"url": url}}
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(api, {"role": "user", "content": [part, {"type": "text", "text": "q"}]})
            assert told in caught.value.message
            assert str(caught.value.param).startswith("messages[0].content[0]")
            assert [] == served.model.asked

    asyncio.run(run())
