"""VeOmni's models: built, sharded, and asked for log-probabilities of given tokens instead of logits.

Shapes: ``b`` rows, ``S`` padded positions, ``N`` response tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from veomni.arguments import MixedPrecisionConfig
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.distributed.parallel_plan import get_runtime_parallel_plan
from veomni.distributed.torch_parallelize import build_parallelize_model, parallelize_model_fsdp2
from veomni.distributed.utils import check_fqn_match
from veomni.models import build_foundation_model

from jackfield.abc.engine import EngineContext
from jackfield.errors import EngineError, PluginError, some
from jackfield.sdk.jagged import length_limits
from jackfield_engine_veomni.config import Config
from jackfield_engine_veomni.exchange import ULYSSES_SDPA, exchange_tokens, register_attention, shared
from jackfield_engine_veomni.parallel import Ranks
from jackfield_engine_veomni.rows import MicroBatch
from jackfield_engine_veomni.sizes import refuse_sizes
from jackfield_engine_veomni.tensors import Sharding
from jackfield_engines.output_layer import token_statistics
from jackfield_huggingface.heads import read_scalar_head
from jackfield_huggingface.names import CheckpointNames, shapes_of

#: Architectures of VeOmni whose output layer is one product, without caps or scales of logits.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "seed_oss")

#: VeOmni's operators that have a plain form; its own kernels need a GPU.
_PLAIN: tuple[str, ...] = (
    "moe",
    "cross_entropy_loss",
    "rms_norm",
    "swiglu_mlp",
    "rotary_pos_emb",
    "load_balancing_loss",
)
_PLAIN += ("rms_norm_gated", "causal_conv1d", "chunk_gated_delta_rule")

DTYPES = ("float32", "bfloat16")


def _unusable(message: str, path: str, expected: object, found: object, fix: str | None = None) -> EngineError:
    return EngineError(message, code="engine.model", where=path, expected=expected, found=found, fix=fix)


def read_config(path: str) -> PretrainedConfig:
    """Read a model folder's configuration; refuse what this engine does not compute (``engine.model``)."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        found = "no config.json" if folder.is_dir() else "no such folder"
        raise _unusable(f"no model in the folder {path!r}", path, "a Hugging Face folder with config.json", found)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as caught:  # transformers raises various types for a broken file
        raise _unusable(
            f"config.json cannot be read: {caught}", path, "a configuration", type(caught).__name__
        ) from caught
    if config.model_type not in ARCHITECTURES:
        expected = f"one of {', '.join(ARCHITECTURES)}"
        fix = "set engine.name to fsdp, which trains any causal language model of transformers"
        raise _unusable("the engine veomni does not train this architecture", path, expected, config.model_type, fix)
    limits = length_limits(config.to_dict())
    if limits:
        fix = "set engine.name to fsdp"
        raise _unusable(
            "rotary frequencies depend on the length", path, "constant frequencies", some(list(limits)), fix
        )
    if not shapes_of(folder):
        raise _unusable(f"no weights in the folder {path!r}", path, "safetensors files", "none")
    for name in vars(config):  # losses compare training passes with inference passes, so dropout is off
        if name.endswith("dropout"):
            setattr(config, name, 0.0)
    config.use_cache = False
    return config


def refuse_settings(context: EngineContext, settings: Config) -> None:
    """Refuse settings of the context without effect here (``plugin.capability``, ``config.invalid-value``)."""
    spec = context.model
    wanted: Mapping[str, object] = {
        "lora": spec.lora,
        "dropout": spec.dropout,
        "freeze": spec.freeze,
        "router_aux_loss": spec.router_aux_loss,
        "router_replay": spec.router_replay,
        "trust_remote_code": spec.trust_remote_code,
    }
    for name, value in wanted.items():
        if value:
            raise PluginError(
                f"the engine veomni does not have model.{name}",
                code="plugin.capability",
                where=f"model.{name}",
                expected="its default",
                found=value,
                fix="leave it out, or set engine.name to fsdp",
            )
    wrong: tuple[str, object, object] | None = None
    if spec.dtype not in DTYPES:
        wrong = ("model.dtype", "one of " + ", ".join(DTYPES), repr(spec.dtype))
    elif context.temperature <= 0:
        wrong = ("EngineContext.temperature", "more than 0", context.temperature)
    elif context.micro_batch_tokens <= 0:
        wrong = ("EngineContext.micro_batch_tokens", "more than 0", context.micro_batch_tokens)
    elif context.memory_fraction is not None and (context.device == "cpu" or not 0 < context.memory_fraction <= 1):
        given = f"{context.memory_fraction} on {context.device}"
        wrong = ("EngineContext.memory_fraction", "more than 0, at most 1, and a GPU", given)
    elif context.role == "critic" and not spec.value_head:
        wrong = ("EngineContext.model.value_head", True, False)
    elif settings.expert_kernel != "eager" and (context.device == "cpu" or not computes_in(context, settings)):
        wrong = ("engine.expert_kernel", "eager, or a GPU and bfloat16", settings.expert_kernel)
    if wrong is not None:
        where, expected, found = wrong
        message = f"{where} is not usable"
        raise EngineError(message, code="config.invalid-value", where=where, expected=expected, found=found)


def computes_in(context: EngineContext, settings: Config) -> str | None:
    """Return the dtype of passes where it is not that of the parameters, float32; None: it is."""
    if settings.mixed_precision == "bfloat16":
        return "bfloat16"
    trained = context.optimizer is not None
    return context.model.dtype if trained and context.model.dtype != "float32" else None


class TokenModel:
    """A causal language model of VeOmni, sharded over the ranks; its output layer returns results of tokens.

    The output layer gets the hidden states of the positions that predict response tokens, and computes their
    log-probabilities piece by piece. With sequence parallelism each rank does so for its part of the rows, and the
    results are added up. Gradients are summed over all ranks.
    """

    def __init__(self, context: EngineContext, settings: Config, ranks: Ranks) -> None:
        self._context, self._settings, self._ranks = context, settings, ranks
        self._config = read_config(context.model.path)
        refuse_sizes(self._config.to_dict(), settings)
        with ranks.entered():
            model = self._build()
            # as from_pretrained sets it for the library's own model of this type, whose names and forms VeOmni's has
            model._weight_conversions = get_checkpoint_conversion_mapping(self._config.model_type) or []
            self.names = CheckpointNames(model, Path(context.model.path))
            self.shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
            plan = get_runtime_parallel_plan(model) if settings.expert_parallel > 1 else None
            patterns = [] if plan is None else list(plan.extra_parallel_plan["ep"])
            sliced = [name for name in self.shapes for pattern in patterns if check_fqn_match(pattern, name)]
            self.sharding = Sharding(ranks.state, frozenset(sliced))
            self.module: Any = self._shard(model)
        if context.optimizer is None:
            self.module.requires_grad_(False)
        self.set_training(False)

    def _build(self) -> PreTrainedModel:
        """Build the model without weights."""
        context, settings = self._context, self._settings
        operators = {f"{name}_implementation": "eager" for name in _PLAIN}
        operators |= {"attn_implementation": settings.attention, "moe_implementation": settings.expert_kernel}
        dtype = "float32" if context.optimizer is not None else context.model.dtype
        model: PreTrainedModel = build_foundation_model(
            self._config,
            torch_dtype=dtype,
            init_device="meta",
            ops_implementation=OpsImplementationConfig(**operators),
        )
        head: Any = model.get_output_embeddings()
        assert isinstance(head, nn.Linear), "the architectures have one"
        assert getattr(head, "bias", None) is None, "the architectures have none"
        head.forward = MethodType(self._output, head)  # type: ignore[method-assign]
        if settings.sequence_parallel > 1 and settings.attention == "sdpa":
            register_attention()
            model.config._attn_implementation = ULYSSES_SDPA
        if settings.expert_parallel > 1 and settings.expert_kernel == "eager":
            for module in model.modules():
                if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
                    exchange_tokens(module, settings.expert_parallel)
        return model

    def _shard(self, model: PreTrainedModel) -> PreTrainedModel:
        """Shard the model and load its weights."""
        context, settings, path = self._context, self._settings, self._context.model.path
        computes = computes_in(context, settings)
        precision = MixedPrecisionConfig(enable=False)
        if computes is not None:
            precision = MixedPrecisionConfig(enable=True, param_dtype=computes, reduce_dtype="float32")
        options: dict[str, Any] = {
            "weights_path": path,
            "init_device": "meta",
            "mixed_precision": precision,
            "enable_reshard_after_forward": settings.reshard_after_forward,
        }
        checkpointing = context.model.gradient_checkpointing
        try:
            if self._ranks.size > 1:
                sharded = build_parallelize_model(model, enable_gradient_checkpointing=checkpointing, **options)
            else:  # VeOmni's entry shards nothing on one rank, and then loads no weights on a CPU
                if checkpointing:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                sharded = parallelize_model_fsdp2(model, **options)
        except Exception as caught:  # its loader raises various types for a broken folder
            message = f"the model in {path!r} cannot be loaded: {caught}"
            raise _unusable(message, path, "weights that VeOmni loads", type(caught).__name__) from caught
        if context.model.value_head:
            sharded.value_head = self._value_head()
        if self._ranks.size > 1:
            for module in sharded.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_gradient_divide_factor(1.0)
        return sharded

    def _value_head(self) -> nn.Module:
        """Make a sharded head ``[*, H] -> [*, 1]``: the folder's, or weights N(0, 1/H) from the seed and bias 0."""
        size = self._config.hidden_size
        given = read_scalar_head(Path(self._context.model.path), size) or {}
        head = nn.Linear(size, 1)
        generator = torch.Generator().manual_seed(self._context.seed)
        with torch.no_grad():
            head.weight.normal_(0.0, size**-0.5, generator=generator)
            head.bias.zero_()
            for name, tensor in given.items():
                head.get_parameter(name).copy_(tensor)
        fully_shard(head.to(self._ranks.device), mesh=self._ranks.state.fsdp_mesh)
        return head

    def set_training(self, training: bool) -> None:
        """Set the mode; training and inference passes differ by the recomputation of activations alone."""
        self.module.train(training)

    # ---- passes

    def results(
        self, micro: MicroBatch, want_entropy: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return log-probabilities, entropies and values float32 ``[N]`` of a micro-batch; None if not computed."""
        sequence = self._settings.sequence_parallel
        rows, length = micro.input_ids.shape
        own = slice(0, length)
        if sequence > 1:
            part = length // sequence
            own = slice(self._ranks.state.ulysses_rank * part, (self._ranks.state.ulysses_rank + 1) * part)
        row, column = micro.positions // length, micro.positions % length
        self._here = ((column >= own.start) & (column < own.stop)).nonzero().squeeze(1)
        self._index = row[self._here] * (own.stop - own.start) + column[self._here] - own.start
        self._micro, self._want_entropy = micro, want_entropy
        position_ids = torch.arange(length, device=micro.input_ids.device)[own].expand(rows, -1)
        try:
            results = self.module(
                input_ids=micro.input_ids[:, own].contiguous(), position_ids=position_ids, use_cache=False
            ).logits
        finally:
            del self._here, self._index, self._micro
        actor = self._context.role != "critic"
        return (
            results[0] if actor else None,
            results[1] if actor and want_entropy else None,
            results[2] if self._context.model.value_head else None,
        )

    def _output(self, head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Return the results of the micro-batch's tokens instead of logits, float32 ``[3, N]``."""
        hidden_NH = hidden.flatten(0, 1).index_select(0, self._index)
        log_probs = entropy = values = hidden_NH.new_zeros(len(hidden_NH), dtype=torch.float32)
        if self._context.role != "critic":
            log_probs, entropy = token_statistics(
                hidden_NH,
                head.weight,
                self._micro.labels[self._here],
                temperature=self._context.temperature,
                want_entropy=self._want_entropy,
                chunk=self._settings.logits_chunk,
            )
        if self._context.model.value_head:
            values = self.module.value_head(hidden_NH.float()).float().sum(-1)
        own = torch.stack([log_probs, entropy, values])
        if self._settings.sequence_parallel == 1:
            return own
        every = own.new_zeros(3, len(self._micro.labels)).index_copy(1, self._here, own)
        return shared(every, self._ranks.state.ulysses_group)

    # ---- weights

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the sharded parameters by name, tied ones once."""
        return dict(self.module.named_parameters())

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors in checkpoint form, in the model's dtype, without a value head. Collective."""
        tensors = dict(self.module.named_parameters(remove_duplicate=False))
        tensors |= dict(self.module.named_buffers(remove_duplicate=False))
        dtype = getattr(torch, self._context.model.dtype)
        for group in self.names.groups:
            parts = [self.sharding.full(part, tensors[part].detach().to(dtype)) for part in group.parts]
            yield from self.names.to_checkpoint(group, parts).items()
