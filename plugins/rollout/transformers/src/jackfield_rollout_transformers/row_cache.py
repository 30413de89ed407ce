"""Requests of models for which the batch has no cache: each has one of the library, and is computed alone.

No pass has padding, so that neither a recurrence nor a convolution ever sees a token that is not the request's.

Shapes: ``B`` requests, ``P`` tokens of a prompt, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from jackfield_huggingface.images import Images
from jackfield_rollout_transformers.model import LoadedModel

_OWN_CACHE = {"minimax"}  #: model types whose forward takes only the cache that it made


class RowCache:
    """Keys, values and states of one request, or of several with equal prompts until they are taken."""

    def __init__(self, cache: Any, length: int, offset: int = 0) -> None:
        self.cache = cache
        self.length = length  #: in tokens
        self.offset = offset  #: of the next token's position from it
        self._taken = False

    def take(self) -> RowCache:
        """Return it, or a copy from the second call on."""
        if self._taken:
            return RowCache(copy.deepcopy(self.cache), self.length, self.offset)
        self._taken = True
        return self

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        found: dict[int, int] = {}
        for holder in (self.cache, *self.cache.layers):
            for value in vars(holder).values():
                several = value.values() if isinstance(value, dict) else value
                tensors = several if isinstance(value, dict | list) else (value,)
                found |= {id(each): each.nbytes for each in tensors if isinstance(each, Tensor)}
        return sum(found.values())


class RowModel:
    """Passes over single requests."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._experts: list[Tensor] = []  #: of the newest passes
        taken = inspect.signature(model.module.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in taken else "cache_params"
        self._takes_positions = "position_ids" in taken
        self._makes_cache = model.module.config.model_type in _OWN_CACHE

    def prefill(
        self, contexts: Sequence[tuple[int, ...]], images: Sequence[Images | None], offsets: Sequence[int]
    ) -> tuple[Tensor, list[RowCache]]:
        """Compute prompts; return the logits ``[B, V]`` after each, and their caches."""
        logits, caches = [], []
        self._experts.clear()
        hook = self._model.output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:],))
        try:
            for context, seen, offset in zip(contexts, images, offsets, strict=True):
                cache = None if self._makes_cache else DynamicCache(config=self._model.module.config)
                ids = torch.tensor([context], device=self._model.device)
                with self._model.given(ids, [seen]) as inputs:
                    values, made = self._pass(inputs, cache)
                logits.append(values)
                caches.append(RowCache(made, len(context), offset))
        finally:
            hook.remove()
        return torch.cat(logits), caches

    def decode(self, tokens: Tensor, caches: Sequence[RowCache | None]) -> Tensor:
        """Return the logits ``[B, V]`` after one more token ``[B]`` of each request."""
        found = []
        self._experts.clear()
        for token, cache in zip(tokens, caches, strict=True):
            assert cache is not None, "its prompt was computed"
            inputs = {"input_ids": token.view(1, 1)}
            if self._takes_positions:  # some models count from 0 in each pass that has none
                inputs["position_ids"] = torch.tensor([[cache.length + cache.offset]], device=token.device)
            found.append(self._pass(inputs, cache.cache)[0])
            cache.length += 1
        return torch.cat(found)

    def taken(self) -> Tensor:
        """Return the experts of the newest prefill or decode, int16 ``[tokens, layers, experts]``."""
        return torch.cat(self._experts)

    def _pass(self, inputs: dict[str, Tensor], cache: Any) -> tuple[Tensor, Any]:
        """Return the logits ``[1, V]`` after the last token, and the cache."""
        output = self._model.module(**inputs, **{self._cache_name: cache}, use_cache=True)
        if self._model.routers is not None:
            self._experts.append(self._model.routers.taken())
        logits: Tensor = output.logits[:, -1]
        return logits, output[self._cache_name] if cache is None else cache
