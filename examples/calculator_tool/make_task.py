"""Makes what the example learns from: word problems in GSM8K's style, a tokenizer, and a model that knows nothing.

The numbers are too large for the model to calculate. All demonstrations are right. Most of them write the result at
once, which the model cannot learn; the others write ``<<47*6=282>>``, as GSM8K does, and then the result. The model
learns both ways. In the run the tool puts the result behind ``<<47*6=``, and GRPO teaches the model to call it, from
rewards alone.

No question is in two of the three files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

SMALLEST, LARGEST = 11, 99
FACTORS = 3, 9  #: of products
NAMES = ("Tom", "Ben", "Sam", "Max", "Leo", "Dan", "Amy", "Eva", "Mia", "Zoe", "Ann", "Ida")
OBJECTS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "toys", "cups")
FRAMES = {
    "*": (
        "{name} buys {a} {things} for {b} dollars each. How many dollars is that?",
        "{name} has {a} boxes with {b} {things} each. How many {things} in all?",
    ),
    "+": (
        "{name} has {a} {things} and gets {b}. How many {things} now?",
        "There were {a} {things}. {name} brings {b} more. How many {things} now?",
    ),
    "-": (
        "{name} has {a} {things} and loses {b}. How many {things} now?",
        "There were {a} {things}. {name} takes {b} away. How many {things} now?",
    ),
}
TOOL_USERS = 0.4  #: share of demonstrations that call the tool
SIZES = {"held_out": 240, "demonstrations": 6000, "problems": 4000}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}<assistant> {{ message['content'] }}<end>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>")


def make_task(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write ``demonstrations.jsonl``, ``problems.jsonl``, ``held_out.jsonl`` and ``model/`` (with its tokenizer)."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    texts: list[str] = []
    for name, size in sizes.items():
        records = make_problems(rng, size, seen, TOOL_USERS if name == "demonstrations" else 1.0)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        texts += [text for record in records for text in record.values()]
    make_model(folder / "model", texts, seed)


def make_problems(rng: random.Random, size: int, seen: set[str], tool_users: float) -> list[dict[str, str]]:
    """Make ``size`` new problems with right answers, and add their questions to ``seen``."""
    records: list[dict[str, str]] = []
    while len(records) < size:
        operation = rng.choice(tuple(FRAMES))
        a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        if operation == "-":
            a, b = max(a, b), min(a, b)
        if operation == "*":
            b = rng.randint(*FACTORS)
        frame = rng.choice(FRAMES[operation])
        question = frame.format(name=rng.choice(NAMES), things=rng.choice(OBJECTS), a=a, b=b)
        if question in seen:
            continue
        seen.add(question)
        result = {"*": a * b, "+": a + b, "-": a - b}[operation]
        work = f"<<{a}{operation}{b}={result}>>\n" if rng.random() < tool_users else ""
        records.append({"question": question, "answer": f"{work}#### {result}"})
    return records


def make_model(folder: Path, texts: list[str], seed: int) -> None:
    """Save a word-level tokenizer that splits numbers into digits, and a random Qwen3 of 0.3 million parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    pieces = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)])
    words = {word for text in texts for word, _ in pieces.pre_tokenize_str(text)} | set("0123456789+-*=")
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.Sequence(  # a blank before each word, but none within a calculation or before . and ?
        [
            decoders.Replace(Regex(r"\A"), " "),
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=[\d+*=<-]) (?=[\d+*=>-])| (?=[.?])"), ""),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
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
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
        pad_token_id=vocabulary["<pad>"],
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
