"""Tokens of prompts and responses, and their log-probs under a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs

from jackfield.data.encoding import encode_answers, encode_prompt
from jackfield.data.formats import Task
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.errors import PluginError


@attrs.define(eq=False, slots=False)
class Encoder:
    """The tokenizer and the weights of a model's folder, each loaded when it is needed."""

    folder: str
    chat_template: str | None = None

    @cached_property
    def _tokenizer(self) -> HuggingFaceChatTokenizer:
        try:
            return HuggingFaceChatTokenizer.load(self.folder, chat_template=self.chat_template)
        except ModuleNotFoundError as error:
            what, fix = "tokens need transformers", "pip install 'jackfield-formatter[tokens]'"
            raise PluginError(what, where=self.folder, fix=fix) from error

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without those that begin or end a text."""
        return len(self._tokenizer.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode(self, task: Task) -> tuple[list[int], list[int], list[bool]]:
        """Return the tokens of a task's prompt and of its response, and which of the response are the model's."""
        prompt = encode_prompt(self._tokenizer, task, None)
        ((response, mask),) = encode_answers(self._tokenizer, task)
        return list(prompt), list(response), [bool(each) for each in mask]

    @cached_property
    def _network(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        network: Any = AutoModelForCausalLM.from_pretrained(self.folder, local_files_only=True, dtype=torch.float32)
        return network.eval()

    def log_probs(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
        """Return the log-probs of a response's tokens after a prompt, at temperature 1, in nats."""
        import torch

        with torch.no_grad():
            ids = torch.tensor([[*prompt_ids, *response_ids]])
            logits = self._network(ids).logits[0, len(prompt_ids) - 1 : -1].float()
            chosen = logits.log_softmax(-1)[range(len(response_ids)), list(response_ids)]
        found: list[float] = chosen.tolist()
        return found
