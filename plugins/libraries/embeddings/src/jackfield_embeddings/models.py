"""Hidden states of a model in a Hugging Face folder, on a processor or another device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import xxhash

from jackfield.errors import OperatorError
from jackfield_embeddings.base import Embedder, Vectors, normed


@attrs.define(slots=False, eq=False, kw_only=True)  # it has a cached property
class TransformersEmbedder(Embedder):
    """Embeds a text as the mean of the hidden states of its tokens, or as that of its last token.

    Texts of a request are computed in order of their numbers of tokens, ``batch`` at a time, so that padding is short.
    """

    path: Path
    pooling: Literal["mean", "last"] = "mean"
    layer: int = -1  #: of the hidden states, 0 being the embeddings of tokens, and -1 the last one
    batch: int = 32
    max_tokens: int = 512
    device: str = "cpu"
    _model: Any = attrs.field(default=None, init=False)
    _tokenizer: Any = attrs.field(default=None, init=False)

    @cached_property
    def version(self) -> str:
        """A digest of the names and contents of all files in the folder."""
        digest = xxhash.xxh3_128()
        for file in sorted(each for each in self._folder().iterdir() if each.is_file()):
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as opened:
                while part := opened.read(1 << 22):
                    digest.update(part)
        return f"{self.path.name}-{digest.hexdigest()}"

    def _folder(self) -> Path:
        if not (self.path / "config.json").is_file():
            raise OperatorError(
                "there is no embedding model",
                code="operator.embedding",
                where="embedder.path",
                expected="a Hugging Face folder with config.json",
                found=str(self.path),
                fix="download the model, and give its folder",
            )
        return self.path

    async def start(self) -> None:
        """Load model and tokenizer."""
        if self._model is None:
            await asyncio.to_thread(self._load)

    async def close(self) -> None:
        """Forget the model."""
        self._model = self._tokenizer = None

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Compute in a thread, which a cancelled call ends after its batch."""
        await self.start()
        stopped = threading.Event()
        try:
            return await asyncio.to_thread(self._embedded, texts, stopped)
        finally:
            stopped.set()

    def _load(self) -> None:
        folder = self._folder()
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise OperatorError(
                "embeddings of a model need torch and transformers",
                code="operator.embedding",
                where="embedder",
                expected="installed packages",
                found=str(error),
                fix="pip install 'jackfield-embeddings[transformers]'",
            ) from None
        try:
            # With safetensors, nothing in a folder is unpickled.
            model = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise OperatorError(
                "an embedding model cannot be loaded",
                code="operator.embedding",
                where=str(folder),
                expected="a model with config.json, safetensors and a tokenizer",
                found=str(error)[:500],
            ) from error
        self._model, self._tokenizer = model.eval().to(self.device), tokenizer

    def _embedded(self, texts: Sequence[str], stopped: threading.Event) -> Vectors:
        ids = [self._tokenizer.encode(text, truncation=True, max_length=self.max_tokens) or [0] for text in texts]
        order = sorted(range(len(ids)), key=lambda at: len(ids[at]))
        found: Vectors = np.zeros((len(ids), self._model.config.get_text_config().hidden_size))
        for start in range(0, len(order), self.batch):
            if stopped.is_set():
                break
            part = order[start : start + self.batch]
            found[part] = self._pooled([ids[at] for at in part])
        return normed(found, str(self.path)) if len(ids) else found

    def _pooled(self, ids: Sequence[Sequence[int]]) -> Vectors:
        """Return one vector for each sequence of tokens; they are padded on the right, and masked there."""
        import torch

        lengths = torch.tensor([len(each) for each in ids])
        padded_BT = torch.zeros((len(ids), int(lengths.max())), dtype=torch.long)
        for row, each in zip(padded_BT, ids, strict=True):
            row[: len(each)] = torch.tensor(each)
        mask_BT = (torch.arange(padded_BT.shape[1]) < lengths[:, None]).long()
        with torch.inference_mode():
            output = self._model(
                input_ids=padded_BT.to(self.device),
                attention_mask=mask_BT.to(self.device),
                output_hidden_states=self.layer != -1,
            )
        states_BTD = (output.last_hidden_state if self.layer == -1 else self._layer(output)).double().cpu()
        if self.pooling == "last":
            pooled_BD = states_BTD[torch.arange(len(ids)), lengths - 1]
        else:
            pooled_BD = (states_BTD * mask_BT[:, :, None]).sum(1) / lengths[:, None]
        return pooled_BD.numpy()  # type: ignore[no-any-return]

    def _layer(self, output: Any) -> Any:
        try:
            return output.hidden_states[self.layer]
        except IndexError:
            raise OperatorError(
                "the embedding model has no such layer",
                code="operator.embedding",
                where="embedder.layer",
                expected=f"from {-len(output.hidden_states)} to {len(output.hidden_states) - 1}",
                found=self.layer,
            ) from None
