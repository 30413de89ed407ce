"""Shape the logits of requests from an endpoint, and tell their likeliest tokens.

Penalties are vLLM's: ``repetition_penalty`` counts prompt and answer, the others the answer alone. Grammars are
llguidance's, the extra ``grammar``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jackfield.abc.rollout import SamplingParams
from jackfield.errors import PluginError, RolloutError
from jackfield_huggingface.shaping import FIELDS, Grammar, Likeliest, PromptToken, ShapedRequest
from jackfield_rollout_transformers.sampling import RowTable, filter_rows

#: Without the extra ``grammar``, answers cannot be made to match one.
SERVED = FIELDS if find_spec("llguidance") is not None else FIELDS - {"grammar"}
#: One way to write a value: a model that is free to add white space may never end. ``oneOf`` is read as ``anyOf``.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


class Shaper:
    """The shaping of one request. ``matcher`` follows its grammar; ``end_ids`` are the tokens that would end it."""

    def __init__(self, request: ShapedRequest, end_ids: frozenset[int], matcher: Any = None) -> None:
        shaping, prompt = request.shaping, request.prompt_ids
        self.shaping, self.sampling = shaping, request.sampling
        self._end_ids = sorted(end_ids)
        self._matcher = matcher
        self._known = 0  #: tokens of the answer that are counted
        self._prompt = frozenset(prompt) if shaping.repetition_penalty != 1 else frozenset()
        self._counts = Counter[int]()
        self.tells_prompt = shaping.prompt_log_probs and len(prompt) > 1

    def apply(self, logits: Tensor, token_ids: list[int]) -> None:
        """Change one row of logits, float32 ``[V]``, in place; ``token_ids`` is the answer so far."""
        shaping, new = self.shaping, token_ids[self._known :]
        self._known = len(token_ids)
        self._counts.update(new)
        if self._matcher is not None:
            for token in new:
                self._matcher.consume_token(token)
            allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            mask = torch.from_numpy(allowed[: len(logits)].astype(bool)).to(logits.device)
            logits[: len(mask)].masked_fill_(~mask, -math.inf)
        for token, bias in shaping.logit_bias.items():
            logits[token] += bias
        if len(token_ids) < shaping.min_tokens and self._end_ids:
            logits[self._end_ids] = -math.inf
        self._penalise(logits)

    def _penalise(self, logits: Tensor) -> None:
        shaping = self.shaping
        if shaping.repetition_penalty != 1 and (seen := sorted(self._prompt | self._counts.keys())):
            found = logits[seen]
            logits[seen] = torch.where(
                found > 0, found / shaping.repetition_penalty, found * shaping.repetition_penalty
            )
        if self._counts and (shaping.frequency_penalty or shaping.presence_penalty):
            counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=logits.device)
            logits[list(self._counts)] -= shaping.frequency_penalty * counts + shaping.presence_penalty


def shape_rows(logits: Tensor, rows: Sequence[tuple[Shaper | None, list[int], list[Likeliest]]]) -> Tensor:
    """Return logits ``[B, V]`` with the shapings of the rows applied, and note the likeliest tokens of each."""
    if all(shaper is None for shaper, _, _ in rows):
        return logits
    logits = logits.float().clone()
    for row, (shaper, token_ids, found) in zip(logits, rows, strict=True):
        if shaper is not None:
            shaper.apply(row, token_ids)
            if shaper.shaping.top_log_probs:
                found.append(likeliest(row, shaper.sampling, shaper.shaping.top_log_probs))
    return logits


def likeliest(logits: Tensor, sampling: SamplingParams, count: int) -> Likeliest:
    """Return the likeliest tokens of one row of logits ``[V]``, with the log-probs of what is drawn from."""
    table = RowTable.build([(sampling, 0, 0, 0)], logits.device)
    heat = sampling.temperature or 1.0
    if sampling.temperature == 0:
        table = RowTable.build([(SamplingParams(), 0, 0, 0)], logits.device)  # without filters
    order, kept = filter_rows(logits.float()[None] / heat, table)
    pairs = zip(order[0, :count].tolist(), kept[0, :count].log().tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if math.isfinite(value))


def of_prompt(logits: Tensor, prompt: tuple[int, ...], count: int) -> tuple[PromptToken, ...]:
    """Return log-probs of a prompt's tokens from the second on, of ``logits`` ``[prompt - 1, V]`` at temperature 1."""
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(1, torch.tensor(prompt[1:], device=logits.device)[:, None])
    ranks = (log_probs > chosen).sum(-1) + 1
    values, tokens = log_probs.topk(min(count, log_probs.shape[1]), dim=-1)
    rows = zip(chosen[:, 0].tolist(), ranks.tolist(), tokens.tolist(), values.tolist(), strict=True)
    return tuple((value, rank, tuple(zip(ids, top, strict=True))) for value, rank, ids, top in rows)


class Grammars:
    """Matchers of grammars for one model's tokenizer, which is read when the first is asked for."""

    def __init__(self, load: Callable[[], Any], vocabulary: int, end_ids: frozenset[int]) -> None:
        self._load, self._vocabulary, self._end_ids = load, vocabulary, sorted(end_ids)
        self._tokenizer: Any = None

    def matcher(self, grammar: Grammar) -> Any:
        """Return a new matcher, which takes up to seconds.

        Raise ``rollout.request`` for a grammar that cannot be read, and ``plugin.capability`` for such a tokenizer.
        """
        import llguidance
        import llguidance.hf

        if self._tokenizer is None:
            ends: dict[str, Any] = {"eos_token": self._end_ids} if self._end_ids else {}
            tokenizer = self._load()
            try:
                self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=self._vocabulary, **ends)
            except ValueError as error:
                message, expected = "answers of this model cannot match a grammar", "a tokenizer that llguidance reads"
                found, fix = " ".join(str(error).split())[:100], "ask without response_format, tool_choice and the like"
                code, where = "plugin.capability", "grammar"
                raise PluginError(message, code=code, where=where, expected=expected, found=found, fix=fix) from error
        try:
            if grammar.kind == "json":
                text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON)
            else:
                text = llguidance.LLMatcher.grammar_from_regex(grammar.text)
            matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            message, expected = "the grammar cannot be read", "a JSON schema or a regular expression"
            found = " ".join(problem.split())[:300]
            raise RolloutError(message, code="rollout.request", where="response_format", expected=expected, found=found)
        return matcher
