"""Pictures of later turns: tokens and pixels are those of the whole conversation by the model's own processor."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from jackfield.abc.agent import AgentContext
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.sdk.sequences import SequenceBuilder, sequences_of

COLOURS = [(200, 10, 10), (10, 20, 230), (220, 230, 20), (20, 200, 40)]
PICTURES = [Image.new("RGB", (16, 16), colour) for colour in COLOURS]
PLACES = 4


def part(picture: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


PARTS = [part(each) for each in PICTURES]


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which colour ?"}]}]


def template(own: Any) -> str:
    """Return the template of the example, which also shows results of tools."""
    return str(own.chat_template).replace("message['role'] == 'user'", "message['role'] in ['user', 'tool']")


@pytest.fixture
def tokenizer(model: Path) -> HuggingFaceChatTokenizer:
    return HuggingFaceChatTokenizer.load(model, chat_template=template(AutoTokenizer.from_pretrained(model)))


class Talk:
    """A conversation with a model that says these tokens or words."""

    def __init__(self, tokenizer: HuggingFaceChatTokenizer, *answers: Any, prompt: Any = None) -> None:
        self.tokenizer, self.answers, self.requests = tokenizer, list(answers), list[GenerateRequest]()
        self.metrics: dict[str, float] = {}
        context = AgentContext(generate=self.generate, tokenizer=tokenizer, metric=self.metrics.__setitem__)
        self.builder = SequenceBuilder(context, {"max_new_tokens": 50}, prompt or asked(PARTS[0]))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        answer = self.answers.pop(0)
        said = self.tokenizer.encode_text(answer) if isinstance(answer, str) else answer
        ids = (*said, *self.tokenizer.end_token_ids[:1])
        values: Any = {"log_probs": (-1.0,) * len(ids), "weight_versions": (3,) * len(ids)}
        return GenerateResult(request_id=request.request_id, token_ids=ids, finish_reason="stop", **values)


def whole(folder: Path, messages: list[dict[str, Any]], count: int) -> tuple[list[int], Any]:
    """Return the tokens and the pixels of a conversation by the processor, with the first pictures."""
    shown = [
        {**each, "content": [{"type": "image"} if one in PARTS else one for one in each["content"]]}
        if isinstance(each["content"], list)
        else each
        for each in messages
    ]
    processor = AutoProcessor.from_pretrained(folder)
    how = {"chat_template": template(processor.tokenizer), "add_generation_prompt": True, "tokenize": False}
    text = processor.tokenizer.apply_chat_template(shown, **how)
    made = processor(text=[text], images=PICTURES[:count], return_tensors="np", add_special_tokens=False)
    return made["input_ids"][0].tolist(), made["pixel_values"]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_each_turn_is_what_the_processor_makes_of_the_whole(
    model: Path, tokenizer: HuggingFaceChatTokenizer, role: str
) -> None:
    """One picture in the prompt, two in the next turn, then none, and one that no answer follows."""

    async def run() -> None:
        talk, messages, seen = Talk(tokenizer, "red", "blue", "green"), asked(PARTS[0]), 1
        for turn, count in enumerate((2, 0, 1)):
            answer = await talk.builder.generate()
            ids, pixels = whole(model, messages, seen)
            assert ids == list(talk.requests[turn].prompt_ids)
            assert np.array_equal(pixels, talk.requests[turn].multi_modal_data["pixel_values"])
            further = [{**each, "role": role} for each in asked(*PARTS[seen : seen + count])]
            messages += [answer.message, *further]
            seen += count
            assert talk.builder.append_turn(further)
        [sequence] = sequences_of([talk.builder])  # up to the last answer, which has not seen the last picture
        ids, pixels = whole(model, messages[:5], 3)
        found = [*sequence.prompt_ids, *sequence.response_ids]
        assert ids == found[: len(ids)]
        assert np.array_equal(pixels, sequence.multi_modal_inputs["pixel_values"])
        assert 3 * PLACES == found.count(tokenizer.placeholders()[0])

    asyncio.run(run())


def test_a_placeholder_in_the_text_of_a_tool_is_plain_text(tokenizer: HuggingFaceChatTokenizer) -> None:
    content = [PARTS[0], {"type": "text", "text": "an <image> in <user>"}]
    ids, _ = tokenizer.encode_multi_modal_turn([{"role": "tool", "content": content}])
    assert PLACES == ids.count(tokenizer.placeholders()[0])
    assert 1 == ids.count(tokenizer.tokenizer.convert_tokens_to_ids("<user>")), "of the turn's header"


def test_a_branch_has_the_pictures_before_it_and_its_own(tokenizer: HuggingFaceChatTokenizer) -> None:
    async def run() -> None:
        talk = Talk(tokenizer, "red", "blue", "green", prompt=asked())
        for one in PARTS[:2]:
            await talk.builder.generate()
            talk.builder.append_turn(asked(one))
        branch = talk.builder.branch(turn=1)
        branch.append_turn(asked(PARTS[2]))
        await branch.generate()
        for sequence, number in zip(sequences_of([talk.builder, branch]), (0, 2), strict=True):
            expected = tokenizer.encode_multi_modal(asked(PARTS[number]))[1]["pixel_values"]
            assert np.array_equal(expected, sequence.multi_modal_inputs["pixel_values"])
            assert PLACES == [*sequence.prompt_ids, *sequence.response_ids].count(tokenizer.placeholders()[0])

    asyncio.run(run())


def test_a_model_that_has_said_a_placeholder_gets_no_further_pictures(tokenizer: HuggingFaceChatTokenizer) -> None:
    """It would see them in the place of its own token: the sequence ends as it is."""

    async def run() -> None:
        talk = Talk(tokenizer, tokenizer.placeholders())
        await talk.builder.generate()
        assert not talk.builder.append_turn(asked(PARTS[1]))
        assert {"placeholders_said": 1} == talk.metrics
        [sequence] = sequences_of([talk.builder])
        assert 1 == len(sequence.multi_modal_inputs["pixel_values"])

    asyncio.run(run())
