"""Checks of engines: log-probabilities, entropies, losses, metrics and gradients of passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jackfield.abc.engine import BaseEngine, TokenOutput
from jackfield.sdk.jagged import jagged, rows
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import engine as support

Result = tuple[torch.Tensor, Mapping[str, Any]]

_PAGE = "docs/plugins/engine.md#passes"
_GRADIENTS = "docs/plugins/engine.md#gradients"

#: Absolute, for log-probabilities and entropies of a float32 model.
TOKEN_TOLERANCE = 1e-4
#: Relative, for gradients, by the dtype of the model.
GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
#: Relative, between two ways to add up the same numbers in float32.
SUM_TOLERANCE = 2e-5


@check("ENG-010", page=_PAGE, using=support.opened)
def log_probs_are_those_of_the_model(subject: Subject, engine: BaseEngine) -> None:
    """Log-probabilities of response tokens equal those of a float64 forward pass of the same model folder."""
    wanted = support.expected(support.model_folder()).log_probs
    support.assert_tokens(wanted, support.log_probs(engine), TOKEN_TOLERANCE, "log-probabilities")


@check("ENG-011", page=_PAGE)
def results_come_in_the_order_of_the_rows(subject: Subject) -> None:
    """Results are in the order of the rows, however the rows are split into micro-batches."""
    wanted = support.expected(support.model_folder()).log_probs
    chosen = support.make_rows()
    with support.opened(subject, micro_batch_tokens=support.SMALL) as engine:
        found = support.log_probs(engine)
        support.assert_tokens(wanted, found, TOKEN_TOLERANCE, "log-probabilities of several micro-batches")
        reverse = support.log_probs(engine, support.batch(chosen[::-1]))
        support.assert_tokens(wanted[::-1], reverse, TOKEN_TOLERANCE, "log-probabilities of the rows in reverse")


@check("ENG-012", page=_PAGE)
def results_are_jagged_float32_detached_and_on_the_cpu(subject: Subject) -> None:
    """Per-token results are jagged over response tokens only, float32, detached and on the CPU."""
    with support.opened(subject) as engine, engine.train_mode():
        output = engine.forward_backward_batch(support.batch(), support.Loss(entropy=0.1))
    for name in ("log_probs", "entropy"):
        found = getattr(output, name)
        assert isinstance(found, torch.Tensor), f"{name} is {found!r}, not a tensor"
        assert found.is_nested, f"{name} is a dense tensor of shape {tuple(found.shape)}"
        assert found.layout == torch.jagged, f"{name} has layout {found.layout}, expected torch.jagged"
        assert found.dtype == torch.float32, f"{name} is {found.dtype}, expected torch.float32"
        assert found.device.type == "cpu", f"{name} is on {found.device}, expected the CPU"
        assert not found.requires_grad, f"{name} requires gradients, expected a detached tensor"
        lengths = [len(row) for row in rows(found)]
        assert [response for _, response in support.LENGTHS] == lengths, f"{name} has rows of {lengths} tokens"


@check("ENG-013", page=_PAGE)
def temperature_divides_the_logits(subject: Subject) -> None:
    """The temperature of the context divides the logits before log-probabilities and entropies."""
    wanted = support.expected(support.model_folder(), 0.7)
    with support.opened(subject, temperature=0.7) as engine, engine.eval_mode():
        output = engine.forward_backward_batch(support.batch(), support.Loss(entropy=0.1), forward_only=True)
    support.assert_tokens(wanted.log_probs, output.log_probs, TOKEN_TOLERANCE, "log-probabilities at temperature 0.7")
    support.assert_tokens(wanted.entropy, output.entropy, TOKEN_TOLERANCE, "entropies at temperature 0.7")


@check("ENG-014", page=_PAGE)
def entropy_is_the_entropy_of_each_prediction(subject: Subject) -> None:
    """A loss with ``needs_entropy = True`` gets -sum(p log p) of each prediction, and the result has it, too."""
    wanted = support.expected(support.model_folder()).entropy
    seen: list[torch.Tensor] = []

    class Watching(support.Loss):
        def __call__(self, output: TokenOutput, data: Any) -> Result:
            assert output.entropy is not None, "the loss has needs_entropy = True and gets no entropy"
            seen.append(output.entropy.detach().cpu())
            return super().__call__(output, data)

    with support.opened(subject) as engine, engine.eval_mode():
        output = engine.forward_backward_batch(support.batch(), Watching(entropy=0.1), forward_only=True)
    support.assert_tokens(wanted, output.entropy, TOKEN_TOLERANCE, "entropies")
    total = sum(float(row.sum()) for row in wanted)
    found = sum(float(each.sum()) for each in seen)
    assert abs(total - found) <= 1e-4 * abs(total), f"entropies in the loss add up to {found:g}, expected {total:g}"


@check("ENG-015", page=_PAGE)
def nothing_is_computed_that_was_not_asked_for(subject: Subject) -> None:
    """An entropy needs ``needs_entropy``, values need a value head, and a loss needs a loss function."""
    seen: list[TokenOutput] = []

    def loss(output: TokenOutput, data: Any) -> Result:
        seen.append(output)
        return support.Loss()(output, data)

    with support.opened(subject) as engine, engine.eval_mode():
        with_loss = engine.forward_backward_batch(support.batch(), loss, forward_only=True)
        without = engine.forward_backward_batch(support.batch(), None, forward_only=True)
    assert seen, "the loss function was not called"
    for where, output in (("the loss function's input", seen[0]), ("the result", with_loss)):
        assert output.entropy is None, f"{where} has an entropy that was not asked for"
        assert output.values is None, f"{where} has values without a value head"
    assert without.loss is None, f"a pass without a loss function has the loss {without.loss}, expected None"
    assert not without.metrics, f"a pass without a loss function has metrics: {dict(without.metrics)}"


@check("ENG-016", page=_PAGE)
def columns_reach_the_loss_padded_with_zeros(subject: Subject) -> None:
    """Response columns reach the loss as ``[b, T]`` with 0 past each response, and row columns as ``[b]``."""
    chosen = support.make_rows()
    number = jagged([torch.full((len(row.response_ids),), index + 1) for index, row in enumerate(chosen)])
    data = support.batch(number=number, weight=torch.arange(len(chosen)) + 1)
    seen: list[int] = []

    def loss(output: TokenOutput, micro: Any) -> Result:
        columns = {name: tensor.detach().cpu() for name, tensor in micro.items()}
        for name in ("number", "weight", "response_ids", "response_mask", "advantages", "old_log_probs"):
            assert name in columns, f"the loss does not get the column {name}"
        shape = tuple(output.log_probs.shape)
        for place in range(shape[0]):
            index = int(columns["number"][place].max()) - 1
            _assert_row(chosen[index], index, {name: column[place] for name, column in columns.items()}, shape)
            seen.append(index)
        return support.Loss()(output, micro)

    with support.opened(subject, micro_batch_tokens=support.SMALL) as engine, engine.eval_mode():
        engine.forward_backward_batch(data, loss, forward_only=True)
    assert list(range(len(chosen))) == sorted(seen), f"the loss has seen the rows {sorted(seen)}"


def _assert_row(row: support.Row, index: int, found: dict[str, torch.Tensor], shape: tuple[int, ...]) -> None:
    length = len(row.response_ids)
    assert int(found["weight"]) == index + 1, f"a row column of row {index} holds the value of another row"
    for name in ("number", "response_ids", "response_mask", "advantages", "old_log_probs"):
        column = found[name]
        assert column.shape == shape[1:], f"{name} has {tuple(column.shape)} per row, log_probs have {shape[1:]}"
        wanted = torch.tensor(getattr(row, name, [index + 1] * length), dtype=column.dtype)
        same = torch.equal(wanted, column[:length])
        assert same, f"{name} of row {index} is {column[:length].tolist()}, expected {wanted.tolist()}"
        assert not column[length:].any(), f"{name} of row {index} is not 0 past the response: {column.tolist()}"


@check("ENG-019", page=_PAGE)
def token_outputs_hold_zero_past_each_response(subject: Subject) -> None:
    """The model's outputs that the loss gets are 0 past each row's response."""
    rest: list[float] = []

    class Watching(support.Loss):
        def __call__(self, output: TokenOutput, data: Any) -> Result:
            past = data["number"] == 0
            assert output.entropy is not None, "the loss has needs_entropy = True and gets no entropy"
            rest.extend(float(tensor.detach()[past].abs().sum()) for tensor in (output.log_probs, output.entropy))
            return super().__call__(output, data)

    number = jagged([torch.ones(len(row.response_ids)) for row in support.make_rows()])
    with support.opened(subject) as engine, engine.eval_mode():
        engine.forward_backward_batch(support.batch(number=number), Watching(entropy=0.1), forward_only=True)
    assert not any(rest), f"past the responses there is {max(rest):g}, expected 0"


@check("ENG-017", page=_PAGE)
def losses_and_metrics_add_up(subject: Subject) -> None:
    """Losses and metrics of micro-batches are summed; of names ending in ``/max`` and ``/min`` the extreme counts."""
    chosen, loss = support.make_rows(), support.Loss()
    advantages = [value for row in chosen for value in row.advantages] + [0.0]  # the padding
    wanted = {"tokens": loss.tokens, "share": 1.0, "advantage/max": max(advantages), "advantage/min": min(advantages)}
    with support.opened(subject, micro_batch_tokens=support.SMALL) as engine, engine.train_mode():
        output = engine.forward_backward_batch(support.batch(), loss)
    assert loss.calls > 1, f"{loss.calls} micro-batch of at most {support.SMALL} padded tokens, expected several"
    exact = support.expected(support.model_folder()).loss
    assert output.loss is not None, "a pass with a loss function has no loss"
    assert abs(exact - output.loss) <= 1e-4 * abs(exact), f"the loss is {output.loss:g}, expected {exact:g}"
    assert wanted.keys() == output.metrics.keys(), f"metrics {sorted(output.metrics)}, expected {sorted(wanted)}"
    for name, value in wanted.items():
        found = output.metrics[name]
        assert abs(value - found) <= 1e-5 * max(1.0, abs(value)), f"the metric {name} is {found:g}, expected {value:g}"


@check("ENG-020", page=_GRADIENTS)
def gradients_are_those_of_float64(subject: Subject) -> None:
    """Gradients equal those of a float64 reference, under the names of the trainable parameters."""
    for tied in (True, False):
        folder = support.model_folder(tied=tied)
        with support.opened(subject, folder) as engine:
            found = support.gradients(engine)
        wanted = support.expected(folder).gradients
        support.assert_close(wanted, found, GRADIENT_TOLERANCE["float32"], "gradients")


@check("ENG-021", page=_GRADIENTS)
def gradients_do_not_depend_on_the_split(subject: Subject) -> None:
    """Gradients are the sum of the loss's gradients over micro-batches, so no split of the rows changes them."""
    found = []
    for tokens in (16384, support.SMALL, 1):
        loss = support.Loss(entropy=0.1)
        with support.opened(subject, micro_batch_tokens=tokens) as engine:
            found.append(support.gradients(engine, support.batch(), loss))
    for number, other in enumerate(found[1:], 1):
        what = f"gradients of {('one', 'several', 'single-row')[number]} micro-batches"
        support.assert_close(found[0], other, SUM_TOLERANCE, what)


@check("ENG-022", page=_GRADIENTS, using=support.opened)
def gradients_accumulate_over_calls(subject: Subject, engine: BaseEngine) -> None:
    """Passes add to the existing gradients, so a batch may come in several calls."""
    chosen, loss = support.make_rows(), support.Loss()
    whole = support.gradients(engine, support.batch(), loss)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        for part in (chosen[:3], chosen[3:]):
            engine.forward_backward_batch(support.batch(part), loss)
        parts = support.held_gradients(engine)
    support.assert_close(whole, parts, SUM_TOLERANCE, "gradients of a batch in two calls")


@check("ENG-023", page=_GRADIENTS, using=support.opened)
def zero_grad_forgets(subject: Subject, engine: BaseEngine) -> None:
    """After ``optimizer_zero_grad`` the gradients contain nothing of earlier passes."""
    first = support.gradients(engine)
    second = support.gradients(engine)
    support.assert_close(first, second, SUM_TOLERANCE, "gradients after optimizer_zero_grad")


@check("ENG-024", page=_GRADIENTS)
def forward_only_leaves_gradients_alone(subject: Subject) -> None:
    """A pass with ``forward_only`` leaves accumulated gradients as they are."""
    with support.opened(subject) as engine, engine.train_mode():
        before = support.gradients(engine)
        engine.forward_backward_batch(support.batch(), support.Loss(), forward_only=True)
        after = support.held_gradients(engine)
    support.assert_same_tensors(before, after, "gradients after a pass with forward_only")


@check("ENG-025", page=_GRADIENTS)
def half_precision_stays_within_its_error(subject: Subject) -> None:
    """Gradients of a bfloat16 model equal those of float64 within the error of bfloat16."""
    wanted = support.expected(support.model_folder()).gradients
    with support.opened(subject, dtype="bfloat16") as engine:
        found = support.gradients(engine)
    whole = {"all gradients": torch.cat([tensor.flatten() for tensor in wanted.values()])}
    support.assert_names(wanted, found, "gradients in bfloat16")
    other = {"all gradients": torch.cat([found[name].flatten() for name in wanted])}
    support.assert_close(whole, other, GRADIENT_TOLERANCE["bfloat16"], "gradients in bfloat16")


@check("ENG-026", capability="dropout", page=_PAGE)
def dropout_is_on_in_train_mode_only(subject: Subject) -> None:
    """Dropout is on in ``train_mode`` and off in ``eval_mode``."""
    folder = support.model_folder(dropout=0.1)
    wanted = support.expected(support.model_folder()).log_probs  # the same weights
    with support.opened(subject, folder, dropout=0.5) as engine:
        found = support.log_probs(engine)
        support.assert_tokens(wanted, found, TOKEN_TOLERANCE, "log-probabilities in eval_mode of a model with dropout")
        with engine.train_mode():
            passes = [support.gradients(engine) for _ in range(2)]
        found = support.log_probs(engine)
        support.assert_tokens(wanted, found, TOKEN_TOLERANCE, "log-probabilities in eval_mode after a train_mode")
    same = all(torch.equal(passes[0][name], passes[1][name]) for name in passes[0])
    assert not same, "two training passes of a model with dropout are equal: dropout is off in train_mode"


@check("ENG-029", page=_PAGE)
def a_training_pass_is_an_inference_pass(subject: Subject) -> None:
    """Without ``ModelSpec.dropout`` a training pass equals an inference pass, whatever the model's config says."""
    with support.opened(subject, support.model_folder(dropout=0.5)) as engine:
        wanted = support.log_probs(engine)
        with engine.train_mode():
            found = engine.forward_backward_batch(support.batch(), support.Loss()).log_probs
    support.assert_tokens(wanted, found, TOKEN_TOLERANCE, "log-probabilities of a training pass without dropout")


@check("ENG-027", page=_PAGE)
def forward_only_evaluates_the_loss(subject: Subject) -> None:
    """With ``forward_only`` a loss function is still evaluated, and its loss and metrics are returned."""
    loss = support.Loss()
    with support.opened(subject) as engine, engine.eval_mode():
        output = engine.forward_backward_batch(support.batch(), loss, forward_only=True)
    exact = support.expected(support.model_folder()).loss
    assert loss.calls, "the loss function was not called"
    assert output.loss is not None, "a pass with forward_only and a loss function has no loss"
    assert abs(exact - output.loss) <= 1e-4 * abs(exact), f"the loss is {output.loss:g}, expected {exact:g}"
    assert "tokens" in output.metrics, f"the metrics are {dict(output.metrics)}"


@check("ENG-028", page=_PAGE, using=support.opened)
def rows_may_lack_what_the_loss_does_not_read(subject: Subject, engine: BaseEngine) -> None:
    """``prompt_ids`` and ``response_ids`` are enough if no loss function reads other columns."""
    wanted = support.expected(support.model_folder()).log_probs
    data = support.batch().select("prompt_ids", "response_ids")
    support.assert_tokens(wanted, support.log_probs(engine, data), TOKEN_TOLERANCE, "log-probabilities")
