"""Makes what the example learns from: errands in houses, demonstrations, and a model that knows nothing.

The demonstrations teach the model the actions, and to search. But they are careless: two times of three an
object that should be cleaned, heated or cooled is put down as it is, which does not count. GiGPO corrects that from
rewards alone. Houses of the demonstrations, of training and of the evaluation are different ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jackfield_environments.household import CLOSED, GOALS, OBJECTS, ROOMS, TREATMENTS, Household

HOUSE: Mapping[str, Any] = {"rooms": 2, "objects": 3, "max_steps": 20}
CARELESS = 0.7  #: share of the errands whose demonstration forgets what is to be done to the object
STRAYING = 0.05  #: share of the actions that are anything
SIZES = {"held_out": 128, "errands": 4000, "demonstrations": 1500}  #: houses; a demonstration has several steps

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}<assistant> {{ message['content'] }}<end>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>")


def make_task(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write ``held_out.jsonl``, ``errands.jsonl``, ``demonstrations.jsonl`` and ``model/``."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    seeds = iter(rng.sample(range(10**6), sum(sizes.values())))
    for name, size in sizes.items():
        houses = [next(seeds) for _ in range(size)]
        records: list[dict[str, Any]] = [{"question": "{observation}", "answer": "", "seed": house} for house in houses]
        if name == "demonstrations":
            records = [step for house in houses for step in demonstration(house, rng)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    make_model(folder / "model", words(), seed)


def demonstration(house: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Do one errand; yield what is seen and done at each step."""
    game = Household(**HOUSE)
    text, _ = game.reset(seed=house)
    forgets, ended = rng.random() < CARELESS, False
    while not ended:
        action = game.expert(treats=not forgets)
        if rng.random() < STRAYING:
            action = rng.choice(game.actions())
        yield {"question": text, "answer": action}
        text, _, terminated, truncated, _ = game.step(action)
        ended = terminated or truncated or (forgets and action.startswith("put"))


def words() -> set[str]:
    """Return all words of the game."""
    text = "Goal : . You are in the at carry nothing see It is closed Near Rooms Searched Found , That not possible"
    text += " go to open take put on " + " ".join(GOALS) + " " + " ".join(state for _, state in TREATMENTS.values())
    return {*text.split(), *OBJECTS, *ROOMS, *CLOSED, *(place for places in ROOMS.values() for place in places)}


def make_model(folder: Path, vocabulary: set[str], seed: int) -> None:
    """Save a word-level tokenizer, and a random Qwen3 of 0.4 million parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    numbers = {word: number for number, word in enumerate([*SPECIAL, *sorted(vocabulary)])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # a blank between words
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(numbers),
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
        eos_token_id=numbers["<end>"],
        pad_token_id=numbers["<pad>"],
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
