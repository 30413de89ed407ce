"""Checks of training engines: mixtures of experts, on a tiny Qwen3-MoE that the suite makes."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

from jackfield.sdk.arrays import pack
from jackfield.sdk.jagged import jagged
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import engine as support
from jackfield_conformance.support.rollout_experts import (
    EXPERTS_PER_TOKEN,
    LAYERS,
    balance_of,
    log_probs_with,
    mixture_folder,
)

_PAGE = "docs/plugins/engine.md#experts"
_ROWS = (((5, 6, 7), (8, 9, 10)), ((5, 6, 7), (8, 9, 10)), ((4, 30), (11, 12, 13, 14, 15)), ((22,), (3, 60)))
_EXPERTS = 8


def _chosen(row: int) -> torch.Tensor | None:
    """Return experts for a row, int64 ``[tokens, layers, experts]``; the last row has none."""
    if row == len(_ROWS) - 1:
        return None
    prompt, response = _ROWS[row]
    first = torch.tensor([*prompt, *response][:-1]).cumsum(0)[:, None] + torch.arange(LAYERS) + row
    step = torch.arange(EXPERTS_PER_TOKEN) * (1 + row % 3)
    return (first[..., None] + step) % _EXPERTS


def _batch(*, experts: bool) -> TensorDict:
    columns = {
        "prompt_ids": jagged([torch.tensor(prompt) for prompt, _ in _ROWS]),
        "response_ids": jagged([torch.tensor(response) for _, response in _ROWS]),
        "response_mask": jagged([torch.ones(len(response), dtype=torch.bool) for _, response in _ROWS]),
        "advantages": jagged([torch.ones(len(response)) for _, response in _ROWS]),
    }
    if experts:
        given = [_chosen(row) for row in range(len(_ROWS))]
        arrays = [{} if each is None else {"routed_experts": each.to(torch.int16).numpy()} for each in given]
        packed = [torch.frombuffer(bytearray(pack(each)), dtype=torch.uint8) for each in arrays]
        columns["multi_modal_inputs"] = jagged(packed)
    return TensorDict(columns, batch_size=[len(_ROWS)])


@check("ENG-140", capability="router_replay", page=_PAGE)
def given_experts_are_used(subject: Subject) -> None:
    """With ``router_replay``, log-probabilities are those of the experts in ``routed_experts``, together and apart;
    a row without them, and a batch without them, has those of the model's own choice."""
    for experts in (True, False):
        wanted = [log_probs_with(*row, _chosen(number) if experts else None) for number, row in enumerate(_ROWS)]
        for most in (1, 10_000):
            model = {"router_replay": True, "micro_batch_tokens": most}
            with support.opened(subject, Path(mixture_folder()), **model) as engine:
                if not experts:  # of an earlier pass nothing may be left
                    support.log_probs(engine, _batch(experts=True))
                found = support.log_probs(engine, _batch(experts=experts))
            for row, (one, other) in enumerate(zip(wanted, found, strict=True)):
                off = float((one - other).abs().max())
                what = f"row {row}, experts given: {experts}, micro_batch_tokens {most}"
                assert off <= 1e-4, f"{what}: log-probabilities are {off:.3g} off"


@check("ENG-141", capability="router_aux_loss", page=_PAGE)
def the_load_of_each_row_is_balanced(subject: Subject) -> None:
    """``router_aux_loss`` adds the factor times the mean over rows of each row's load-balancing loss, a metric of
    this name; no split of the rows changes metric and gradients."""
    wanted = sum(balance_of([*prompt, *response][:-1]) for prompt, response in _ROWS) / len(_ROWS)
    outputs, gradients = [], []
    for factor, most in ((0.0, 10_000), (0.5, 10_000), (0.5, 1)):
        model = {"router_aux_loss": factor, "micro_batch_tokens": most}
        with support.opened(subject, Path(mixture_folder()), **model) as engine, engine.train_mode():
            outputs.append(engine.forward_backward_batch(_batch(experts=False), support.Loss()))
            gradients.append(support.held_gradients(engine))
    plain, whole, split = outputs
    for output in (whole, split):
        assert "router_aux_loss" in output.metrics, f"no metric router_aux_loss, but {sorted(output.metrics)}"
        found = output.metrics["router_aux_loss"]
        assert abs(found - wanted) <= 1e-4, f"the metric router_aux_loss is {found:.6g}, expected {wanted:.6g}"
        assert plain.loss is not None, "a pass with a loss function has a loss"
        assert output.loss is not None, "a pass with a loss function has a loss"
        more = output.loss - plain.loss
        assert abs(more - 0.5 * wanted) <= 1e-4, f"the loss grows by {more:.6g}, expected {0.5 * wanted:.6g}"
    support.assert_close(gradients[1], gradients[2], 1e-4, "gradients of one pass and of one row each")
    gates = [name for name in gradients[0] if ".gate." in name]
    same = all(torch.allclose(gradients[0][name], gradients[1][name], rtol=1e-3) for name in gates)
    assert gates, "no router has gradients"
    assert not same, "routers have the same gradients with and without the load-balancing loss"
