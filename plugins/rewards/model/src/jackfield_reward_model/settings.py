"""The settings of a reward model."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """Settings of which model scores, on which device, and what it is given."""

    path: str = option(help="Folder of the reward model: config.json, weights and tokenizer. Nothing is downloaded.")
    device: str = option("auto", "Device such as cpu or cuda:1; auto: a GPU if there is one.")
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = option(
        "auto", "Data type of the weights; auto: float32 on the CPU, bfloat16 elsewhere."
    )
    chat_template: str | None = option(None, "Jinja template for conversations; null: the tokenizer's own.")
    response: Literal["whole", "model"] = option(
        "whole", "What of the response is scored. whole: with the output of tools; model: what the model wrote."
    )
    max_tokens: int | None = option(None, "Longest conversation; null: the model's limit.", ge(8))
    truncation: Literal["refuse", "left"] = option(
        "refuse", "What happens to longer ones. refuse: no score; left: their beginning is cut off."
    )
    batch_tokens: int = option(16384, "Tokens of a batch, with padding. A longer conversation is a batch alone.", ge(1))
    batch_seconds: float = option(0.005, "Longest wait of a conversation for others of its batch.", ge(0.0))
    scale: float = option(1.0, "Factor of the model's output.", gt(0.0))
    shift: float = option(0.0, "Added to the output before it is scaled, such as minus the mean over a data set.")
    trust_remote_code: bool = option(False, "Run Python code from the model's folder.")
