"""How far the log-probs of a training pass are from those of an inference pass, and from the rollout server's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from jackfield.queue import BatchMeta
from jackfield.sdk.jagged import to_padded

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

PREFIX = "log_prob_check/"  #: of the names that :func:`distances` returns


@attrs.frozen(kw_only=True)
class Comparison:
    """What a training pass is compared with; plain values, so that it can travel."""

    engine: str  #: column of the engine's log-probs, computed by an inference pass with the same weights
    #: samples that weights of this version alone generated are compared with ``rollout_log_probs``, too; None: none is
    version: int | None
    slack: float = 0.0  #: nats by which the rollout's may be higher than the engine's: what its filters explain
    dropout: bool = False  #: it is wanted: the rollout's are compared with the inference pass

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that have to be read for it."""
        return (self.engine,) if self.version is None else (self.engine, "rollout_log_probs")


def distances(trained: torch.Tensor, table: TensorDict, batch: BatchMeta, comparison: Comparison) -> dict[str, float]:
    """Compute distances of log-probs over the model's own tokens, in nats.

    Args:
        trained: Of the training pass, jagged ``[B, j]``.
        table: Jagged ``response_mask`` and the comparison's columns, ``[B, j]``.
        batch: The samples.
        comparison: With what.

    Returns:
        Behind :data:`PREFIX`, for ``train_mode`` (training against inference pass) and ``rollout`` (rollout against
        training pass): ``tokens``, ``sum`` and ``max`` of the distances; ``rollout/signed_sum``, positive where the
        rollout's are higher; and ``sample/KEY/max``, the mean distance of the sample that is farthest from the rollout.
        All but ``max`` add up over ranks. Nothing of ``rollout`` where no sample can be compared.
    """
    import torch

    mask = to_padded(table["response_mask"]) != 0
    now, engine = to_padded(trained), to_padded(table[comparison.engine])
    result, version = _statistics("train_mode", (now - engine).abs()[mask]), comparison.version
    # an expert's samples have no versions
    compared = [
        version is not None and tags.get("weight_version_min") == version == tags.get("weight_version_max")
        for tags in batch.tags
    ]
    own = mask & torch.tensor(compared)[:, None]
    if not own.any():
        return result
    higher = to_padded(table["rollout_log_probs"]) - (engine if comparison.dropout else now)
    distance = torch.maximum(-higher, higher - comparison.slack).clamp(min=0.0)
    rows = distance.double().masked_fill(~own, 0.0).sum(-1) / own.sum(-1).clamp(min=1)
    farthest = int(rows.nan_to_num(torch.inf).argmax())
    return {
        **result,
        **_statistics("rollout", distance[own]),
        f"{PREFIX}rollout/signed_sum": float(higher.double()[own].sum()),
        f"{PREFIX}sample/{batch.keys[farthest]}/max": float(rows[farthest]),
    }


def _statistics(name: str, distances: torch.Tensor) -> dict[str, float]:
    if not len(distances):
        return {}
    values: dict[str, Any] = {"tokens": len(distances), "sum": distances.double().sum(), "max": distances.max()}
    return {f"{PREFIX}{name}/{key}": float(value) for key, value in values.items()}
