"""Checks of capabilities: value heads, LoRA adapters, gradient checkpointing."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from jackfield.abc.engine import (
    BaseEngine,
    LoadCheckpointRequest,
    LoraSpec,
    OptimizerSpec,
    SaveCheckpointRequest,
    TokenOutput,
)
from jackfield.sdk.jagged import rows
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import engine as support

_VALUES = "docs/plugins/engine.md#value-heads"
_LORA = "docs/plugins/engine.md#adapters"

LORA = LoraSpec(rank=3, alpha=12.0)


def value_loss(output: TokenOutput, data: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the squared error of the values against the advantages, over global tokens."""
    assert output.values is not None, "a loss of an engine with a value head gets no values"
    mask = data["response_mask"]
    return ((output.values - data["advantages"]).square() * mask).sum() / support.Loss().tokens, {}


def _values(engine: BaseEngine) -> list[torch.Tensor]:
    with engine.eval_mode():
        output = engine.forward_backward_batch(support.batch(), None, forward_only=True)
    assert output.values is not None, "an engine with a value head has no values in its result"
    assert output.values.dtype == torch.float32, f"values are {output.values.dtype}, expected torch.float32"
    assert not output.values.requires_grad, "values require gradients, expected a detached tensor"
    return [row.cpu() for row in rows(output.values)]


def _fitted_head(values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Fit a linear head to the values; return weight ``[hidden]``, bias ``[]`` and the largest error."""
    hidden = torch.cat(support.expected(support.model_folder()).hidden)
    found = torch.cat(values).double()
    inputs = torch.cat([hidden, torch.ones(len(hidden), 1, dtype=torch.float64)], dim=1)
    solution = torch.linalg.lstsq(inputs, found[:, None]).solution.squeeze(1)
    return solution[:-1], solution[-1], float((inputs @ solution - found).abs().max())


@check("ENG-080", capability="value_head", page=_VALUES)
def values_are_linear_in_the_last_hidden_state(subject: Subject) -> None:
    """Values are a linear function of the last hidden state from which each response token is predicted."""
    with support.opened(subject, role="critic", value_head=True) as engine:
        values = _values(engine)
    lengths = [len(row) for row in values]
    assert [response for _, response in support.LENGTHS] == lengths, f"values of {lengths} tokens per row"
    error = _fitted_head(values)[2]
    assert float(torch.cat(values).std()) > 1e-3, "all values are the same"
    assert error <= 1e-4, f"no linear head explains the values: the best one is off by {error:.3g}"


@check("ENG-081", capability="value_head", page=_VALUES)
def value_gradients_are_those_of_float64(subject: Subject) -> None:
    """Gradients of a loss on the values reach the head and the model, and equal those of a float64 reference."""
    with support.opened(subject, role="critic", value_head=True) as engine:
        values = _values(engine)
        found = support.gradients(engine, support.batch(), value_loss)
    model = support.plain_model(support.model_folder())
    weight, bias, _ = _fitted_head(values)
    weight.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row in support.make_rows():
        estimates = support.hidden_states(model, row) @ weight + bias
        targets, mask = (torch.tensor(each).double() for each in (row.advantages, row.response_mask))
        total = total + ((estimates - targets).square() * mask).sum()
    named = {name: parameter for name, parameter in model.named_parameters() if name.startswith("model.")}
    head, *trunk_gradients = torch.autograd.grad(total / support.Loss().tokens, [weight, *named.values()])
    wanted = dict(zip(named, trunk_gradients, strict=True))
    own = {name: tensor for name, tensor in found.items() if name not in dict(model.named_parameters())}
    heads = [tensor for tensor in own.values() if tensor.numel() == weight.numel()]
    assert len(heads) == 1, f"gradients beside the model's are {sorted(own)}, expected one weight of {weight.numel()}"
    trunk = {name: found[name] for name in wanted if name in found}
    support.assert_close({**wanted, "head": head}, {**trunk, "head": heads[0].flatten()}, 2e-3, "gradients")


@check("ENG-082", capability="value_head", page=_VALUES)
def the_value_head_comes_from_the_seed(subject: Subject) -> None:
    """A fresh value head is the same for the same seed, and differs for another seed."""
    found = []
    for seed, disturbance in ((5, 0), (5, 1), (6, 0)):
        torch.manual_seed(disturbance)
        with support.opened(subject, role="critic", value_head=True, seed=seed) as engine:
            found.append(torch.cat(_values(engine)))
    assert torch.equal(found[0], found[1]), "two engines of one seed have different value heads"
    assert not torch.equal(found[0], found[2]), "engines of two seeds have the same value head"


@check("ENG-083", capability="value_head", page=_VALUES)
def the_value_head_is_in_the_checkpoint(subject: Subject) -> None:
    """A native checkpoint contains the value head."""
    with support.opened(subject, role="critic", value_head=True) as engine:
        support.train(engine, 2, value_loss)
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(subject.folder / "native")))
        wanted = _values(engine)
    with support.opened(subject, role="critic", value_head=True, seed=8) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(subject.folder / "native")))
        support.assert_tokens(wanted, _values(engine), 0.0, "values after a checkpoint was loaded")


def export(engine: BaseEngine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    _, config = engine.get_per_tensor_param()
    assert config is not None, "an engine with an adapter exports no PEFT config"
    try:
        plain = json.loads(json.dumps(dict(config)))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the PEFT config does not fit into JSON: {error}") from error
    return support.weights(engine), plain


def with_peft(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    """Load the exported adapter onto the plain base model; return the model and the state that PEFT loaded."""
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    base = copy.deepcopy(support.plain_model(support.model_folder(), torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors that do not fit are reported below
        model = PeftModel.from_pretrained(base, folder)
        state = dict(get_peft_model_state_dict(model))
    return model, state


def _randomized(engine: BaseEngine) -> None:
    """Train until the adapter has an effect: a fresh one is the identity."""
    support.train(engine, steps=3)


@check("ENG-090", capability="lora", page=_LORA)
def an_adapter_is_exported_under_the_names_of_peft(subject: Subject) -> None:
    """With an adapter, exactly the adapter's tensors are exported, under PEFT's names, with the PEFT config."""
    with support.opened(subject, lora=LORA) as engine:
        tensors, config = export(engine)
    chosen = {name: config.get(name) for name in ("peft_type", "r", "lora_alpha")}
    assert chosen == {"peft_type": "LORA", "r": 3, "lora_alpha": 12.0}, f"the PEFT config says {chosen}"
    foreign = sorted(name for name in tensors if "lora_" not in name)
    assert not foreign, f"exported beside the adapter: {foreign[:4]}"
    _, state = with_peft(subject.folder / "peft", tensors, config)
    support.assert_names(state, tensors, "exported tensors, and what PEFT has of this config")


@check("ENG-091", capability="lora", page=_LORA)
def the_exported_adapter_is_the_trained_one(subject: Subject) -> None:
    """The base model under the exported adapter and PEFT gives the engine's log-probabilities."""
    with support.opened(subject, lora=LORA, optimizer=OptimizerSpec(lr=5e-2)) as engine:
        _randomized(engine)
        found = support.log_probs(engine)
        model, _ = with_peft(subject.folder / "peft", *export(engine))
    wanted = []
    with torch.no_grad():
        for row in support.make_rows():
            tokens = torch.tensor([row.prompt_ids + row.response_ids])
            logits = model(input_ids=tokens, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]
            wanted.append(logits.log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1))
    base = support.expected(support.model_folder()).log_probs
    moved = max(float((one - other).abs().max()) for one, other in zip(base, wanted, strict=True))
    assert moved > 1e-3, f"after three steps the adapter changes log-probabilities by {moved:.3g} at most"
    support.assert_tokens(wanted, found, 1e-4, "log-probabilities of the engine, and of its adapter in PEFT")


@check("ENG-092", capability="lora", page=_LORA)
def only_the_adapter_is_trained(subject: Subject) -> None:
    """With an adapter the base does not change, and gradients have only the adapter's names."""
    base = support.expected(support.model_folder()).log_probs
    with support.opened(subject, lora=LORA, optimizer=OptimizerSpec(lr=5e-2)) as engine:
        before = support.weights(engine)
        _randomized(engine)
        found = support.gradients(engine)
        after = support.weights(engine)
        with engine.disable_adapter():
            support.assert_tokens(base, support.log_probs(engine), 1e-4, "log-probabilities of the base after training")
    support.assert_names(before, found, "gradients of an adapter")
    same = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
    assert not same, f"not trained, or exported as it was before: {same[:4]}"


@check("ENG-093", capability="lora", page=_LORA)
def disable_adapter_is_the_base_model(subject: Subject) -> None:
    """Inside of ``disable_adapter`` the engine is its base model; afterwards the adapter is on again."""
    base = support.expected(support.model_folder()).log_probs
    with support.opened(subject, lora=LORA, optimizer=OptimizerSpec(lr=5e-2)) as engine:
        _randomized(engine)
        on = support.log_probs(engine)
        with engine.disable_adapter():
            off = support.log_probs(engine)
        again = support.log_probs(engine)
    support.assert_tokens(base, off, 1e-4, "log-probabilities inside of disable_adapter")
    support.assert_tokens(on, again, 0.0, "log-probabilities after disable_adapter")
    moved = max(float((one - two).abs().max()) for one, two in zip(on, off, strict=True))
    assert moved > 1e-3, f"after three steps the adapter changes log-probabilities by {moved:.3g} at most"


@check("ENG-094", capability="lora", page=_LORA)
def the_adapter_is_in_the_checkpoint(subject: Subject) -> None:
    """With an adapter, too, a step after save and load equals a step without them, bit for bit."""
    support.assert_goes_on(subject, "adapter one step after a checkpoint was loaded", lora=LORA)


@check("ENG-095", capability="lora", page=_LORA)
def the_adapter_comes_from_the_seed(subject: Subject) -> None:
    """A fresh adapter changes nothing, is the same for the same seed, and differs for another seed."""
    found = []
    for seed, disturbance in ((5, 0), (5, 1), (6, 0)):
        torch.manual_seed(disturbance)
        with support.opened(subject, lora=LORA, seed=seed) as engine:
            found.append(support.weights(engine))
            base = support.expected(support.model_folder()).log_probs
            support.assert_tokens(base, support.log_probs(engine), 1e-4, "log-probabilities under a fresh adapter")
    support.assert_same_tensors(found[0], found[1], "fresh adapters of one seed")
    same = all(torch.equal(tensor, found[2][name]) for name, tensor in found[0].items())
    assert not same, "fresh adapters of two seeds are equal"


@check("ENG-100", capability="gradient_checkpointing", page="docs/plugins/engine.md#gradients")
def gradient_checkpointing_changes_no_gradient(subject: Subject) -> None:
    """Gradient checkpointing changes no gradient, even with dropout."""
    found = []
    for wanted in (False, True):
        dropout = support.dropout(subject)
        with support.opened(subject, **dropout, gradient_checkpointing=wanted) as engine:
            found.append(support.gradients(engine))
    support.assert_close(found[0], found[1], 2e-5, "gradients under gradient checkpointing")


def has_value_head(subject: Subject) -> bool:
    """Return whether the engine loads a model with a value head and gives values."""
    return _has(subject, _values, role="critic", value_head=True)


def has_lora(subject: Subject) -> bool:
    """Return whether the engine loads a model with an adapter and exports it."""
    return _has(subject, export, lora=LORA)


def _has(subject: Subject, use: Callable[[BaseEngine], Any], **context: Any) -> bool:
    try:
        with support.opened(subject, **context) as engine:
            return bool(use(engine))
    except Exception:
        return False
