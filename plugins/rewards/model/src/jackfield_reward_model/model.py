"""A loaded reward model: conversations to tokens, and batches of tokens to scores.

Shapes: ``B`` conversations, ``L`` tokens of the longest one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from jackfield.errors import RewardError
from jackfield_reward_model.settings import Config

_READ = (".safetensors", ".json", ".bin", ".jinja", ".model", ".txt", ".py")  #: endings of files that scores depend on


def refuse(message: str, where: object, **details: Any) -> NoReturn:
    """Raise an error with the code ``reward.model``."""
    raise RewardError(message, code="reward.model", where=where, **details)


def digest(folder: Path) -> str:
    """Return a digest of the files of a model."""
    found = hashlib.sha256()
    for file in sorted(each for each in folder.iterdir() if each.suffix in _READ):
        with file.open("rb") as content:
            found.update(f"{file.name}:{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()[:16]


class RewardModel:
    """A model with one output, and its tokenizer. All methods block."""

    def __init__(self, config: Config) -> None:
        self._config, folder = config, Path(os.path.expanduser(config.path))
        if not (folder / "config.json").is_file():
            fix = "give the folder of a reward model as path"
            refuse("there is no reward model", config.path, expected="a folder with config.json", fix=fix)
        self.version = digest(folder)
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": config.trust_remote_code}
        try:
            described = AutoConfig.from_pretrained(str(folder), **options)
            self._check_head(described)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), **options)
            self._check_tokenizer()
            self._device, dtype = _place(config)
            described.pad_token_id = self._tokenizer.pad_token_id
            options |= {"config": described, "dtype": dtype, "output_loading_info": True}
            self._model, info = AutoModelForSequenceClassification.from_pretrained(str(folder), **options)
        except (OSError, ValueError, KeyError) as error:
            refuse("the reward model cannot be loaded", config.path, found=f"{type(error).__name__}: {error}")
        self._check_weights(info)
        self._model.to(self._device).eval()
        limits = [described.get_text_config().max_position_embeddings, config.max_tokens]
        self.max_tokens: int = min(limit for limit in limits if limit is not None)

    def _check_head(self, described: Any) -> None:
        if described.num_labels != 1:
            refuse(
                "the model's head has not one output", self._config.path, expected="num_labels: 1 in config.json",
                found=described.num_labels, fix="use a reward model that was trained for sequence classification",
            )  # fmt: skip

    def _check_tokenizer(self) -> None:
        where = f"the tokenizer of {self._config.path}"
        if self._tokenizer.pad_token_id is None:
            refuse("the tokenizer has no token for padding", where, expected="pad_token in tokenizer_config.json",
                   fix="set it to a token that no conversation ends with")  # fmt: skip
        if not (self._config.chat_template or self._tokenizer.chat_template):
            fix = "set chat_template to the Jinja template that the model was trained with"
            refuse("the tokenizer has no chat template", where, expected="chat_template", fix=fix)

    def _check_weights(self, info: Mapping[str, Any]) -> None:
        if missing := sorted(info["missing_keys"]):
            refuse(
                "the weights of the reward model are not complete", self._config.path, found="without "
                + ", ".join(missing[:4]), fix="use a reward model; the head of a language model gives no scores",
            )  # fmt: skip
        words, rows = len(self._tokenizer), self._model.get_input_embeddings().num_embeddings
        if words > rows:
            refuse("the tokenizer is not this model's", self._config.path, expected=f"{rows} tokens", found=words)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], bool]:
        """Return the tokens of a conversation, and whether its beginning was cut off."""
        try:
            tokens: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], chat_template=self._config.chat_template, tokenize=True,
                add_generation_prompt=False, return_dict=False,
            )  # fmt: skip
        except Exception as error:  # the template's own, of any class
            refuse(
                "the chat template refuses the conversation",
                self._config.path,
                found=f"{type(error).__name__}: {error}",
            )
        if not tokens:
            refuse("the conversation has no tokens", self._config.path)
        longest = self.max_tokens
        if len(tokens) <= longest:
            return tokens, False
        if self._config.truncation == "refuse":
            fix = "shorten responses, raise max_tokens, or set truncation: left"
            refuse("the conversation is too long", self._config.path, expected=f"at most {longest} tokens",
                   found=len(tokens), fix=fix)  # fmt: skip
        return tokens[-longest:], True

    def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each conversation of a batch.

        Padding is on the right, where attention does not reach it, and the head reads the last token before it.
        """
        length, pad = max(map(len, batch)), self._tokenizer.pad_token_id
        ids_BL = torch.tensor([[*tokens, *[pad] * (length - len(tokens))] for tokens in batch], device=self._device)
        lengths_B = torch.tensor([[len(tokens)] for tokens in batch], device=self._device)
        mask_BL = (torch.arange(length, device=self._device)[None] < lengths_B).long()
        with torch.inference_mode():
            logits_B1 = self._model(input_ids=ids_BL, attention_mask=mask_BL).logits
        outputs: list[float] = logits_B1[:, 0].double().tolist()
        return [(output + self._config.shift) * self._config.scale for output in outputs]


def _place(config: Config) -> tuple[torch.device, torch.dtype]:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        refuse("the device cannot be used", "device", found=f"{name}: {str(error).splitlines()[0]}")
    default = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, default if config.dtype == "auto" else config.dtype)
    return device, dtype
