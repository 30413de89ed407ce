"""Makes what a scaffolded agent is trained on: hidden numbers, a tokenizer, and a model that knows nothing.

    python examples/scaffolded_agent/make_game.py FOLDER [SEED [NUMBERS]]

Each task hides a number, from 0 to 6 unless there are fewer NUMBERS than 7. Whoever halves the range at each guess
finds every one of 7 numbers with three guesses, and of 3 with two.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

NUMBERS = 7
NAMES = ("Tom", "Amy", "Leo", "Zoe")
THINGS = ("apples", "books", "cards", "pens")
REPLIES = ("higher", "lower", "found", "say a number")
QUESTION = "{name} has some {thing}. How many?"
SPECIAL = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>")
HELD_OUT = 0.25  #: share of the pairs of name and thing that training does not see

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}<assistant> {{ message['content'] }}<end>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_game(folder: Path, seed: int, numbers: int = NUMBERS) -> None:
    """Write ``numbers.jsonl``, ``held_out.jsonl`` and ``model/`` with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = list(itertools.product(NAMES, THINGS))
    random.Random(seed).shuffle(pairs)
    held_out = int(len(pairs) * HELD_OUT)
    for file, those in (("held_out", pairs[:held_out]), ("numbers", pairs[held_out:])):
        records = [
            {"question": QUESTION.format(name=name, thing=thing), "answer": f"#### {number}"}
            for number in range(numbers)
            for name, thing in those
        ]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    make_model(folder / "model", seed)


def make_model(folder: Path, seed: int) -> None:
    """Save a word-level tokenizer, and a random Qwen3 of 0.1 million parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    texts = [QUESTION.format(name=" ".join(NAMES), thing=" ".join(THINGS)), *REPLIES, *map(str, range(NUMBERS))]
    pieces = pre_tokenizers.Whitespace()
    words = {word for text in texts for word, _ in pieces.pre_tokenize_str(text)}
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pieces
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
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
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
        pad_token_id=vocabulary["<pad>"],
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make_game(Path(sys.argv[1]), *(int(each) for each in sys.argv[2:] or [1]))
