"""Helpers for the suite of training engines: a tiny model, rows, a loss, and their float64 reference."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from tensordict import TensorDict

from jackfield.abc.engine import (
    BaseEngine,
    EngineContext,
    EngineOutput,
    LoadCheckpointRequest,
    ModelSpec,
    OptimizerSpec,
    SaveCheckpointRequest,
    TokenOutput,
)
from jackfield.sdk.jagged import jagged, rows
from jackfield_conformance.registry import Subject
from jackfield_conformance.support import expecting
from jackfield_conformance.support.expecting import temporary_root

VOCABULARY = 64
LAYERS = 2
LENGTHS = ((3, 5), (7, 1), (1, 9), (10, 4), (2, 8), (4, 3), (6, 6))  #: prompt and response tokens of each row
SMALL = 24  #: ``micro_batch_tokens`` that split the rows into several passes
OPTIMIZER = OptimizerSpec(lr=1e-2, weight_decay=0.1, clip_grad=1.0)

_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}

Gradients = dict[str, torch.Tensor]


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars inside the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def model_folder(*, tied: bool = True, dropout: float = 0.0) -> Path:
    """Write a Qwen3 of two layers and hidden size 16, in float32, with this dropout of attention weights.

    Weights are larger than after an initialization, so that each affects the results. If it is ``tied``, embeddings and
    output layer are one tensor.
    """
    return _made(tied, dropout, LAYERS)


@functools.cache
def mixture_folder() -> Path:
    """Write a Qwen3 mixture of four experts: separate tensors in the checkpoint, stacked in memory."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(19)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, **_SIZES, **experts))
    return _saved(model, "model-mixture")


@functools.cache
def _made(tied: bool, dropout: float, layers: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ends = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64, "num_hidden_layers": layers}
    config = Qwen3Config(tie_word_embeddings=tied, attention_dropout=dropout, **_SIZES, **ends)
    generator = torch.Generator().manual_seed(17)
    with torch.random.fork_rng(devices=[]):
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            offset = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + offset)
    return _saved(model, f"model-{'tied' if tied else 'untied'}-{dropout:g}-{layers}")


def _saved(model: Any, name: str) -> Path:
    folder = temporary_root() / name
    with without_progress_bars():
        model.save_pretrained(folder)
    return folder


@functools.cache
def plain_model(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Load the folder's model with transformers' plainest operators. It is shared: copy it before a change."""
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others lack float64
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    return model.eval()


@attrs.frozen
class Row:
    """A sample in plain values."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[float, ...]
    advantages: tuple[float, ...]
    old_log_probs: tuple[float, ...]


@functools.cache
def make_rows() -> tuple[Row, ...]:
    """Make rows of very different lengths, in no order, always the same."""
    draw = random.Random(23)
    return tuple(
        Row(
            tuple(draw.randrange(VOCABULARY) for _ in range(prompt)),
            tuple(draw.randrange(VOCABULARY) for _ in range(response)),
            tuple(float(draw.random() < 0.8) for _ in range(response)),
            tuple(draw.gauss(0.0, 1.0) for _ in range(response)),
            tuple(draw.gauss(-4.0, 0.3) for _ in range(response)),
        )
        for prompt, response in LENGTHS
    )


def batch(chosen: Sequence[Row] | None = None, **columns: torch.Tensor) -> TensorDict:
    """Return rows as an engine gets them, with further ``columns``."""
    chosen = make_rows() if chosen is None else tuple(chosen)
    return TensorDict({**_columns(chosen), **columns}, batch_size=[len(chosen)])


@functools.lru_cache(maxsize=8)
def _columns(chosen: tuple[Row, ...]) -> dict[str, torch.Tensor]:
    made = {}
    for field in attrs.fields(Row):
        dtype = torch.int64 if field.name.endswith("_ids") else torch.float32
        made[field.name] = jagged([torch.tensor(getattr(row, field.name), dtype=dtype) for row in chosen])
    return made


class Loss:
    """The loss ``sum(mask * (-advantages * log_probs + log_probs**2 / 20 - entropy * H)) / global tokens``."""

    def __init__(self, entropy: float = 0.0) -> None:
        self.tokens = sum(sum(row.response_mask) for row in make_rows())
        self.entropy = entropy
        self.needs_entropy = entropy != 0.0
        self.calls = 0

    def __call__(self, output: TokenOutput, data: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Return one micro-batch's share, and metrics."""
        self.calls += 1
        mask, advantages = data["response_mask"], data["advantages"]
        terms = -advantages * output.log_probs + output.log_probs.square() / 20.0
        if self.needs_entropy:
            assert output.entropy is not None, "the loss has needs_entropy = True and gets no entropy"
            terms = terms - self.entropy * output.entropy
        loss = (terms * mask).sum() / self.tokens
        metrics = {
            "tokens": mask.sum(),
            "share": float(mask.sum()) / self.tokens,
            "advantage/max": advantages.max(),
            "advantage/min": float(advantages.min()),
        }
        return loss, metrics


@attrs.frozen(eq=False)
class Expected:
    """The results of a float64 forward pass of each row alone, without padding."""

    log_probs: list[torch.Tensor]  #: by row, ``[response]``
    entropy: list[torch.Tensor]
    hidden: list[torch.Tensor]  #: by row, ``[response, hidden]``: states from which response tokens are predicted
    loss: float
    gradients: Gradients


@functools.cache
def expected(folder: Path, temperature: float = 1.0, entropy: float = 0.0) -> Expected:
    """Return the results of :func:`make_rows` under :class:`Loss`."""
    model = plain_model(folder)
    log_prob_rows, entropies, hidden = [], [], []
    total = torch.zeros((), dtype=torch.float64)
    for row in make_rows():
        states = hidden_states(model, row)
        all_log_probs = (model.get_output_embeddings()(states) / temperature).log_softmax(-1)
        chosen = all_log_probs.gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1)
        spread = -(all_log_probs.exp() * all_log_probs).sum(-1)
        mask, advantages = (torch.tensor(each).double() for each in (row.response_mask, row.advantages))
        total = total + ((-advantages * chosen + chosen.square() / 20.0 - entropy * spread) * mask).sum()
        log_prob_rows.append(chosen.detach())
        entropies.append(spread.detach())
        hidden.append(states.detach())
    loss = total / sum(sum(row.response_mask) for row in make_rows())
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()))
    gradients = dict(zip(named, found, strict=True))
    return Expected(log_prob_rows, entropies, hidden, float(loss.detach()), gradients)


def hidden_states(model: Any, row: Row) -> torch.Tensor:
    """Return the last hidden states ``[response, hidden]`` from which a plain model predicts response tokens."""
    tokens = torch.tensor([row.prompt_ids + row.response_ids])
    states: torch.Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    return states[len(row.prompt_ids) - 1 : -1]


def context_of(subject: Subject, folder: Path | None = None, **changes: Any) -> EngineContext:
    """Make a context on the tiny model; ``changes`` are fields of the context or of its model."""
    fields = {field.name for field in attrs.fields(ModelSpec)}
    of_model = {name: changes.pop(name) for name in fields & changes.keys()}
    model = ModelSpec(path=str(folder or model_folder()), **of_model)
    standard = {"role": "actor", "optimizer": OPTIMIZER, "device": subject.fixture.get("device", "cpu"), "seed": 3}
    return EngineContext(model=model, **{**standard, **changes})


def dropout(subject: Subject) -> dict[str, Any]:
    """Return arguments of :func:`opened` for a model with dropout in training, if the engine has dropout."""
    return {"folder": model_folder(dropout=0.5), **({"dropout": 0.5} if subject.has("dropout") else {})}


@contextlib.contextmanager
def opened(subject: Subject, folder: Path | None = None, **changes: Any) -> Iterator[BaseEngine]:
    """Initialize an engine, and close it at the end."""
    engine: BaseEngine = subject.make(context_of(subject, folder, **changes))
    engine.initialize()
    try:
        yield engine
    finally:
        engine.close()


def gradients(engine: BaseEngine, data: TensorDict | None = None, loss: Any = None) -> Gradients:
    """Return the gradients of one pass."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch() if data is None else data, loss or Loss())
        return held_gradients(engine)


def held_gradients(engine: BaseEngine) -> Gradients:
    """Return the accumulated gradients, as copies on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.get_per_tensor_grad()}


def train(engine: BaseEngine, steps: int = 1, loss: Any = None) -> tuple[EngineOutput, float]:
    """Run whole training steps; return the last output and gradient norm."""
    with engine.train_mode():
        for _ in range(steps):
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(batch(), loss or Loss())
            norm = engine.optimizer_step()
            engine.lr_scheduler_step()
    return output, norm


def assert_goes_on(subject: Subject, what: str, **changes: Any) -> None:
    """Require that a step after save and load into a new engine of another seed equals a step without them."""
    folder = str(subject.folder / "native")
    with opened(subject, **changes) as engine:
        train(engine, steps=2)
        engine.save_checkpoint(SaveCheckpointRequest(folder=folder))
        train(engine)
        wanted = weights(engine)
    with opened(subject, **changes, seed=8) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=folder))
        train(engine)
        assert_same_tensors(wanted, weights(engine), what)


def weights(engine: BaseEngine) -> dict[str, torch.Tensor]:
    """Return the published weights, as copies on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.get_per_tensor_param()[0]}


def log_probs(engine: BaseEngine, data: TensorDict | None = None) -> list[torch.Tensor]:
    """Return log-probabilities of an inference pass, by row."""
    with engine.eval_mode():
        output = engine.forward_backward_batch(batch() if data is None else data, None, forward_only=True)
    assert output.log_probs is not None, "an inference pass of an actor has no log_probs"
    return [row.detach().cpu() for row in rows(output.log_probs)]


def relative_error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``wanted``."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def assert_close(
    wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], tolerance: float, what: str
) -> None:
    """Require the same names and shapes, and no relative error above ``tolerance``; the worst is named."""
    assert_names(wanted, found, what)
    errors = {name: relative_error(tensor, found[name].reshape(tensor.shape)) for name, tensor in wanted.items()}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    assert errors[worst] <= tolerance, (
        f"{what}: {worst} has a relative error of {errors[worst]:.3g}, expected at most {tolerance:g}"
    )


def assert_names(wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], what: str) -> None:
    """Require the same names and the same shapes."""
    expecting.assert_names(wanted, found, what)
    for name, tensor in wanted.items():
        assert tensor.shape == found[name].shape, (
            f"{what}: {name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
        )


def assert_same_tensors(wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], what: str) -> None:
    """Require the same names, dtypes and bits."""
    assert_names(wanted, found, what)
    for name, tensor in wanted.items():
        same = tensor.dtype == found[name].dtype and torch.equal(tensor, found[name])
        assert same, (
            f"{what}: {name} differs (dtype {found[name].dtype}, expected {tensor.dtype};"
            f" relative error {relative_error(tensor, found[name]):.3g})"
        )


def assert_tokens(wanted: Sequence[torch.Tensor], found: Any, tolerance: float, what: str) -> None:
    """Require per-token results, nested or by row, within an absolute tolerance of those of each row."""
    assert found is not None, f"{what} are missing from the result"
    by_row = rows(found) if isinstance(found, torch.Tensor) else list(found)
    assert len(wanted) == len(by_row), f"{what}: results of {len(by_row)} rows, expected {len(wanted)}"
    for index, (one, other) in enumerate(zip(wanted, by_row, strict=True)):
        assert one.shape == other.shape, (
            f"{what} of row {index}: {tuple(other.shape)}, expected one per response token: {tuple(one.shape)}"
        )
        error = float((one.double() - other.detach().cpu().double()).abs().max())
        assert error <= tolerance, f"{what} of row {index} are off by {error:.3g}, expected at most {tolerance:g}"
