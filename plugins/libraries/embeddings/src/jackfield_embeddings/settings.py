"""Which embedder is used."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs
from attrs.validators import ge, gt

from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_embeddings.address import AddressEmbedder
from jackfield_embeddings.base import Embedder, EmbedderContext
from jackfield_embeddings.hashed import HashedEmbedder
from jackfield_embeddings.models import TransformersEmbedder

#: The embedders that a setting is of.
_OF = {
    "dimensions": ("hashed",),
    "path": ("transformers",),
    "pooling": ("transformers",),
    "layer": ("transformers",),
    "max_tokens": ("transformers",),
    "device": ("transformers",),
    "batch": ("transformers", "address"),
    "url": ("address",),
    "model": ("address",),
    "api_key_env": ("address",),
    "retries": ("address",),
    "seconds": ("address",),
}


@attrs.frozen(kw_only=True)
class EmbedderConfig:
    """Settings of an embedder: those of others than ``name`` are refused."""

    name: Literal["hashed", "transformers", "address"] = option(
        "hashed", "hashed: counts of three characters; transformers: a model in a folder; address: one at a URL"
    )
    dimensions: int = option(512, "hashed: size of a vector", ge(16))
    path: str | None = option(None, "transformers: Hugging Face folder of the model")
    pooling: Literal["mean", "last"] = option("mean", "transformers: mean of all tokens, or the last one")
    layer: int = option(-1, "transformers: number of the hidden states; 0: embeddings of tokens; -1: the last layer")
    max_tokens: int = option(512, "transformers: longer texts are cut", ge(1))
    device: str = option("cpu", "transformers: torch's name of the device")
    batch: int = option(32, "transformers, address: texts that are computed at a time", ge(1))
    url: str | None = option(None, "address: base URL, such as http://127.0.0.1:8000/v1")
    model: str | None = option(None, "address: the model's name at url")
    api_key_env: str | None = option(None, "address: environment variable with the key; null: it needs none")
    retries: int = option(3, "address: further attempts of a request that failed for a while", ge(0))
    seconds: float = option(60.0, "address: deadline of one request", gt(0.0))

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(EmbedderConfig):
            if self.name not in _OF.get(field.name, (self.name,)) and getattr(self, field.name) != field.default:
                of = " or ".join(_OF[field.name])
                raise _refused(field.name, f"{field.name} has no effect with the embedder {self.name}", f"use {of}")
        if self.name == "transformers" and self.path is None:
            raise _refused("path", "the embedder transformers has no model", "give the model's folder")
        if self.name == "address":
            if self.url is None or not self.url.startswith(("http://", "https://")):
                raise _refused("url", f"{self.url!r} is not an address", "give one such as http://host/v1")
            if self.model is None:
                raise _refused("model", "the embedder address has no model", "give the model's name at the address")


def _refused(where: str, message: str, fix: str) -> ConfigError:
    return ConfigError(message, where=where, fix=fix)


def make_embedder(config: EmbedderConfig, context: EmbedderContext) -> Embedder:
    """Return the embedder of some settings, which is not started."""
    if config.name == "transformers":
        return TransformersEmbedder(
            path=Path(config.path or ""),
            pooling=config.pooling,
            layer=config.layer,
            batch=config.batch,
            max_tokens=config.max_tokens,
            device=config.device,
        )
    if config.name == "address":
        return AddressEmbedder(
            context=context,
            url=config.url or "",
            model=config.model or "",
            api_key_env=config.api_key_env,
            batch=config.batch,
            retries=config.retries,
            seconds=config.seconds,
        )
    return HashedEmbedder(config.dimensions)
