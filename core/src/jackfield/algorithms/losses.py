"""Losses of policies, critics and students, their aggregation by global counts, and their form for engines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from attrs.validators import gt, lt

from jackfield.abc.engine import LossFunction, TokenOutput
from jackfield.algorithms import clipped, weighted  # noqa: F401 (they register losses)
from jackfield.algorithms.registry import COUNTS, INPUTS, TOKEN_INPUTS, Part, part, register
from jackfield.algorithms.shaping import kl
from jackfield.algorithms.tensors import Term, clean, naming_rows, require_finite, require_shapes
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

#: Inputs that are not read from the columns of a micro-batch, which may have parts of groups and pairs.
_NOT_READ = COUNTS | {"group_ids", "pair_ids", "log_probs", "response_mask", "rollout_weights"}
VALUE_LOSS = "value"  #: the name of a critic's loss in a LossSpec


def policy_loss(
    name: str,
    *,
    log_probs: Tensor,
    response_mask: Tensor,
    global_tokens: int,
    global_sequences: int,
    aggregation: str = "token-mean",
    length_norm: float | None = None,
    rollout_weights: Tensor | None = None,
    whole_batch: bool = True,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these rows in the batch's policy loss, and metrics: shares of batch means, summed like it.

    ``jackfield algorithms list`` shows the names. ``log_probs`` are the policy's, with gradients. Where the mask is 0,
    the values of all tensors are ignored, even NaN. ``options`` are options of the loss and its other inputs:
    ``old_log_probs`` (of the policy before this batch), ``advantages``, ``ref_log_probs`` (of the reference) and
    ``rollout_log_probs`` (of the policy that generated); ``expert_mask`` bool ``[B]`` (the rows that an expert wrote),
    ``group_ids``, ``pair_ids`` int ``[B]``, ``rewards`` float ``[B]``; counts (``global_usual_tokens``, …); and the
    columns of :func:`prepare`, which are computed from these rows if they are missing. With ``whole_batch=False`` the
    rows are a part of the batch, and a loss that compares rows needs these columns.

    ``aggregation`` and ``length_norm`` are those of :func:`aggregate`; a loss with one value per sequence (or pair) is
    a mean over sequences (or pairs) in every mode except ``token-sum``. ``rollout_weights`` are importance weights, 0
    for excluded tokens: those of :meth:`jackfield.algorithms.shaping.Correction.weights`, multiplied by its mask.
    """
    chosen = part("loss", name)
    inputs, options = chosen.split(options)
    counts = {"global_tokens": global_tokens, "global_sequences": global_sequences}
    offered = _clean(chosen, {**inputs, **counts, "log_probs": log_probs}, response_mask)
    lacking = [key for key in chosen.whole_batch if key not in offered]
    if lacking and whole_batch:
        offered |= _columns(chosen, offered, options, optional=not chosen.missing(offered))
    elif any(key in COUNTS for key in lacking):
        message = f"{name} depends on the whole batch and got no {' and '.join(lacking)}"
        fix = "give these counts of the whole batch with global_tokens"
        raise ConfigError(message, code="algorithm.input", where=f"algorithm: loss {name}", fix=fix)
    result, metrics = chosen(offered, options)
    del offered  # copies of the inputs; the autograd graph keeps those that it needs
    terms: tuple[Term, ...] = result if isinstance(result, tuple) else (Term(values=result),)
    averaging: dict[str, Any] = {"aggregation": aggregation, "length_norm": length_norm, **counts}
    shares = []
    for term in terms:
        values, mask = term.values, response_mask if term.mask is None else term.mask
        if rollout_weights is not None:
            if values.dim() == 1:
                fix = "leave the correction out, or choose a loss with a value per token"
                raise ConfigError("a loss per sequence takes no weights per token", code="algorithm.input", fix=fix)
            values = values * rollout_weights.detach().masked_fill(response_mask == 0, 0.0)
        shares.append(term.weight * aggregate(values, mask, **{**averaging, **term.counts}))
    loss = sum(shares[1:], start=shares[0])
    return loss, means(metrics, response_mask, loss, **averaging)


def prepare(name: str, *, log_probs: Tensor, response_mask: Tensor, **options: Any) -> dict[str, Tensor]:
    """Compute the columns that the loss ``name`` needs from the whole batch; none for a loss that can be split.

    A loss that compares rows or tokens of the whole batch (:attr:`Part.whole_batch`) can only be split into
    micro-batches if its rows have these columns, ``[B, T]`` or ``[B]``, without gradients. Inputs and options are those
    of :func:`policy_loss`, over the whole batch right before the optimizer step.
    """
    chosen = part("loss", name)
    inputs, options = chosen.split(options)
    return _columns(chosen, _clean(chosen, {**inputs, "log_probs": log_probs}, response_mask), options)


def _columns(
    chosen: Part, offered: Mapping[str, Any], options: Mapping[str, Any], optional: bool = False
) -> dict[str, Tensor]:
    """Return columns of the whole batch that the loss needs; none if they are ``optional`` and inputs are missing."""
    preparation = chosen.preparation
    given = {**chosen.options, **options, **offered, "log_probs": offered["log_probs"].detach()}
    if preparation is None or (optional and preparation.missing(given)):
        return {}
    columns: dict[str, Tensor] = preparation(given)
    return columns


def _clean(chosen: Part, inputs: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
    """Return the inputs that the part or its preparation takes, checked and 0 where the mask is 0."""
    wanted = {*chosen.inputs, *(chosen.preparation.inputs if chosen.preparation else ())}
    wanted |= inputs.keys() if chosen.open else set()
    used = {key: value for key, value in inputs.items() if value is not None and key in wanted}
    rows = {key: value for key, value in used.items() if hasattr(value, "dim") and key not in TOKEN_INPUTS}
    require_shapes(rows, mask.shape[:1], mask.shape)
    return {**used, **clean({key: used[key] for key in used if key in TOKEN_INPUTS}, mask), "response_mask": mask}


def value_loss(
    *,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    old_values: Tensor | None = None,
    clip: float | None = 0.2,
    **averaging: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these rows in the batch's critic loss, and its metrics.

    It is max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2; without a clip (V - R)^2 / 2. PPO's value
    loss as in OpenAI baselines (the paper has no clip). ``values`` have gradients, ``returns`` are those of
    :func:`jackfield.algorithms.advantages`, and ``old_values`` are the critic's before this batch's updates, which a
    ``clip`` requires. ``averaging`` has the counts, ``aggregation`` and ``length_norm`` of :func:`aggregate`.
    """
    if clip is not None and old_values is None:
        raise ConfigError("a clipped value loss needs old_values", code="algorithm.input", fix="clip=None: no clipping")
    given = {"values": values, "returns": returns} | ({} if old_values is None else {"old_values": old_values})
    tensors = clean(given, response_mask)
    predicted, target = tensors["values"], tensors["returns"]
    errors = bounded = (predicted - target).square()
    if clip is not None:
        old = tensors["old_values"]
        bounded = (predicted.maximum(old - clip).minimum(old + clip) - target).square()
    loss = aggregate(0.5 * errors.maximum(bounded), response_mask, **averaging)
    metrics = {"value/clip_fraction": bounded > errors, "value/mean": predicted, "value/squared_error": errors}
    return loss, means(metrics, response_mask, loss, **averaging)


def distillation_loss(
    name: str,
    *,
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    response_mask: Tensor,
    aggregation: str = "token-mean",
    length_norm: float | None = None,
    **options: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these rows in the batch's distillation loss, and its metrics.

    ``name`` is ``forward_kl``, ``reverse_kl`` or ``jsd`` (with the option ``beta``). The log-probs are normalised over
    the vocabulary, float ``[B, T, V]``, the student's with gradients; a teacher's -inf is a probability of 0. Tokens
    are the student's own (on-policy). Counts, ``aggregation`` and ``length_norm`` are those of :func:`aggregate`.
    """
    chosen = part("distillation", name)
    counts, options = chosen.split(options)
    averaging: dict[str, Any] = {"aggregation": aggregation, "length_norm": length_norm, **counts}
    if log_probs.shape != teacher_log_probs.shape or log_probs.shape[:2] != response_mask.shape:
        found = f"{tuple(log_probs.shape)}, {tuple(teacher_log_probs.shape)} and {tuple(response_mask.shape)}"
        message, expected = "student, teacher and response_mask do not fit", "[B, T, V], [B, T, V] and [B, T]"
        raise ConfigError(message, code="algorithm.input", expected=expected, found=found)
    outside, even = (response_mask == 0).unsqueeze(-1), -math.log(log_probs.shape[-1])
    tensors = {"log_probs": log_probs, "teacher_log_probs": teacher_log_probs}
    divergence: Tensor = chosen({key: value.masked_fill(outside, even) for key, value in tensors.items()}, options)
    fix = "student and teacher need the same vocabulary; reverse_kl needs a teacher that excludes no token"
    require_finite({f"the {name}": divergence}, response_mask, fix)
    loss = aggregate(divergence, response_mask, **averaging)
    return loss, means({f"distillation/{name}": divergence}, response_mask, loss, **averaging)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) over the last dimension; 0 log 0 = 0."""
    nothing = log_p == float("-inf")
    terms = log_p.exp() * (log_p.masked_fill(nothing, 0.0) - log_q.masked_fill(nothing, 0.0))
    return terms.sum(-1)


@register("distillation", "forward_kl", "token")
def _forward_kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(teacher, student) = sum_v p_T log(p_T / p_S): covers the teacher's modes. [GKD, arXiv:2306.13649,
    section 2]
    """
    return _divergence(teacher_log_probs, log_probs)


@register("distillation", "reverse_kl", "token")
def _reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(student, teacher) = sum_v p_S log(p_S / p_T): stays within the teacher's modes. [GKD, arXiv:2306.13649,
    section 2; MiniLLM, arXiv:2306.08543]
    """
    return _divergence(log_probs, teacher_log_probs)


@register("distillation", "jsd", "token")
def _jsd(log_probs: Tensor, teacher_log_probs: Tensor, *, beta: Annotated[float, gt(0.0), lt(1.0)] = 0.5) -> Tensor:
    """beta KL(teacher, m) + (1 - beta) KL(student, m), m = beta p_T + (1 - beta) p_S. [GKD, arXiv:2306.13649, section
    2, equation 1]

    Differs: We refuse beta=0 and beta=1, where the divergence is 0; forward_kl and reverse_kl are the limits of jsd
    divided by beta and 1 - beta.
    """
    mixture = (teacher_log_probs + math.log(beta)).logaddexp(log_probs + math.log1p(-beta))
    return beta * _divergence(teacher_log_probs, mixture) + (1.0 - beta) * _divergence(log_probs, mixture)


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: str = "token-mean",
    *,
    global_tokens: float,
    global_sequences: float,
    length_norm: float | None = None,
) -> Tensor:
    """Return the share of these rows in the batch's mean.

    The sum of the shares of micro-batches and ranks is the batch's value, 0 for a batch without tokens (or sequences).
    ``values`` are ``[B, T]``, or one per sequence, ``[B]``: then each sequence counts as one token. Positions where the
    mask is 0 do not count, even if their value is NaN. ``aggregation`` is ``token-mean``, ``token-sum`` or
    ``seq-mean-token-{sum,sum-norm,mean}``. ``length_norm`` is the constant of ``seq-mean-token-sum-norm``, above 0 and
    the same for the whole run (Dr. GRPO: the longest response that may be generated). None: the width T of ``values``,
    which is only correct if every part of the batch is padded to the same width.
    """
    if values.dim() == 1:
        values, mask, global_tokens = (values.unsqueeze(-1), mask.new_ones((len(values), 1)), global_sequences)
    length_norm = length_norm if length_norm is not None else values.shape[-1] or 1
    if not length_norm > 0:
        raise ConfigError("length_norm must be positive", code="algorithm.input", found=length_norm)
    offered = {"kept": values.masked_fill(mask == 0, 0.0), "mask": mask.to(values.dtype), "length_norm": length_norm}
    counts = {"global_tokens": global_tokens, "global_sequences": global_sequences}
    share: Tensor = part("aggregation", aggregation)({**offered, **counts})
    return share


def means(metrics: Mapping[str, Tensor], mask: Tensor, like: Tensor, **averaging: Any) -> dict[str, Tensor]:
    """Return the shares in the batch's token means of metrics, in ``like``'s dtype, for any loss aggregation."""
    how = {**averaging, "aggregation": "token-mean"}
    return {name: aggregate(value.detach().to(like.dtype), mask, **how) for name, value in metrics.items()}


@register("aggregation", "token-mean", "token")
def _token_mean(kept: Tensor, global_tokens: float) -> Tensor:
    """sum of all tokens / tokens of the batch: every token counts the same. [DAPO, arXiv:2503.14476]"""
    return kept.sum() / max(global_tokens, 1)


@register("aggregation", "token-sum", "token")
def _token_sum(kept: Tensor) -> Tensor:
    """sum of all tokens."""
    return kept.sum()


@register("aggregation", "seq-mean-token-sum", "sequence")
def _seq_mean_token_sum(kept: Tensor, global_sequences: float) -> Tensor:
    """sum of all tokens / sequences of the batch. [Dr. GRPO, arXiv:2503.20783]"""
    return kept.sum() / max(global_sequences, 1)


@register("aggregation", "seq-mean-token-sum-norm", "sequence")
def _seq_mean_token_sum_norm(kept: Tensor, global_sequences: float, length_norm: float) -> Tensor:
    """sum of all tokens / (length_norm * sequences of the batch). [Dr. GRPO, arXiv:2503.20783]

    Differs: verl divides by the padded width of each micro-batch and not by the number of sequences: its loss depends
    on how the batch is split. We divide by a constant (length_norm) and by the sequences of the batch.
    """
    return kept.sum() / (length_norm * max(global_sequences, 1))


@register("aggregation", "seq-mean-token-mean", "sequence")
def _seq_mean_token_mean(kept: Tensor, mask: Tensor, global_sequences: float) -> Tensor:
    """mean over sequences of each sequence's mean; a sequence without model tokens gives 0 and still counts. [GRPO,
    arXiv:2402.03300]
    """
    return (kept.sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / max(global_sequences, 1)


@attrs.frozen(kw_only=True)
class LossSpec:
    """A loss as plain values that can be sent to the engine's ranks."""

    name: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    global_counts: Mapping[str, int] = attrs.field(factory=dict)  #: of the whole batch, all that the loss needs


def resolve_loss(spec: LossSpec) -> LossFunction:
    """Return the loss function of a spec, which runs on micro-batches.

    Options of the spec are the loss's options, ``aggregation``, ``length_norm``, ``kl`` (an estimator's name),
    ``kl_coefficient`` and ``entropy_coefficient``. The function reads ``response_mask``, ``rollout_weights`` and the
    loss's inputs from its data, including the columns of :func:`prepare`. Micro-batches may split groups and pairs, so
    ``group_ids`` and ``pair_ids`` are not read. KL and entropy only include rows that the policy itself generated: a
    loss with an ``expert_mask`` excludes the expert's rows there. A column ``row`` (int ``[B]``) has the indexes of
    these rows in the whole batch, for errors.

    The name :data:`VALUE_LOSS` is the critic's loss, :func:`value_loss` of the model's values, with ``returns`` and
    the old ``values`` from the data.
    """
    if spec.name != VALUE_LOSS:
        return _ComposedLoss(spec)
    counts: dict[str, Any] = {name: spec.global_counts[name] for name in ("global_tokens", "global_sequences")}

    def critic(output: TokenOutput, data: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        assert output.values is not None, "the model of a critic has a value head"
        columns = {"returns": data["returns"], "response_mask": data["response_mask"], "old_values": data.get("values")}
        with naming_rows(data.get("row")):
            loss, metrics = value_loss(values=output.values, **columns, **counts, **spec.options)
        return loss, {**metrics, "value/loss": loss.detach()}

    return critic


class _ComposedLoss:
    """policy loss + kl_coefficient * KL(pi, reference) - entropy_coefficient * entropy."""

    def __init__(self, spec: LossSpec) -> None:
        self._options = dict(spec.options)
        take = self._options.pop
        self._part = part("loss", spec.name)
        self._counts: dict[str, Any] = {name: int(n) for name, n in spec.global_counts.items() if name in COUNTS}
        averaged = ("global_tokens", "global_sequences")
        self._averaging: dict[str, Any] = {name: self._counts.pop(name) for name in averaged}
        self._averaging |= {"aggregation": take("aggregation", "token-mean"), "length_norm": take("length_norm", None)}
        self._kl, self._kl_coefficient = take("kl", "k3"), take("kl_coefficient", 0.0)
        self._entropy_coefficient = take("entropy_coefficient", 0.0)
        self._part.split(self._options)
        part("aggregation", self._averaging["aggregation"])
        if self._kl_coefficient:
            part("kl", self._kl)
        if self._averaging["aggregation"] == "seq-mean-token-sum-norm" and self._averaging["length_norm"] is None:
            message = "seq-mean-token-sum-norm needs length_norm: micro-batches are padded to different widths"
            fix = "set the loss option length_norm to the longest response that may be generated"
            raise ConfigError(message, code="algorithm.input", where=f"algorithm: loss {spec.name}", fix=fix)
        self.needs_entropy = self._entropy_coefficient != 0.0

    def __call__(self, output: TokenOutput, data: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        wanted = set(INPUTS if self._part.open else self._part.inputs) - _NOT_READ
        mask, inputs = data["response_mask"], {name: data.get(name) for name in sorted(wanted)}
        with naming_rows(data.get("row")):
            loss, metrics = policy_loss(
                self._part.name,
                log_probs=output.log_probs,
                response_mask=mask,
                rollout_weights=data.get("rollout_weights"),
                whole_batch=False,
                **self._averaging,
                **self._counts,
                **inputs,
                **self._options,
            )
        metrics["policy/loss"] = loss.detach()
        if inputs.get("expert_mask") is not None:
            mask = mask.masked_fill((inputs["expert_mask"] != 0).unsqueeze(-1), 0)

        def penalty(name: str, values: Tensor) -> Tensor:
            """Return the values aggregated like the loss, and put their mean per token into the metrics."""
            metrics.update(means({name: values}, mask, values, **self._averaging))
            return aggregate(values, mask, **self._averaging)

        measured = data.get("ref_log_probs") is not None and "ref_log_probs" not in wanted
        if self._kl_coefficient or measured:  # values that do not count are set to 0, so that no NaN reaches a gradient
            known = {"log_probs": output.log_probs}
            known |= {name: data.get(name) for name in ("ref_log_probs", "old_log_probs")}
            emptied = {name: one.masked_fill(mask == 0, 0.0) for name, one in known.items() if one is not None}
            divergence = penalty("policy/kl", kl(self._kl, **emptied))
            loss = loss + self._kl_coefficient * divergence if self._kl_coefficient else loss
        if output.entropy is None:  # the mean of -log pi over tokens that pi has sampled
            penalty("policy/entropy_estimate", -output.log_probs.detach())
        else:
            loss = loss - self._entropy_coefficient * penalty("policy/entropy", output.entropy)
        return loss, metrics
