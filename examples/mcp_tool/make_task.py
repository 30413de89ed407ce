"""Makes what the example learns from: questions about prices, demonstrations, and a model that knows nothing.

Only the server knows the prices. A part of the demonstrations asks it, in turns as a chat template of Qwen's kind shows
them; the others answer at once, with the right price, which the model cannot know. GRPO teaches it to ask.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prices import DAYS, ITEMS, price_of

FRAMES = ("Day {day}. What do {item} cost?", "What is the price of {item} on day {day}?", "Buy {item} on day {day}.")
TOOL_USERS = 0.4  #: share of demonstrations that ask the server
SIZES = {"held_out": 200, "demonstrations": 6000, "questions": 4000}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% elif message['role'] == 'tool' %}<tool>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<assistant>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<end>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>", "<tool>")


def make_task(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write ``held_out.jsonl``, ``demonstrations.jsonl``, ``questions.jsonl`` and ``model/`` (with its tokenizer)."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(item, day) for item in ITEMS for day in range(10, 10 + DAYS)]
    rng.shuffle(pairs)
    asked = {"held_out": pairs[: len(pairs) // 4]}  # their prices are in no demonstration
    for name, size in sizes.items():
        records = [record(rng, *rng.choice(asked.get(name, pairs[len(pairs) // 4 :]))) for _ in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    make_model(folder / "model", seed)


def record(rng: random.Random, item: str, day: int) -> dict[str, Any]:
    """Return a question with its right answer, and a demonstration that may call the tool."""
    answer = f"#### {price_of(item, day)}"
    taught: list[dict[str, Any]] = [{"role": "assistant", "content": answer}]
    if rng.random() < TOOL_USERS:
        function = {"name": "price", "arguments": {"item": item, "day": day}}
        call = {"id": "0", "type": "function", "function": function}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        taught = [said, {"role": "tool", "content": str(price_of(item, day))}, *taught]
    return {"question": rng.choice(FRAMES).format(item=item, day=day), "answer": answer, "taught": taught}


def make_model(folder: Path, seed: int) -> None:
    """Save a tokenizer of words, digits, blanks and signs, and a random Qwen3 of 0.3 million parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    isolated = pre_tokenizers.Split(Regex(r"\d|[A-Za-z_]+|\s|[^\w\s]+"), "isolated")
    texts = [*FRAMES, *ITEMS, "0 1 2 3 4 5 6 7 8 9", "#### ", CHAT_TEMPLATE]
    texts.append('<tool_call>{"name": "price", "arguments": {"item": "eggs", "day": 1}}</tool_call>')
    words = {word for text in texts for word, _ in isolated.pre_tokenize_str(text)}
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *sorted(words - {*SPECIAL})])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = isolated
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<tool>"]})
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=160,
        tie_word_embeddings=True,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
        pad_token_id=vocabulary["<pad>"],
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
