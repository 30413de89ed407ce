"""The fixture for ``jackfield plugins check``: a tiny reward model, made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_WORDS = (*"0123456789.?", "what", "is", "it", "the", "answer", "a", "good", "bad", "word", "and", "of", "to", "in")
_SPECIAL = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>")
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end>{% endfor %}"


def make_model(folder: Path, labels: int = 1, seed: int = 0, **options: Any) -> None:
    """Save a word-level tokenizer, and a random Qwen3 with a head of ``labels`` outputs."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: dict[str, Any] = {"eos_token": "<end>", "unk_token": "<unknown>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, initializer_range=0.3, num_labels=labels,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=None,
        eos_token_id=vocabulary["<end>"], pad_token_id=vocabulary["<pad>"], **options,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)


def fixture(folder: Path) -> dict[str, Any]:
    """Return settings of a tiny model, samples that can be scored, and one that is too long."""
    make_model(folder / "model")
    messages = ({"role": "user", "content": "what is it ?"},)
    asked = {"messages": messages, "ground_truth": ""}
    return {
        "settings": {"path": str(folder / "model"), "device": "cpu", "dtype": "float64"},
        "examples": [{**asked, "solution_str": text} for text in ("the answer is 4 .", "a bad word", "")],
        "failing": [{**asked, "solution_str": "word " * 100}],
    }
