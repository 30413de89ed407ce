"""The loss functions that an engine runs: a policy loss with KL and entropy, and a critic's loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jackfield.abc.engine import LossFunction, LossSpec, TokenOutput
from jackfield.algorithms.aggregation import aggregate
from jackfield.algorithms.kl import kl
from jackfield.algorithms.losses import COUNTS, ROW_INPUTS, TOKEN_INPUTS, policy_loss, value_loss
from jackfield.algorithms.registry import check_options, part, signature
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

__all__ = ["VALUE_LOSS", "resolve_loss"]

VALUE_LOSS = "value"  #: the name of a critic's loss in a LossSpec


def resolve_loss(spec: LossSpec) -> LossFunction:
    """The loss function of a spec, to be run on micro-batches.

    Options of the spec are the loss's own, and ``aggregation``, ``length_norm``, ``kl`` (an estimator's name),
    ``kl_coefficient``, ``entropy_coefficient`` and ``correction`` (see :func:`jackfield.algorithms.policy_loss`). The
    function reads ``response_mask`` and those of the loss's inputs that its data hold: ``old_log_probs``,
    ``advantages``, ``ref_log_probs``, ``rollout_weights``, what :func:`jackfield.algorithms.prepare` made, and so on.
    Micro-batches may split groups and pairs, so ``group_ids`` and ``pair_ids`` are not looked at. KL and entropy are
    those of rows that the policy itself generated: a loss that takes an ``expert_mask`` leaves its rows out there. A
    column ``row`` (int ``[B]``) says which rows of the whole batch these are, for errors.

    The name :data:`VALUE_LOSS` is the critic's: :func:`jackfield.algorithms.value_loss` of the model's values, with
    ``returns`` and, as those before the update, ``values`` of the data.

    Raises:
        ConfigError: ``algorithm.unknown`` or ``algorithm.input``: an option that the loss does not have.
    """
    return _ValueLoss(spec) if spec.name == VALUE_LOSS else _ComposedLoss(spec)


@contextmanager
def _naming_rows(data: TensorDict) -> Iterator[None]:
    """A micro-batch has an order of its own: an error names the row of the whole batch, by the column ``row``."""
    try:
        yield
    except ConfigError as error:
        number, comma, rest = str(error.where).removeprefix("row ").partition(",")
        rows = data.get("row")
        if error.code == "algorithm.not-finite" and number.isdigit() and rows is not None:
            error.where = f"row {int(rows[int(number)])}{comma}{rest}"
        raise


class _ValueLoss:
    """The critic's loss on one micro-batch."""

    def __init__(self, spec: LossSpec) -> None:
        self._options: dict[str, Any] = dict(spec.options)
        self._counts = {name: int(spec.global_counts[name]) for name in ("global_tokens", "global_sequences")}

    def __call__(self, output: TokenOutput, data: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        assert output.values is not None, "the model of a critic has a value head"
        with _naming_rows(data):
            loss, metrics = value_loss(
                values=output.values,
                returns=data["returns"],
                response_mask=data["response_mask"],
                old_values=data.get("values"),
                global_tokens=self._counts["global_tokens"],
                global_sequences=self._counts["global_sequences"],
                **self._options,
            )
        return loss, {**metrics, "value/loss": loss.detach()}


class _ComposedLoss:
    """policy loss + kl_coefficient * KL(pi, reference) - entropy_coefficient * entropy."""

    def __init__(self, spec: LossSpec) -> None:
        options = dict(spec.options)
        self._part = part("loss", spec.name)
        self._counts = {name: int(spec.global_counts[name]) for name in ("global_tokens", "global_sequences")}
        self._own_counts = {name: int(value) for name, value in spec.global_counts.items() if name in COUNTS}
        self._aggregation = options.pop("aggregation", "token-mean")
        self._length_norm = options.pop("length_norm", None)
        self._kl = options.pop("kl", "k3")
        self._kl_coefficient = options.pop("kl_coefficient", 0.0)
        self._entropy_coefficient = options.pop("entropy_coefficient", 0.0)
        self._correction = options.pop("correction", None)
        check_options(self._part, options)
        part("aggregation", self._aggregation)
        if self._kl_coefficient:
            part("kl", self._kl)
        if self._aggregation == "seq-mean-token-sum-norm" and self._length_norm is None:
            raise ConfigError(
                "seq-mean-token-sum-norm needs length_norm: micro-batches are padded to different widths",
                code="algorithm.input",
                where=f"algorithm: loss {spec.name}",
                fix="set the loss option length_norm to the longest response that may be generated",
            )
        self._options = options
        self.needs_entropy = self._entropy_coefficient != 0.0

    def __call__(self, output: TokenOutput, data: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        mask = data["response_mask"]
        with _naming_rows(data):
            loss, metrics = policy_loss(
                self._part.name,
                log_probs=output.log_probs,
                response_mask=mask,
                aggregation=self._aggregation,
                length_norm=self._length_norm,
                correction=self._correction,
                rollout_weights=data.get("rollout_weights"),
                global_tokens=self._counts["global_tokens"],
                global_sequences=self._counts["global_sequences"],
                **self._inputs(data),
                **self._options,
            )
        metrics["policy/loss"] = loss.detach()
        mask = self._own(mask, data)
        if self._kl_coefficient:
            divergence = self._divergence(output.log_probs, data, mask)
            penalty = aggregate(divergence, mask, self._aggregation, length_norm=self._length_norm, **self._counts)
            loss = loss + self._kl_coefficient * penalty
            metrics["policy/kl"] = aggregate(divergence.detach(), mask, "token-mean", **self._counts)
        if output.entropy is not None:
            entropy = aggregate(output.entropy, mask, self._aggregation, length_norm=self._length_norm, **self._counts)
            loss = loss - self._entropy_coefficient * entropy
            metrics["policy/entropy"] = aggregate(output.entropy.detach(), mask, "token-mean", **self._counts)
        return loss, metrics

    def _own(self, mask: Tensor, data: TensorDict) -> Tensor:
        """The mask without the rows that an expert wrote, where the loss tells them apart."""
        expert = data.get("expert_mask") if "expert_mask" in signature(self._part.function).inputs else None
        return mask if expert is None else mask.masked_fill((expert != 0).unsqueeze(-1), 0)

    def _inputs(self, data: TensorDict) -> dict[str, Any]:
        """What the loss takes and the data hold; what it would need of the whole batch has to be there."""
        known = signature(self._part.function)
        wanted = {name for name in (*TOKEN_INPUTS, *ROW_INPUTS) if known.open or name in known.inputs}
        if self._correction is not None:
            wanted |= {"old_log_probs", "rollout_log_probs"}
        grouping = wanted & {"group_ids", "pair_ids"}
        found = {name: data.get(name) for name in sorted(wanted - grouping)}
        inputs = {name: value for name, value in found.items() if value is not None}
        inputs |= {name: value for name, value in self._own_counts.items() if known.open or name in known.inputs}
        missing = [name for name in self._part.whole_batch if name not in inputs]
        if missing and not grouping:  # a loss that groups rows says itself that it got no groups
            raise ConfigError(
                f"{self._part.name} depends on the whole batch and got no {' and '.join(missing)}",
                code="algorithm.input",
                where=f"algorithm: loss {self._part.name}",
                fix=f"counts come with the loss's global counts, columns from prepare({self._part.name!r}, …)",
            )
        return inputs

    def _divergence(self, log_probs: Tensor, data: TensorDict, mask: Tensor) -> Tensor:
        """The KL per token. Positions that do not count are emptied first, so that no NaN reaches a gradient."""
        outside = mask == 0
        old = data.get("old_log_probs")
        return kl(
            self._kl,
            log_probs.masked_fill(outside, 0.0),
            data["ref_log_probs"].masked_fill(outside, 0.0),
            old_log_probs=None if old is None else old.masked_fill(outside, 0.0),
        )
