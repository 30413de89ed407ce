"""The loss functions that an engine runs: of a policy, with KL and entropy, and of a critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.abc.engine import LossFunction, TokenOutput
from jackfield.algorithms.aggregation import aggregate, means
from jackfield.algorithms.kl import kl
from jackfield.algorithms.losses import policy_loss, value_loss
from jackfield.algorithms.registry import COUNTS, INPUTS, part
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

_GROUPING = frozenset({"group_ids", "pair_ids"})
_GIVEN = COUNTS | {"log_probs", "response_mask", "rollout_weights"}
VALUE_LOSS = "value"  #: the name of a critic's loss in a LossSpec


@attrs.frozen(kw_only=True)
class LossSpec:
    """A loss that travels by name to the engine's ranks.

    ``global_counts`` hold the counts over the *whole* batch (all micro-batches, all ranks) by which the loss is
    normalised: ``global_tokens`` and ``global_sequences``, and whatever else the loss asks for.
    """

    name: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    global_counts: Mapping[str, int] = attrs.field(factory=dict)


def resolve_loss(spec: LossSpec) -> LossFunction:
    """Return the loss function of a spec, to be run on micro-batches.

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
    counts = {name: int(count) for name, count in spec.global_counts.items() if name in COUNTS}
    averaged: dict[str, Any] = {name: counts[name] for name in ("global_tokens", "global_sequences")}
    if spec.name != VALUE_LOSS:
        return _ComposedLoss(spec, counts, averaged)

    def critic(output: TokenOutput, data: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        assert output.values is not None, "the model of a critic has a value head"
        columns: dict[str, Any] = {name: data[name] for name in ("returns", "response_mask")}
        with _naming_rows(data):
            loss, metrics = value_loss(
                values=output.values, old_values=data.get("values"), **columns, **averaged, **spec.options
            )
        return loss, {**metrics, "value/loss": loss.detach()}

    return critic


@contextmanager
def _naming_rows(data: TensorDict) -> Iterator[None]:
    """Restore the order of the batch: an error names the row of the whole batch, by the column ``row``."""
    try:
        yield
    except ConfigError as error:
        number, comma, rest = str(error.where).removeprefix("row ").partition(",")
        rows = data.get("row")
        if error.code == "algorithm.not-finite" and number.isdigit() and rows is not None:
            error.where = f"row {int(rows[int(number)])}{comma}{rest}"
        raise


class _ComposedLoss:
    """policy loss + kl_coefficient * KL(pi, reference) - entropy_coefficient * entropy."""

    def __init__(self, spec: LossSpec, counts: Mapping[str, int], averaged: Mapping[str, int]) -> None:
        self._options = dict(spec.options)
        take = self._options.pop
        self._part, self._counts, self._averaged = part("loss", spec.name), counts, averaged
        self._mode, self._length_norm = take("aggregation", "token-mean"), take("length_norm", None)
        self._kl, self._kl_coefficient = take("kl", "k3"), take("kl_coefficient", 0.0)
        self._entropy_coefficient = take("entropy_coefficient", 0.0)
        self._correction = take("correction", None)
        self._part.split(self._options)
        part("aggregation", self._mode)
        if self._kl_coefficient:
            part("kl", self._kl)
        if self._mode == "seq-mean-token-sum-norm" and self._length_norm is None:
            raise ConfigError(
                "seq-mean-token-sum-norm needs length_norm: micro-batches are padded to different widths",
                code="algorithm.input",
                where=f"algorithm: loss {spec.name}",
                fix="set the loss option length_norm to the longest response that may be generated",
            )
        self.needs_entropy = self._entropy_coefficient != 0.0

    def __call__(self, output: TokenOutput, data: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        with _naming_rows(data):
            loss, metrics = policy_loss(
                self._part.name,
                log_probs=output.log_probs,
                response_mask=data["response_mask"],
                aggregation=self._mode,
                length_norm=self._length_norm,
                correction=self._correction,
                rollout_weights=data.get("rollout_weights"),
                **self._counts,
                **self._inputs(data),
                **self._options,
            )
        metrics["policy/loss"] = loss.detach()
        mask = self._own(data)
        if self._kl_coefficient:
            divergence = self._divergence(output.log_probs, data, mask)
            loss = loss + self._kl_coefficient * self._penalty("policy/kl", divergence, mask, metrics)
        if output.entropy is not None:
            loss = loss - self._entropy_coefficient * self._penalty("policy/entropy", output.entropy, mask, metrics)
        return loss, metrics

    def _penalty(self, name: str, values: Tensor, mask: Tensor, metrics: dict[str, Tensor]) -> Tensor:
        """The values aggregated like the loss; in the metrics stands their mean per token."""
        metrics |= means({name: values}, mask, values, **self._averaged)
        return aggregate(values, mask, self._mode, length_norm=self._length_norm, **self._averaged)

    def _own(self, data: TensorDict) -> Tensor:
        """The mask without the rows that an expert wrote, where the loss tells them apart."""
        expert = data.get("expert_mask") if "expert_mask" in self._part.inputs else None
        mask: Tensor = data["response_mask"]
        return mask if expert is None else mask.masked_fill((expert != 0).unsqueeze(-1), 0)

    def _inputs(self, data: TensorDict) -> dict[str, Any]:
        """What the loss takes and the data hold; what it would need of the whole batch has to be there."""
        wanted = set(INPUTS if self._part.open else self._part.inputs)
        if self._correction is not None:
            wanted |= {"old_log_probs", "rollout_log_probs"}
        found = {name: data.get(name) for name in sorted(wanted - _GROUPING - _GIVEN)}
        inputs = {name: value for name, value in found.items() if value is not None}
        missing = [name for name in self._part.whole_batch if name not in inputs and name not in self._counts]
        if missing and not wanted & _GROUPING:  # a loss that groups rows refuses to be without groups
            raise ConfigError(
                f"{self._part.name} depends on the whole batch and got no {' and '.join(missing)}",
                code="algorithm.input",
                where=f"algorithm: loss {self._part.name}",
                fix=f"counts come with the loss's global counts, columns from prepare({self._part.name!r}, …)",
            )
        return inputs

    def _divergence(self, log_probs: Tensor, data: TensorDict, mask: Tensor) -> Tensor:
        """The KL per token. Positions that do not count are emptied first, so that no NaN reaches a gradient."""
        tensors = {"log_probs": log_probs, "ref_log_probs": data["ref_log_probs"]}
        if (old := data.get("old_log_probs")) is not None:
            tensors["old_log_probs"] = old
        return kl(self._kl, **{name: value.masked_fill(mask == 0, 0.0) for name, value in tensors.items()})
