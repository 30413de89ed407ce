"""Sequences, and the batch that they join, decode in and leave. It is synchronous and independent of callers.

Rows ``0 .. B-1`` of the KV cache and of the row table are the batch; a row that leaves is filled by a joiner or by the
last row, so every pass works on a dense block.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from jackfield.abc.rollout import GenerateRequest
from jackfield.errors import RolloutError
from jackfield_huggingface.images import Images
from jackfield_huggingface.relay import Running
from jackfield_huggingface.shaping import Likeliest
from jackfield_rollout_transformers.cache import BatchCache
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.direct import DirectDecode, supports
from jackfield_rollout_transformers.model import LoadedModel
from jackfield_rollout_transformers.row_cache import RowCache, RowModel
from jackfield_rollout_transformers.sampling import LAST_TOKEN, OFFSET, POSITION, RowTable, draw, modes_of
from jackfield_rollout_transformers.shaping import Shaper, of_prompt, shape_rows


@attrs.define(eq=False)
class Sequence:
    """A running or waiting request, and its tokens so far. Its caller gets them by :meth:`feed`."""

    running: Running
    limit: int  #: of generated tokens
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    images: Images | None = None  #: of the prompt
    digest: str = ""  #: of the images; equal ones are computed once
    offset: int = 0  #: of the positions of its tokens behind them
    shaper: Shaper | None = None  #: of a request that an endpoint made
    modes: Counter[str] = attrs.field(init=False)
    done: asyncio.Future[None] = attrs.field(init=False, factory=lambda: asyncio.get_running_loop().create_future())
    cache: RowCache | None = None  #: of its own, where the batch has no cache for the model
    row: int = -1  #: row in the batch; -1: not in it
    length: int = 0  #: number of its tokens in the KV cache
    token_ids: list[int] = attrs.Factory(list)
    log_probs: list[float] = attrs.Factory(list)
    likeliest: list[Likeliest] = attrs.Factory(list)  #: for each token, if it is asked for
    experts: list[Tensor] = attrs.Factory(list)  #: of its tokens in turn, int16 ``[tokens, layers, experts]``
    finish_reason: Literal["stop", "length"] | None = None
    error: RolloutError | None = None  #: why it cannot be generated

    @modes.default
    def _modes(self) -> Counter[str]:
        return modes_of(self.request.sampling)

    @property
    def request(self) -> GenerateRequest:
        """Return the request of its caller."""
        return self.running.request

    @property
    def context(self) -> tuple[int, ...]:
        """Return the tokens to compute when the sequence joins: the prompt and the generated tokens."""
        return (*self.request.prompt_ids, *self.token_ids) if self.token_ids else self.request.prompt_ids

    @property
    def longest(self) -> int:
        """Return the largest number of positions that it may need."""
        return len(self.request.prompt_ids) + self.limit

    def append(self, token: int, log_prob: float) -> bool:
        """Add a generated token; return whether it was the last."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        may_end = self.shaper is None or len(self.token_ids) >= self.shaper.shaping.min_tokens
        if token in self.stop_ids or (may_end and self.stop_strings and self.stop_strings.completed(self.token_ids)):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def note_experts(self, found: Tensor) -> None:
        """Keep the experts of the tokens of a pass, ``[tokens, layers, experts]``, that were not known before."""
        known = sum(len(each) for each in self.experts)
        self.experts.append(found[known - self.length :].cpu())

    def fail(self, message: str, fix: str) -> None:
        """Mark the sequence as failed; its caller gets the error."""
        name = self.request.request_id
        self.error = RolloutError(f"request {name!r} failed: {message}", code="rollout.failed", where=name, fix=fix)

    def feed(self, version: int) -> None:
        """Give the caller the tokens since the last call, which weights of ``version`` generated."""
        known = len(self.running.token_ids)
        if known < len(self.token_ids):
            self.running.append(self.token_ids[known:], self.log_probs[known:], version, self.likeliest[known:])

    def routed_experts(self) -> Any:
        """Return the experts of all tokens but the last, int16 ``[tokens, layers, experts]``; None: not known."""
        count = len(self.request.prompt_ids) + len(self.running.token_ids) - 1
        return torch.cat(self.experts)[:count].numpy() if self.experts else None


class StopStrings:
    """A check whether the newest token completes one of the stop strings.

    Decoding is by far the most expensive part, so it happens only for tokens that can complete a string: those with
    its last character, a part of a character, or text that the tokenizer shows only in context.
    """

    def __init__(self, strings: tuple[str, ...], decode: Callable[[list[int]], str], pieces: dict[int, str]) -> None:
        self._strings = strings
        self._decode = decode
        self._pieces = pieces  # token -> its text alone; shared by all requests of a server
        self._last_characters = frozenset(string[-1] for string in strings)
        self._ends_in_space = any(character.isspace() for character in self._last_characters)
        # nearly every token has at least one byte of text
        self._window = max(len(string.encode()) for string in strings) + 8

    def completed(self, token_ids: list[int]) -> bool:
        """Return whether the last token has completed a string in the text of ``token_ids``."""
        if not self._may_complete(token_ids[-1]):
            return False
        text = self._decode(token_ids[-self._window :])
        return any(string in text for string in self._strings)

    def _may_complete(self, token: int) -> bool:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        if self._ends_in_space or not piece or "\ufffd" in piece:
            return True
        return not self._last_characters.isdisjoint(piece)


@attrs.frozen(eq=False)
class _Prompts:
    """Distinct prompts of one prefill pass, and the sequences that begin with each."""

    contexts: list[tuple[int, ...]]
    images: list[Images | None]
    sequences: list[Sequence]
    source: list[int]  #: by sequence: the index of its prompt


class Decoder:
    """Continuous batching over one model."""

    def __init__(self, model: LoadedModel, config: Config) -> None:
        self._model = model
        self._config = config
        self._device = model.device
        self._cache = BatchCache(model.layers, config.rows, config.max_cache_tokens)
        self._table = RowTable.zeros(config.rows, self._device)
        self._rows: list[Sequence | None] = []
        self._holes: list[int] = []
        self._modes = Counter[str]()
        self._by_row = RowModel(model) if model.by_row else None
        fast = self._by_row is None and model.masks.window is None
        self._direct = DirectDecode(model) if fast and supports(model) else None
        self._prefill_tokens = config.max_prefill_tokens or (512 if model.device.type == "cpu" else 16384)

    @property
    def sequences(self) -> list[Sequence]:
        """Return the sequences of the batch, by row."""
        return [sequence for sequence in self._rows if sequence is not None]

    @property
    def running(self) -> int:
        """Return the number of sequences in the batch."""
        return len(self._rows) - len(self._holes)

    def choose_joiners(self, waiting: Iterable[Sequence]) -> int:
        """Return how many of the ``waiting`` join now.

        If more wait than fit, none joins until a sixteenth of the batch is free: a prefill pass for one sequence costs
        almost as much as one for many.
        """
        free = self._config.rows - self.running
        candidates = [sequence for _, sequence in zip(range(free), waiting, strict=False)]
        if len(candidates) == free and self.running and free < self._config.rows // 16:
            return 0
        bound = self._config.max_cache_tokens
        if bound is None:
            return len(candidates)
        rows, longest = self.running, max((sequence.longest for sequence in self.sequences), default=0)
        count = 0
        for sequence in candidates:
            longest = max(longest, sequence.longest)
            if (rows + count + 1) * longest > bound and rows + count:
                break
            count += 1
        return count

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences from the batch; their rows are filled before the next pass."""
        for sequence in sequences:
            if sequence.row >= 0:
                self._rows[sequence.row] = None
                self._holes.append(sequence.row)
                self._modes -= sequence.modes
                sequence.row, sequence.length, sequence.cache = -1, 0, None

    def release(self) -> int:
        """Empty the batch and release the KV cache; return its bytes. The sequences may join again."""
        own = sum(sequence.cache.nbytes for sequence in self.sequences if sequence.cache is not None)
        self.remove(self.sequences)
        self._rows, self._holes = [], []
        return self._cache.release() + own

    @torch.inference_mode()
    def run(
        self, joiners: list[Sequence], steps: int, interrupted: Callable[[], bool], held: Callable[[], bool] = bool
    ) -> list[Sequence]:
        """Run up to ``steps`` passes, the first with the joiners; remove and return sequences that ended.

        It returns early once a sequence ends or when ``interrupted()``; when ``held()``, joiners whose prompts were not
        computed leave the batch again. A sequence whose logits are not finite ends with an ``error``; others continue.
        """
        self._arrange(joiners)
        finished = [] if joiners else self._decode()
        for number, prompts in enumerate(self._split(joiners)):
            if number and held():
                self.remove(sequence for sequence in joiners if not sequence.length)
                break
            finished += self._prefill(prompts)
        for _ in range(steps - 1):
            if finished or interrupted():
                break
            self._arrange([])
            finished = self._decode()
        self.remove(finished)
        return finished

    def _arrange(self, joiners: list[Sequence]) -> None:
        """Assign rows to joiners and fill the remaining holes with the last rows."""
        used = max((sequence.length for sequence in self.sequences), default=0)
        keep = len(self._rows)
        self._holes.sort(reverse=True)
        for sequence in joiners:
            if self._holes:
                sequence.row = self._holes.pop()
                self._rows[sequence.row] = sequence
            else:
                sequence.row = len(self._rows)
                self._rows.append(sequence)
            self._modes += sequence.modes
        self._close_holes(used)
        longest = max((len(sequence.context) for sequence in joiners), default=0)
        # a decode pass writes one position behind the longest row
        self._cache.reserve(len(self._rows), max(longest, used) + 1, min(keep, len(self._rows)), used)

    def _close_holes(self, used: int) -> None:
        target, source = [], []
        while self._holes:
            last = self._rows.pop()
            if last is None:
                self._holes.remove(len(self._rows))
                continue
            hole = self._holes.pop()
            target.append(hole)
            source.append(last.row)
            self._rows[hole], last.row = last, hole
        if target:
            rows = torch.tensor((target, source), device=self._device)
            self._cache.move(rows[0], rows[1], used)
            self._table.move(rows[0], rows[1])

    def _decode(self) -> list[Sequence]:
        sequences = self.sequences
        table = self._table.head(len(sequences))
        attended = max(sequence.length for sequence in sequences) + 1
        positions = table.integers[:, POSITION]
        tokens = table.integers[:, LAST_TOKEN]
        if self._by_row is None:
            self._cache.begin_decode(positions, attended)
            mask: Any = self._model.masks.make(positions, attended, self._model.module.dtype)
        if self._by_row is not None:
            logits = self._by_row.decode(tokens, [sequence.cache for sequence in sequences])
        elif self._direct is not None:
            logits = self._direct(tokens, positions, mask, self._cache)
        else:
            logits = self._model.module(
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=(positions + table.integers[:, OFFSET])[:, None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits[:, -1]
        positions += 1
        if self._model.routers is not None:
            for sequence, experts in zip(sequences, (self._by_row or self._model.routers).taken(), strict=True):
                sequence.note_experts(experts[None])
        for sequence in sequences:
            sequence.length += 1
        return self._sample(logits, table, sequences, self._modes)

    def _split(self, joiners: list[Sequence]) -> list[_Prompts]:
        """Split joiners into passes of similar lengths, each within the limit of padded tokens."""
        sharing: dict[tuple[tuple[int, ...], str], list[Sequence]] = {}
        for sequence in joiners:
            sharing.setdefault((sequence.context, sequence.digest), []).append(sequence)
        passes: list[_Prompts] = []
        for (context, _), sequences in sorted(sharing.items(), key=lambda each: len(each[0][0])):
            full = passes and (len(passes[-1].contexts) + 1) * len(context) > self._prefill_tokens
            if not passes or full:
                passes.append(_Prompts([], [], [], []))
            current = passes[-1]
            current.source.extend([len(current.contexts)] * len(sequences))
            current.contexts.append(context)
            current.images.append(sequences[0].images)
            current.sequences.extend(sequences)
        return passes

    def _prefill(self, prompts: _Prompts) -> list[Sequence]:
        """Compute prompts, shared ones once, and draw a token for each sequence."""
        source = torch.tensor(prompts.source, device=self._device)
        rows = torch.tensor([sequence.row for sequence in prompts.sequences], device=self._device)
        if self._by_row is not None:
            offsets = {prompt: one.offset for one, prompt in zip(prompts.sequences, prompts.source, strict=True)}
            given = prompts.contexts, prompts.images, [offsets[prompt] for prompt in range(len(prompts.contexts))]
            logits, caches = self._by_row.prefill(*given)
            for sequence, prompt in zip(prompts.sequences, prompts.source, strict=True):
                sequence.cache = caches[prompt].take()
            width = 0
        else:
            logits, width = self._prefill_batch(prompts, rows, source)
        if self._model.routers is not None:
            taken = (self._by_row or self._model.routers).taken()
            starts = [0]
            for context in prompts.contexts:
                starts.append(starts[-1] + (width or len(context)))
            for sequence, prompt in zip(prompts.sequences, prompts.source, strict=True):
                sequence.note_experts(taken[starts[prompt] : starts[prompt] + len(sequence.context)])
        for sequence in prompts.sequences:
            sequence.length = len(sequence.context)
            self._tell_prompt(sequence)
        table = RowTable.build(
            [(one.request.sampling, one.running.seed, one.length, len(one.token_ids)) for one in prompts.sequences],
            self._device,
            [one.offset for one in prompts.sequences],
        )
        modes = sum((sequence.modes for sequence in prompts.sequences), Counter[str]())
        finished = self._sample(logits.index_select(0, source), table, prompts.sequences, modes)
        self._table.write(rows, table)
        return finished

    def _tell_prompt(self, sequence: Sequence) -> None:
        """Compute the log-probs of a prompt in a pass of its own, if its request asks for them."""
        shaper, prompt = sequence.shaper, sequence.request.prompt_ids
        if shaper is None or not shaper.tells_prompt or sequence.running.prompt:
            return
        given = torch.tensor([prompt[:-1]], device=self._device)
        logits = self._model.module(input_ids=given, use_cache=False).logits[0]
        if self._model.routers is not None:
            self._model.routers.taken()  # they are those of the other pass
        sequence.running.prompt = of_prompt(logits, prompt, shaper.shaping.top_log_probs)

    def _prefill_batch(self, prompts: _Prompts, rows: Tensor, source: Tensor) -> tuple[Tensor, int]:
        """Return the logits ``[U, V]`` after each prompt, and the padded length."""
        lengths = torch.tensor([len(context) for context in prompts.contexts], device=self._device)
        width = len(prompts.contexts[-1])  # they are sorted
        # padding on the right: under a causal mask no token of a prompt ever sees it
        padded = [context + (0,) * (width - len(context)) for context in prompts.contexts]
        self._cache.begin_prefill(rows, source)
        last = torch.arange(len(padded), device=self._device), lengths - 1
        # only the last position's logits are needed; it differs by row, so it is selected at the output layer
        hook = self._model.output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0][last][:, None],))
        try:
            plain = {"position_ids": torch.arange(width, device=self._device)[None]}
            with self._model.given(torch.tensor(padded, device=self._device), prompts.images) as inputs:
                output = self._model.module(**{**plain, **inputs}, past_key_values=self._cache, use_cache=True)
        finally:
            hook.remove()
        return output.logits[:, -1], width

    def _sample(self, logits: Tensor, table: RowTable, rows: list[Sequence], modes: Counter[str]) -> list[Sequence]:
        logits = shape_rows(logits, [(one.shaper, one.token_ids, one.likeliest) for one in rows])
        tokens, log_probs = draw(logits, table, modes)
        table.advance(tokens)
        values = log_probs.tolist()
        drawn = zip(rows, tokens.tolist(), values, strict=True)
        if math.isfinite(sum(values)):
            return [sequence for sequence, token, value in drawn if sequence.append(token, value)]
        broken = [one for one, value in zip(rows, values, strict=True) if not math.isfinite(value)]
        for sequence in broken:
            sequence.fail("the model's logits are not finite", "check its weights, and its dtype's range")
        # a masked position has weight 0, and 0 times NaN would reach the next sequence in the row
        self._cache.clear(torch.tensor([sequence.row for sequence in broken], device=self._device))
        return [one for one, token, value in drawn if one.error is not None or one.append(token, value)]
