"""Makes what the example learns from: pictures of one coloured square, a tokenizer, and a model that knows nothing.

Each task asks for a picture's colour, or for the quarter in which its square is; the answer is one word. No picture is
in two of the files.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Mapping
from pathlib import Path

SIDE, PATCH = 16, 8  #: pixels of a picture and of one of the pieces that the model sees
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
QUARTERS = {"northwest": (0, 0), "northeast": (1, 0), "southwest": (0, 1), "southeast": (1, 1)}
QUESTIONS = {"colour": "Which colour ?", "place": "Which quarter ?"}
SIZES = {"problems": 2048, "held_out": 256}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>"
    "{% if message['content'] is string %} {{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }} {% endif %}"
    "{% endfor %}{% endif %}"
    "{% elif message['role'] == 'assistant' %}<assistant> {{ message['content'] }}<end>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>", "<image>")


def make_task(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write ``problems.jsonl``, ``held_out.jsonl`` and ``model/`` (with its tokenizer and processor)."""
    rng, seen = random.Random(seed), set[bytes]()
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        records = [make_problem(rng, seen) for _ in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    make_model(folder / "model", seed)


def make_problem(rng: random.Random, seen: set[bytes]) -> dict[str, object]:
    """Draw a new picture; return a task about it."""
    while True:
        colour, place, asked = rng.choice(list(COLOURS)), rng.choice(list(QUARTERS)), rng.choice(list(QUESTIONS))
        content = draw(rng, COLOURS[colour], QUARTERS[place])
        if content not in seen:
            break
    seen.add(content)
    address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": QUESTIONS[asked]}]
    return {"prompt": [{"role": "user", "content": parts}], "answer": colour if asked == "colour" else place}


def draw(rng: random.Random, colour: tuple[int, int, int], quarter: tuple[int, int]) -> bytes:
    """Return the PNG of a square in a quarter, on a grey ground with some noise."""
    from PIL import Image

    picture = Image.new("RGB", (SIDE, SIDE))
    pixels = [tuple(rng.randrange(90, 150) for _ in range(3)) for _ in range(SIDE * SIDE)]
    picture.putdata(pixels)
    half, size = SIDE // 2, rng.randrange(4, 8)
    left, top = (half * each + rng.randrange(half - size + 1) for each in quarter)
    shade = tuple(min(255, max(0, value + rng.randrange(-25, 26))) for value in colour)
    picture.paste(shade, (left, top, left + size, top + size))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def make_model(folder: Path, seed: int) -> None:
    """Save a word-level tokenizer, a processor of pictures, and a random LLaVA: a CLIP tower and a Qwen3."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
        Qwen3Config,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = sorted({word for text in QUESTIONS.values() for word in text.split()} | {*COLOURS, *QUARTERS})
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<image>"]})
    fast.chat_template = CHAT_TEMPLATE
    size = {"height": SIDE, "width": SIDE}
    pictures = CLIPImageProcessorPil(size=size, crop_size=size)
    form = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pictures, fast, chat_template=CHAT_TEMPLATE, **form).save_pretrained(folder)
    fast.save_pretrained(folder)
    vision = CLIPVisionConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=64,
    )
    text = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
        pad_token_id=vocabulary["<pad>"],
    )
    torch.manual_seed(seed)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=vocabulary["<image>"], tie_word_embeddings=True
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = vocabulary["<end>"]
    model.save_pretrained(folder)
