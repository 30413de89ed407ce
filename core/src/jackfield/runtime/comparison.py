"""How far the log-probs of training, of an inference pass and of the rollout are from each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs

from jackfield.errors import EngineError
from jackfield.queue.meta import BatchMeta
from jackfield.sdk.jagged import to_padded

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


@attrs.frozen(kw_only=True)
class Comparison:
    """Selects what a training pass is compared with, in plain values for RPC."""

    engine: str  #: column of the engine's log-probs, computed by an inference pass with the same weights
    #: samples generated entirely by this version are also compared with ``rollout_log_probs``; None: no sample is
    version: int | None
    slack: float = 0.0  #: nats by which sampling filters may raise the rollout's log-probs
    dropout: bool = False  #: the model trains with dropout: compare the rollout's with the inference pass


@attrs.frozen
class Distance:
    """The distance of two kinds of log-probs over a sample's model tokens, in nats."""

    tokens: int
    sum: float
    signed_sum: float  #: positive if the log-probs that are compared are higher
    max: float


#: By kind and key of a sample: ``train_mode`` compares an inference with the training pass, ``rollout`` the rollout.
Distances: TypeAlias = dict[str, dict[str, Distance]]


def distances(trained: torch.Tensor | None, table: TensorDict, batch: BatchMeta, comparison: Comparison) -> Distances:
    """Compare log-probs over the model's own tokens.

    ``trained`` are those of the training pass; ``table`` has ``response_mask`` and the comparison's columns. All are
    jagged ``[B, j]``. Samples that cannot be compared are absent.
    """
    import torch

    if trained is None:
        what, expected = "the engine's training pass has no log-probs", "jagged float32 [B, j], for the log-prob check"
        fix = "have the engine return them, or set log_prob_check.every: 0"
        raise EngineError(what, where="EngineOutput.log_probs", expected=expected, fix=fix)
    mask = to_padded(table["response_mask"]) != 0
    now, engine, version = to_padded(trained), to_padded(table[comparison.engine]), comparison.version
    kinds = {"train_mode": (mask, engine - now, 0.0)}
    # samples of an expert have no versions
    own = [
        version is not None and tags.get("weight_version_min") == version == tags.get("weight_version_max")
        for tags in batch.tags
    ]
    if any(own):
        higher = to_padded(table["rollout_log_probs"]) - (engine if comparison.dropout else now)
        kinds["rollout"] = mask & torch.tensor(own)[:, None], higher, comparison.slack
    result: Distances = {}
    for kind, (counted, higher, slack) in kinds.items():
        distance = torch.maximum(-higher, higher - slack).clamp(min=0.0).masked_fill(~counted, 0.0)
        signed = higher.double().masked_fill(~counted, 0.0)
        sums = [each.sum(-1).tolist() for each in (counted, distance.double(), signed)]
        rows = zip(batch.keys, *sums, distance.amax(-1).tolist(), strict=True)
        result[kind] = {key: Distance(*row) for key, *row in rows if row[0]}
    return result
