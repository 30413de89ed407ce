"""Checks of capabilities: frozen parameters, optimizers, variants of LoRA, merged adapters, background checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from jackfield.abc.engine import BaseEngine, LoadCheckpointRequest, LoraSpec, OptimizerSpec, SaveCheckpointRequest
from jackfield.errors import JackfieldError
from jackfield.sdk.samples import naming_samples
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.suites.engine.adapters import LORA, export, with_peft
from jackfield_conformance.support import engine as support
from jackfield_conformance.support import expecting

_OPTIMIZERS = "docs/plugins/engine.md#optimizers"
_FREEZE = "docs/plugins/engine.md#frozen-parameters"
_LORA = "docs/plugins/engine.md#adapters"
_BACKGROUND = "docs/plugins/engine.md#background-checkpoints"
_STEEP = OptimizerSpec(lr=5e-2)


def _refused(subject: Subject, code: str, what: str, **changes: Any) -> None:
    """Require that an engine of these settings cannot be initialized."""
    with expecting.refused(JackfieldError, code, what=what), support.opened(subject, **changes):
        pass


@check("ENG-130", capability="freeze", page=_FREEZE)
def frozen_parameters_stay(subject: Subject) -> None:
    """Frozen parameters do not change and have no gradient; they are published, and all others are trained."""
    patterns = (r"layers\.0\.", "embed_tokens")
    with support.opened(subject, freeze=patterns) as engine:
        before = support.weights(engine)
        support.train(engine, steps=2)
        gradients, after = support.gradients(engine), support.weights(engine)
    whole = dict(support.plain_model(support.model_folder()).named_parameters())
    support.assert_names(whole, after, "published tensors of a model with frozen parameters")
    frozen = {name for name in before if "layers.0." in name or "embed_tokens" in name}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not moved & frozen, f"frozen parameters have changed: {sorted(moved & frozen)[:4]}"
    assert moved == before.keys() - frozen, f"not trained: {sorted(before.keys() - frozen - moved)[:4]}"
    assert not frozen & gradients.keys(), f"gradients of frozen parameters: {sorted(frozen & gradients.keys())[:4]}"


@check("ENG-131", capability="freeze", page=_FREEZE)
def a_pattern_without_effect_is_refused(subject: Subject) -> None:
    """A pattern of ``freeze`` that is found in no trained parameter is refused: ``config.invalid-value``."""
    _refused(subject, "config.invalid-value", "a pattern in no name", freeze=("layers.0", "no_such_layer"))


@check("ENG-132", capability="optimizers", page=_OPTIMIZERS)
def unknown_optimizers_are_refused(subject: Subject) -> None:
    """An unknown optimizer, an unknown option, and a factor of no parameter are refused."""
    unknown = OptimizerSpec(name="no_such_optimizer")
    _refused(subject, "config.invalid-value", "an unknown optimizer", optimizer=unknown)
    unused = OptimizerSpec(options={"no_such_option": 1})
    _refused(subject, "config.unknown-key", "an unknown option of AdamW", optimizer=unused)
    nowhere = OptimizerSpec(lr_factors={"no_such_layer": 2.0})
    _refused(subject, "config.invalid-value", "a factor of no parameter", optimizer=nowhere)


@check("ENG-133", capability="optimizers", page=_OPTIMIZERS)
def groups_have_their_own_decay_and_rate(subject: Subject) -> None:
    """Steps are AdamW's with each parameter's own decay and rate; the first pattern that is found counts."""
    factors = {"q_proj": 0.5, r"layers\.0\.": 3.0, "_proj": 0.25}
    spec = OptimizerSpec(
        lr=1e-2, eps=1e-3, weight_decay=2.0, clip_grad=None, no_decay=("norms", "embeddings"), lr_factors=factors
    )
    with support.opened(subject, optimizer=spec) as engine:
        start = support.weights(engine)
        plain = {name: tensor.double().requires_grad_() for name, tensor in start.items()}
        groups = []
        for name, tensor in plain.items():
            chosen = ("q_proj", 0.5), ("layers.0.", 3.0), ("_proj", 0.25), ("", 1.0)
            factor = next(factor for part, factor in chosen if part in name)
            decay = 0.0 if tensor.ndim == 1 or "embed_tokens" in name else spec.weight_decay
            groups.append({"params": [tensor], "lr": spec.lr * factor, "weight_decay": decay})
        optimizer = torch.optim.AdamW(groups, betas=spec.betas, eps=spec.eps)
        for _ in range(2):
            found = support.gradients(engine)
            for name, tensor in plain.items():
                tensor.grad = found[name].double()
            optimizer.step()
            with engine.train_mode():
                engine.optimizer_step()
                engine.lr_scheduler_step()
        end = support.weights(engine)
    moved = {name: plain[name].detach() - start[name].double() for name in plain}
    found = {name: end[name].double() - start[name].double() for name in plain}
    support.assert_close(moved, found, 2e-3, "changes of two steps with decays and rates by group")


@check("ENG-134", capability="optimizers", page=_OPTIMIZERS)
def the_average_follows_the_weights(subject: Subject) -> None:
    """The average of ``ema_decay`` is that of float64, is in the checkpoint, and is exported with ``averaged``."""
    spec, native = attrs.evolve(support.OPTIMIZER, ema_decay=0.75), str(subject.folder / "native")
    with support.opened(subject, optimizer=spec) as engine:
        expected = {name: tensor.double() for name, tensor in support.weights(engine).items()}
        for step in range(3):
            support.train(engine)
            weights = support.weights(engine)
            expected = {name: 0.75 * tensor + 0.25 * weights[name].double() for name, tensor in expected.items()}
            if step == 1:
                engine.save_checkpoint(SaveCheckpointRequest(folder=native))
    with support.opened(subject, optimizer=spec, seed=8) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=native))
        support.train(engine)
        before = support.weights(engine)
        out = subject.folder / "averaged"
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(out), format="huggingface", averaged=True))
        support.assert_same_tensors(before, support.weights(engine), "weights after the average was exported")
    with support.opened(subject, folder=out) as engine:
        found = support.weights(engine)
    support.assert_close(expected, found, 1e-5, "the exported average of three steps")


@check("ENG-135", capability="optimizers", page=_OPTIMIZERS)
def every_optimizer_goes_on(subject: Subject) -> None:
    """With each optimizer of the fixture's ``optimizers``, a step after save and load is bitwise the step without."""
    for name in ("adamw", *subject.fixture.get("optimizers", ())):
        place = attrs.evolve(subject, folder=subject.folder / name)
        spec = attrs.evolve(support.OPTIMIZER, name=name, ema_decay=0.5)
        support.assert_goes_on(place, f"weights under {name}, one step after a checkpoint was loaded", optimizer=spec)


@check("ENG-136", capability="optimizers", page=_OPTIMIZERS)
def gradients_that_are_not_finite_stop(subject: Subject) -> None:
    """With ``on_nonfinite: stop`` a norm that is not finite raises ``engine.not-finite`` with the sample's name."""
    rows = list(support.make_rows())
    rows[2] = attrs.evolve(rows[2], advantages=(math.nan, *rows[2].advantages[1:]), response_mask=(1.0,) * 9)
    names = [f"sample {index}" for index in range(len(rows))]
    spec = attrs.evolve(support.OPTIMIZER, on_nonfinite="stop")
    with support.opened(subject, optimizer=spec) as engine, naming_samples(names), engine.train_mode():
        before = support.weights(engine)
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(support.batch(rows), support.Loss())
        with expecting.refused(JackfieldError, "engine.not-finite", naming="sample 2", what="a step of NaN"):
            engine.optimizer_step()
        support.assert_same_tensors(before, support.weights(engine), "weights after a step that stopped")


def _log_probs(model: Any) -> list[torch.Tensor]:
    """Return the log-probabilities of each row under a plain model."""
    found = []
    with torch.no_grad():
        for row in support.make_rows():
            tokens = torch.tensor([row.prompt_ids + row.response_ids])
            logits = model(input_ids=tokens, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1))
    return found


@check("ENG-137", capability="lora_variants", page=_LORA)
def variants_of_lora_are_those_of_peft(subject: Subject) -> None:
    """DoRA and rsLoRA: PEFT loads the exported adapter, and gives the engine's log-probs; the base is without it."""
    base = support.expected(support.model_folder()).log_probs
    changes: list[dict[str, Any]] = [{"use_dora": True}, {"use_rslora": True}]
    for change in changes:
        lora = attrs.evolve(LORA, **change)
        with support.opened(subject, lora=lora, optimizer=_STEEP) as engine:
            support.train(engine, steps=3)
            found = support.log_probs(engine)
            tensors, config = export(engine)
            with engine.disable_adapter():
                support.assert_tokens(base, support.log_probs(engine), 1e-4, f"log-probabilities without {change}")
        said = {name: config.get(name) for name in change}
        assert change == said, f"the PEFT config says {said}, expected {change}"
        model, state = with_peft(subject.folder / "peft", tensors, config)
        support.assert_names(state, tensors, f"exported tensors with {change}, and what PEFT has of this config")
        what = f"log-probabilities of the engine, and of its adapter in PEFT, with {change}"
        support.assert_tokens(_log_probs(model), found, 1e-4, what)


@check("ENG-138", capability="lora_merged", page=_LORA)
def merged_adapters_are_published(subject: Subject) -> None:
    """With ``publish: merged`` the whole model is published with the adapter in it; the base does not change."""
    base = support.expected(support.model_folder()).log_probs
    plain = support.plain_model(support.model_folder(), torch.float32)
    variants: list[LoraSpec] = [attrs.evolve(LORA, publish="merged")]
    if subject.has("lora_variants"):
        variants += [attrs.evolve(each, use_dora=True, use_rslora=True) for each in variants]
    for lora in variants:
        with support.opened(subject, lora=lora, optimizer=_STEEP) as engine:
            support.train(engine, steps=3)
            found = support.log_probs(engine)
            config = engine.get_per_tensor_param()[1]
            assert config is None, "a merged adapter is published with a PEFT config"
            merged = support.weights(engine)
            with engine.disable_adapter():
                support.assert_tokens(base, support.log_probs(engine), 1e-4, "log-probabilities of the base")
        own = {name: tensor for name, tensor in plain.named_parameters() if name in merged}
        support.assert_names(own, merged, "merged tensors")
        model = _with_weights(plain, merged)
        support.assert_tokens(_log_probs(model), found, 1e-4, "log-probabilities of the engine and of merged weights")


def _with_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    def call(**inputs: Any) -> Any:
        return torch.func.functional_call(model, dict(weights), (), inputs)

    return call


def _save(engine: BaseEngine, folder: str) -> None:
    engine.save_checkpoint(SaveCheckpointRequest(folder=folder, background=True))


@check("ENG-139", capability="checkpoint_background", page=_BACKGROUND)
def a_save_in_the_background_is_of_its_beginning(subject: Subject) -> None:
    """Steps after a save in the background are not in it; ``finish_checkpoint`` waits, and may be called again."""
    folder = str(subject.folder / "native")
    with support.opened(subject) as engine:
        engine.finish_checkpoint()  # nothing to wait for
        support.train(engine, steps=2)
        saved = support.weights(engine)
        _save(engine, folder)
        support.train(engine)
        wanted = support.weights(engine)
        engine.finish_checkpoint()
        engine.finish_checkpoint()
        support.assert_same_tensors(wanted, support.weights(engine), "weights after a save in the background")
    with support.opened(subject, seed=8) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=folder))
        support.assert_same_tensors(saved, support.weights(engine), "weights of a checkpoint in the background")
        support.train(engine)
        support.assert_same_tensors(wanted, support.weights(engine), "weights one step after it was loaded")


@check("ENG-129", capability="checkpoint_background", page=_BACKGROUND)
def a_save_that_fails_is_reported(subject: Subject) -> None:
    """If a folder is not writable, the save or ``finish_checkpoint`` raises ``EngineError``, and training goes on."""
    file = subject.folder / "file"
    file.write_text("a file where a folder is wanted")
    with support.opened(subject) as engine:
        with expecting.refused(JackfieldError, "engine.failed", what="a save into a folder that cannot be made"):
            _save(engine, str(file / "native"))
            engine.finish_checkpoint()
        support.train(engine)
