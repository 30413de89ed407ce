"""Pictures of conversations become tokens and pixels by the model's own processor, or an error that names them."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from jackfield.data.encoding import encode_inputs
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.errors import DataError
from jackfield_huggingface import prompts

QUESTION = {"type": "text", "text": "Which colour ?"}
PLACES = 4


@pytest.fixture
def tokenizer(model: Path, tmp_path: Path) -> HuggingFaceChatTokenizer:
    """The model's tokenizer, with data in ``tmp_path/data``."""
    found = HuggingFaceChatTokenizer.load(model)
    (tmp_path / "data").mkdir()
    found.image_folders = (tmp_path / "data",)
    return found


def picture(colour: tuple[int, int, int] = (200, 10, 10), form: str = "PNG", side: int = 16) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, form)
    return file.getvalue()


def address(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, QUESTION]}]


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("form", prompts.FORMATS)
def test_placeholders_are_expanded_and_pixels_are_the_processors(
    tokenizer: HuggingFaceChatTokenizer, model: Path, form: str
) -> None:
    """Each picture has its places in the prompt, in order; the pixels are those that the processor makes alone."""
    contents = [picture((10, 20, 230), form), picture((220, 230, 20), form, side=40)]
    ids, arrays = tokenizer.encode_multi_modal(asked(*(image_url(address(each)) for each in contents)))
    place = tokenizer.tokenizer.convert_tokens_to_ids("<image>")
    text = tokenizer.encode_chat([{"role": "user", "content": QUESTION["text"]}])
    assert (text[0], *[place] * (2 * PLACES), *text[1:]) == ids
    processor = AutoProcessor.from_pretrained(model)
    pictures = [Image.open(io.BytesIO(each)).convert("RGB") for each in contents]
    expected = processor.image_processor(pictures, return_tensors="np")["pixel_values"]
    assert ["pixel_values"] == list(arrays)
    assert np.array_equal(np.asarray(expected), arrays["pixel_values"])
    assert not arrays["pixel_values"].flags.writeable


@pytest.mark.parametrize("name", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_pictures_of_several_sizes(model: Path, tmp_path: Path, name: str) -> None:
    """Each picture of Qwen-VL has as many places as merged patches, in order, and the arrays are its processor's."""
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("processor_config.json", "*.safetensors"))
    token = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<image>")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "image_token_id": token}))
    alone = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
    alone.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    own = {"processor_class": "Qwen2_5_VLProcessor", "image_processor_type": name}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    tokenizer = HuggingFaceChatTokenizer.load(tmp_path / "model")
    contents = [picture((10, 20, 230), side=16), picture((220, 230, 20), side=24)]
    ids, arrays = tokenizer.encode_multi_modal(asked(*(image_url(address(each)) for each in contents)))
    text = tokenizer.encode_chat([{"role": "user", "content": QUESTION["text"]}])
    assert (text[0], *[token] * (4 + 9), *text[1:]) == ids
    expected = alone([Image.open(io.BytesIO(each)) for each in contents], return_tensors="np")
    assert ["image_grid_thw", "pixel_values"] == sorted(arrays)
    assert [[1, 4, 4], [1, 6, 6]] == arrays["image_grid_thw"].tolist()
    assert np.array_equal(expected["pixel_values"], arrays["pixel_values"])


@pytest.mark.parametrize(
    "part",
    [
        lambda path: image_url(path),
        lambda path: {"type": "image_url", "image_url": path},
        lambda path: {"type": "image", "image": path},
        lambda path: {"type": "image", "path": f"file://{path}"},
    ],
    ids=["openai", "short", "image", "file"],
)
def test_files_of_the_data(
    tokenizer: HuggingFaceChatTokenizer, tmp_path: Path, part: Callable[[str], dict[str, Any]]
) -> None:
    """Relative and absolute paths inside the folder of the data, in each form of a part."""
    file = tmp_path / "data" / "pictures" / "one.png"
    file.parent.mkdir()
    file.write_bytes(picture())
    same = tokenizer.encode_multi_modal(asked(image_url(address(picture()))))
    for path in ("pictures/one.png", str(file)):
        found = tokenizer.encode_multi_modal(asked(part(path)))
        assert same[0] == found[0]
        assert np.array_equal(same[1]["pixel_values"], found[1]["pixel_values"])


def test_texts_need_no_processor(tokenizer: HuggingFaceChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation without pictures is encoded as it always was."""
    monkeypatch.setattr(prompts, "ImagePrompts", None)
    messages = asked()
    assert (tokenizer.encode_chat(messages), {}) == tokenizer.encode_multi_modal(messages)
    assert (tokenizer.encode_chat(messages), {}) == encode_inputs(tokenizer, messages)


def test_rollouts_of_a_group_share_the_pixels(
    tokenizer: HuggingFaceChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture is decoded once while its conversation is in use."""
    messages = asked(image_url(address(picture())))
    first = tokenizer.encode_multi_modal(messages)[1]["pixel_values"]
    monkeypatch.setattr(Image, "open", None)
    assert first is tokenizer.encode_multi_modal(messages)[1]["pixel_values"]


BOMB = picture(side=40)


@pytest.mark.parametrize(
    ("part", "word"),
    [
        (image_url("https://example.org/cat.png"), "downloaded"),
        (image_url("../outside.png"), "no such picture"),
        (image_url("/etc/hostname"), "no such picture"),
        (image_url("link.png"), "no such picture"),
        (image_url("absent.png"), "no such picture"),
        (image_url("notes.txt"), "cannot be read"),
        (image_url("data:image/png;base64,!!!"), "base64"),
        (image_url("data:image/png,abc"), "base64"),
        (image_url(address(b"GIF89a")), "cannot be read"),
        (image_url(address(picture()[:40])), "cannot be read"),
        (image_url(address(BOMB)), "too large"),
        (image_url("large.png"), "too large"),
        ({"type": "image"}, "no picture"),
        ({"type": "image_url", "image_url": {"url": 3}}, "no picture"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else str(value)[-24:],
)
def test_what_cannot_be_read_is_refused(
    tokenizer: HuggingFaceChatTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: dict[str, Any],
    word: str,
) -> None:
    """Nothing outside the data's folder is read, nothing is downloaded, and sizes are bounded."""
    monkeypatch.setattr(prompts, "MAXIMUM_PIXELS", 30 * 30)
    monkeypatch.setattr(prompts, "MAXIMUM_BYTES", 2000)
    (tmp_path / "outside.png").write_bytes(picture())
    data = tmp_path / "data"
    (data / "link.png").symlink_to(tmp_path / "outside.png")
    (data / "notes.txt").write_text("no picture")
    (data / "large.png").write_bytes(bytes(2001))
    with pytest.raises(DataError) as refused:
        tokenizer.encode_multi_modal(asked(part))
    assert "data.image" == refused.value.code
    assert word in refused.value.message


def test_a_template_has_to_show_each_picture_once(model: Path) -> None:
    """A text that names the placeholder, and a template that leaves a picture out, would move the pictures."""
    messages = asked(image_url(address(picture())))
    blind = "{% for message in messages %}<user> {% endfor %}<assistant>"
    named = [{"role": "user", "content": [*messages[0]["content"], {"type": "text", "text": "<image>"}]}]
    for template, given in ((blind, messages), (None, named)):
        with pytest.raises(DataError) as refused:
            HuggingFaceChatTokenizer.load(model, chat_template=template).encode_multi_modal(given)
        assert "data.image" == refused.value.code


def test_a_model_without_a_processor_takes_no_images(model: Path, tmp_path: Path) -> None:
    """Its folder has a tokenizer alone."""
    HuggingFaceChatTokenizer.load(model).tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError) as refused:
        HuggingFaceChatTokenizer.load(tmp_path).encode_multi_modal(asked(image_url(address(picture()))))
    assert "data.image" == refused.value.code
