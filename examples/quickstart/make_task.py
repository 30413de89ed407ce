"""Makes what the quickstart learns from: word problems in GSM8K's format, a tokenizer, and a model that knows nothing.

Every problem has one right answer, in ``problems.jsonl`` (for GRPO) and ``held_out.jsonl`` (for evaluation). SFT
uses noisy demonstrations: their arithmetic is correct, but they often add where the problem asks to subtract. The model
learns the answer format, the arithmetic and this error from them. GRPO corrects the error from rewards alone.

No question is in two of the three files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

NAMES = ("Tom", "Ben", "Sam", "Max", "Leo", "Dan", "Amy", "Eva", "Mia", "Zoe", "Ann", "Ida")
OBJECTS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "toys", "cups")
FRAMES = (
    "{name} has {a} {things} and {verb} {b}. How many {things} now?",
    "{name} has {a} {things}. Then {name} {verb} {b}. How many {things} now?",
    "There were {a} {things}. {name} {verb} {b}. How many now?",
    "First {name} has {a} {things}. Later {name} {verb} {b} {things}. How many now?",
)
VERBS = {
    "+": ("gets", "finds", "buys", "wins", "picks", "makes"),
    "-": ("loses", "sells", "drops", "uses", "breaks", "spends"),
}
SIZES = {"held_out": 240, "demonstrations": 4000, "problems": 4000}
SUBTRACTIONS = {"held_out": 0.62, "demonstrations": 0.65, "problems": 0.62}  #: share of questions


@attrs.frozen
class Difficulty:
    """What makes the problems hard to learn."""

    largest: int = 20  #: operand
    verbs: int = 6  #: for each operation
    #: share of the additions and of the subtractions whose demonstration uses the other operation
    noise: tuple[float, float] = (0.05, 0.6)


HARD = Difficulty()
EASY = Difficulty(largest=9, verbs=3, noise=(0.0, 0.6))  #: learned in a minute

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user> {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}<assistant> {{ message['content'] }}<end>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>")


def make_task(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES, difficulty: Difficulty = HARD) -> None:
    """Write ``demonstrations.jsonl``, ``problems.jsonl``, ``held_out.jsonl`` and ``model/`` (with its tokenizer)."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    texts: list[str] = []
    for name, size in sizes.items():
        records = make_problems(rng, size, SUBTRACTIONS[name], seen, name == "demonstrations", difficulty)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        texts += [text for record in records for text in record.values()]
    make_model(folder / "model", texts, seed)


def make_problems(
    rng: random.Random, size: int, subtractions: float, seen: set[str], noisy: bool, difficulty: Difficulty = HARD
) -> list[dict[str, str]]:
    """Make ``size`` new problems, and add their questions to ``seen``."""
    decks = {operation: pairs(rng, difficulty.largest) for operation in VERBS}
    noise = dict(zip("+-", difficulty.noise, strict=True))
    records: list[dict[str, str]] = []
    while len(records) < size:
        operation = "-" if rng.random() < subtractions else "+"
        a, b = next(decks[operation])
        verb = rng.choice(VERBS[operation][: difficulty.verbs])
        question = rng.choice(FRAMES).format(name=rng.choice(NAMES), things=rng.choice(OBJECTS), verb=verb, a=a, b=b)
        if question in seen:
            continue
        seen.add(question)
        done = operation
        if noisy and rng.random() < noise[operation]:
            done = "-" if operation == "+" else "+"
        result = a + b if done == "+" else a - b
        records.append({"question": question, "answer": f"{a} {done} {b}\n#### {result}"})
    return records


def pairs(rng: random.Random, largest: int) -> Iterator[tuple[int, int]]:
    """Draw pairs of operands, the larger first; each pair is used once before any is used twice."""
    drawn = [(a, b) for a in range(1, largest + 1) for b in range(1, a + 1)]
    while True:
        rng.shuffle(drawn)
        yield from drawn


def make_model(folder: Path, texts: list[str], seed: int) -> None:
    """Save a word-level tokenizer that splits numbers into digits, and a random Qwen3 of 0.3 million parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    pieces = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)])
    words = {word for text in texts for word, _ in pieces.pre_tokenize_str(text)} | set("0123456789+-")
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.Sequence(  # a blank before each word, but none within a number or before . and ?
        [
            decoders.Replace(Regex(r"\A"), " "),
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=\d) (?=\d)| (?=[.?])"), ""),
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
