"""The reference: the model of transformers in float64, one row at a time, a loss written out, and PyTorch's AdamW.

It shares no code with engines. R response tokens of a row, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from jackfield.abc.engine import ModelSpec, OptimizerSpec
from jackfield.errors import ConfigError, EngineError
from jackfield_parity.batch import Batch, LossSettings

#: Optimizer and model settings that the reference does not have, with the value that it computes.
_OPTIMIZER_LIMITS = {"name": "adamw", "scheduler": "constant", "warmup_steps": 0}
_MODEL_LIMITS: dict[str, Any] = {"value_head": False, "dropout": 0.0, "router_aux_loss": 0.0, "router_replay": False}


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64 in every call, since models cast norms, softmax and rotary angles to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        given = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return func(*args, **given)


@attrs.frozen(kw_only=True, eq=False)
class Expected:
    """The results of the reference, float64."""

    log_probs: list[Tensor]  #: by row, ``[R]``, before the first step
    loss: float  #: of the first step
    grad_norm: float  #: of the first step, before clipping
    gradients: dict[str, Tensor]  #: of the first step, before clipping, by name
    start: dict[str, Tensor]  #: the adapter's parameters, or all, before the first step
    parameters: dict[str, Tensor]  #: after the last step
    #: further log-probs by name of a rollout server, by row
    rollouts: dict[str, list[Tensor]] = attrs.field(factory=dict)
    #: gives the same tensors under the names of the model's checkpoint, where they differ
    as_checkpoint: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = attrs.field(default=dict)


def check_supported(model: ModelSpec, optimizer: OptimizerSpec) -> None:
    """Raise ``config.invalid-value`` for a setting that the reference does not compute."""
    for prefix, spec, limits in (("model", model, _MODEL_LIMITS), ("optimizer", optimizer, _OPTIMIZER_LIMITS)):
        for name, expected in limits.items():
            if getattr(spec, name) != expected:
                where, fix = f"{prefix}.{name}", "leave the setting out"
                details = {"where": where, "expected": expected, "found": getattr(spec, name), "fix": fix}
                raise ConfigError("the reference does not have a setting", **details)
    if model.lora is not None and (model.lora.dropout or model.lora.publish == "merged"):
        expected, fix = "no dropout, and publish: adapter", "leave out model.lora.dropout and model.lora.publish"
        raise ConfigError("the reference does not have a setting", where="model.lora", expected=expected, fix=fix)


class Reference:
    """A model in float64 with an optional adapter, and its training steps."""

    def __init__(
        self, spec: ModelSpec, adapter: Mapping[str, Tensor] | None = None, peft_config: Mapping[str, Any] | None = None
    ) -> None:
        """Load the model of ``spec.path``, rounded to the spec's dtype first, and the adapter of an engine."""
        self._spec = spec
        self._model = _with_adapter(_load(spec), adapter, peft_config)
        for name, parameter in self._model.named_parameters():
            if any(re.search(pattern, name) for pattern in spec.freeze):
                parameter.requires_grad_(False)

    def log_probs(self, batch: Batch) -> list[Tensor]:
        """Return log-probs of the responses, by row ``[R]``."""
        with torch.no_grad():
            return [self._row(batch, row)[0] for row in range(len(batch))]

    def train(self, batch: Batch, optimizer: OptimizerSpec, steps: int, rollouts: Mapping[str, Batch]) -> Expected:
        """Return the results on a batch, after ``steps`` steps on it. The model is changed."""
        log_probs, start = self.log_probs(batch), self._tensors()
        served = {name: self.log_probs(rows) for name, rows in rollouts.items()}
        trained = {name: one for name, one in self._model.named_parameters() if one.requires_grad}
        adam = torch.optim.AdamW(_groups(trained, optimizer), betas=optimizer.betas, eps=optimizer.eps, foreach=False)
        results: list[tuple[float, float, dict[str, Tensor]]] = []
        for _ in range(steps):
            adam.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            zeros = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in trained.items()}
            found = {name: one.detach().clone() for name, one in zeros.items()}
            bound = float("inf") if optimizer.clip_grad is None else optimizer.clip_grad
            norm = float(torch.nn.utils.clip_grad_norm_(list(trained.values()), bound, foreach=False))
            results.append((float(loss.detach()), norm, found))
            adam.step()
        value, norm, gradients = results[0]
        return Expected(
            log_probs=log_probs,
            loss=value,
            grad_norm=norm,
            gradients={_published(name): one for name, one in gradients.items()},
            start=start,
            parameters=self._tensors(),
            rollouts=served,
            as_checkpoint=self._as_checkpoint,
        )

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the batch, with gradients."""
        settings, counts = batch.settings.loss, batch.counts
        shares = []
        for row in range(len(batch)):
            log_probs, entropy = self._row(batch, row, entropy=bool(settings.entropy_coefficient))
            mask, terms = batch.response_mask[row].double(), _terms(settings, batch, row, log_probs)
            terms = terms if entropy is None else terms - settings.entropy_coefficient * entropy
            total = (terms * mask).sum()
            if settings.aggregation == "token-mean":
                shares.append(total / counts["global_tokens"])
            else:
                per_token = mask.sum().clamp(min=1.0) if settings.aggregation == "seq-mean-token-mean" else 1.0
                shares.append(total / per_token / counts["global_sequences"])
        return torch.stack(shares).sum()

    def _row(self, batch: Batch, row: int, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        prompt, response = batch.prompt_ids[row], batch.response_ids[row]
        tokens = torch.cat([prompt, response]).unsqueeze(0)
        with InFloat64():
            logits = self._model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits = logits[: len(response)] / batch.settings.temperature
        all_log_probs = logits.log_softmax(-1)
        chosen = all_log_probs.gather(1, response[:, None]).squeeze(1)
        return chosen, -(all_log_probs.exp() * all_log_probs).sum(-1) if entropy else None

    def _tensors(self) -> dict[str, Tensor]:
        """Return what an engine publishes: the adapter, or all parameters."""
        adapted, parameters = hasattr(self._model, "peft_config"), self._model.named_parameters()
        return {_published(name): one.detach().clone() for name, one in parameters if one.requires_grad or not adapted}

    def _as_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors, by names of parameters, as the model writes them into a checkpoint."""
        from safetensors.torch import load_file

        model = copy.deepcopy(self._model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in tensors:
                    parameter.copy_(tensors[name])
        with tempfile.TemporaryDirectory(prefix="jackfield-parity-") as folder, _quiet():
            model.save_pretrained(folder)
            files = sorted(Path(folder).glob("*.safetensors"))
            return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _load(spec: ModelSpec) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "trust_remote_code": spec.trust_remote_code, "local_files_only": True}
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=getattr(torch, spec.dtype), **options)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        expected, fix = "a folder of a causal language model of transformers", "correct --model"
        details = {"where": spec.path, "expected": expected, "found": f"{type(error).__name__}: {error}", "fix": fix}
        raise EngineError("the reference cannot load the model", code="engine.model", **details) from error
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    return model.double().eval()


def _with_adapter(model: Any, adapter: Mapping[str, Tensor] | None, config: Mapping[str, Any] | None) -> Any:
    if adapter is None or config is None:
        return model
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    with warnings.catch_warnings():  # peft uses a name that transformers deprecates
        warnings.simplefilter("ignore", FutureWarning)
        made = get_peft_model(model, PeftConfig.from_peft_type(**{**config, "inference_mode": False})).double()
    result = set_peft_model_state_dict(made, {name: tensor.double() for name, tensor in adapter.items()})
    if lost := [*result.unexpected_keys, *(name for name in result.missing_keys if "lora" in name)]:
        details = {"expected": "tensors under PEFT's names", "found": ", ".join(lost[:4]), "fix": "correct the engine"}
        raise EngineError(
            "the adapter of an engine does not fit its PEFT config", where="get_per_tensor_param", **details
        )
    return made.eval()


def _terms(settings: LossSettings, batch: Batch, row: int, log_probs: Tensor) -> Tensor:
    """Return the loss of each token, ``[R]``, without the entropy bonus."""
    old, advantages = batch.old_log_probs[row].double(), batch.advantages[row].double()
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    if settings.clip_dual is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, settings.clip_dual * advantages), gain)
    terms = -gain
    if settings.kl_coefficient:
        assert batch.ref_log_probs is not None, "checked when the batch was read"
        distance = batch.ref_log_probs[row].double() - log_probs
        terms = terms + settings.kl_coefficient * (distance.exp() - distance - 1.0)
    return terms


def _groups(trained: Mapping[str, Tensor], spec: OptimizerSpec) -> list[dict[str, Any]]:
    groups = []
    for name, parameter in trained.items():
        if name.endswith(".bias"):
            kind = "biases"
        elif parameter.dim() == 1:
            kind = "norms"
        else:
            kind = "embeddings" if "embed" in name else ""
        factor = next((each for pattern, each in spec.lr_factors.items() if re.search(pattern, name)), 1.0)
        decay = 0.0 if kind in spec.no_decay else spec.weight_decay
        groups.append({"params": [parameter], "lr": spec.lr * factor, "weight_decay": decay})
    return groups


def _published(name: str) -> str:
    return name.replace(".default.", ".").replace("lora_magnitude_vector.default", "lora_magnitude_vector")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars inside the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tiny_model(folder: Path, kind: str) -> None:
    """Write a random Qwen3 (``tiny``) or Qwen3-MoE (``tiny-moe``) of two layers into a folder, in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    draw = torch.Generator().manual_seed(11)
    with torch.random.fork_rng(devices=[]), _quiet():
        made = {
            "tiny": lambda: Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=False, **sizes)),
            "tiny-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(tie_word_embeddings=False, **sizes, **experts)),
        }[kind]()
        with torch.no_grad():
            for parameter in made.parameters():
                offset = 1.0 if parameter.dim() == 1 else 0.0
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.15 + offset)
        made.save_pretrained(folder)
