"""Embeddings of an OpenAI-compatible address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from jackfield.abc.reward import HttpAnswer, RewardContext
from jackfield.errors import DeadlineExceeded, OperatorError, RewardError
from jackfield_embeddings.base import Embedder, EmbedderContext, Vectors, normed
from jackfield_reward_requests import RequestFailed, Service, read_json

_LONGEST_WAIT = 30.0  #: seconds between two attempts


@attrs.define(eq=False, kw_only=True)
class AddressEmbedder(Embedder):
    """Asks ``url`` + ``/embeddings`` for vectors."""

    context: EmbedderContext
    url: str
    model: str
    api_key_env: str | None = None  #: environment variable with the key
    batch: int = 32
    retries: int = 3
    seconds: float = 60.0  #: deadline of one request
    _service: Service = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        headers = {} if self.api_key_env is None else {"Authorization": f"Bearer ${{{self.api_key_env}}}"}
        context = RewardContext(clock=self.context.clock, http=self.context.http)
        url = self.url.rstrip("/").removesuffix("/embeddings") + "/embeddings"
        self._service = Service(context=context, url=url, headers=headers, limit=256 * 2**20)

    @property
    def version(self) -> str:
        """The model's name."""
        return self.model

    async def start(self) -> None:
        """Read the key."""
        self._service.start()

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Ask for ``batch`` texts at a time."""
        parts = [await self._asked(texts[at : at + self.batch]) for at in range(0, len(texts), self.batch)]
        if len({part.shape[1] for part in parts}) > 1:
            raise self._unusable("vectors of one length", str(sorted({part.shape[1] for part in parts})))
        return np.concatenate(parts) if parts else np.zeros((0, 0))

    async def _asked(self, texts: Sequence[str]) -> Vectors:
        """Ask until there is an answer; only failures that may pass are tried again."""
        body = {"model": self.model, "input": list(texts), "encoding_format": "float"}
        for attempt in range(self.retries + 1):
            try:
                answer = await self._service.ask("POST", body, seconds=self.seconds)
                return self._read(answer, len(texts))
            except (RewardError, DeadlineExceeded, OperatorError) as error:
                final = error.code == "reward.secret" or (isinstance(error, RequestFailed) and error.is_final)
                if final or attempt == self.retries:
                    raise
                told = error.retry_after if isinstance(error, RequestFailed) else None
            wait = 2.0**attempt if told is None else told
            await self.context.clock.sleep(min(wait, _LONGEST_WAIT))
        raise AssertionError("the last attempt returns or raises")

    def _read(self, answer: HttpAnswer, expected: int) -> Vectors:
        found = read_json(answer.text, self.url)
        try:
            rows = sorted(found["data"], key=lambda row: int(row["index"]))
            vectors = np.array([row["embedding"] for row in rows], dtype=np.float64)
            usage = found.get("usage") or {}
            tokens = usage.get("total_tokens", 0)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._unusable("a list `data` with `index` and `embedding`", answer.text[:300]) from None
        if [row["index"] for row in rows] != list(range(expected)) or vectors.ndim != 2:
            raise self._unusable(f"{expected} vectors of one length", f"{len(rows)}: {answer.text[:200]}")
        if isinstance(tokens, int) and tokens > 0:
            self.context.count("tokens", tokens)
        return normed(vectors, self.url)

    def _unusable(self, expected: str, found: str) -> OperatorError:
        details: Any = {"where": self._service.url, "expected": expected, "found": self._service.redacted(found)}
        return OperatorError("an address gave no embeddings", code="operator.embedding", **details)
