"""What both sides of ``vs_trl.py`` get: a saved model with its tokenizer, prompts, and the reward function.

The task: the reward is the share of an answer's words that begin with one of four letters. Half of the words do, so an
untrained model gets 0.5, and a policy that has learnt it gets 1. Importing this module imports no torch: Jackfield's
reward worker imports it, too.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

KINDS = ("birds", "coats", "herbs", "maps", "roads", "songs", "tools", "winds")
WANTED = "bhrt"  #: first letters: those of half of the kinds
FRAMES = ("name {kind}", "please name some {kind}", "which {kind} are there", "I want to hear about {kind} now")
WORDS = 124  #: of each kind
VOCABULARY = 1024  #: of the model; a few rows of the embedding have no token
SPECIAL = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}<assistant> {{ message['content'] }}<end>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The share of an answer's words that begin with one of the letters in ``ground_truth``."""
    words = solution_str.split()
    return sum(word[0] in ground_truth for word in words) / max(len(words), 1)


def make_task(folder: Path, prompts: int, seed: int) -> int:
    """Write ``model/`` (with its tokenizer) and ``prompts.jsonl``; return the number of the model's parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    records = []
    for number in range(prompts):
        question = rng.choice(FRAMES).format(kind=KINDS[number % len(KINDS)])
        records.append({"question": question, "answer": WANTED})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    make_tokenizer(folder / "model")
    return make_model(folder / "model", seed)


def make_tokenizer(folder: Path) -> None:
    """One token per word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    endings = ["".join(letters) for letters in itertools.product("aeiou", "klmnr", "aeiou")][:WORDS]
    asked = {word for frame in FRAMES for word in frame.replace("{kind}", "").split()}
    words = [*sorted(asked), *KINDS, *(kind[:2] + ending for kind in KINDS for ending in endings)]
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    assert len(vocabulary) == len(SPECIAL) + len(words) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_model(folder: Path, seed: int, positions: int = 128) -> int:
    """A Qwen3 of 1.77 million parameters for so many positions, initialised at random."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=SPECIAL.index("<pad>"),
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))
