"""Contract of a training engine: one object per SPMD rank.

The caller does not know how an engine is parallelised. It gives every rank of one data-parallel group the same rows,
according to :attr:`BaseEngine.layout`, and gets per-token results back in the order of the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, le, lt, optional

from jackfield.settings import option

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


@attrs.frozen(kw_only=True)
class LoraSpec:
    """The settings of a low-rank adapter, as in PEFT's ``LoraConfig``."""

    rank: int = option(8, "rank of the update", gt(0))
    alpha: float = option(16.0, "the update is scaled by alpha / rank", gt(0.0))
    dropout: float = option(0.0, "dropout on the adapter's input, while training", [ge(0.0), lt(1.0)])
    target_modules: tuple[str, ...] = option(
        (),
        "names of the adapted layers; empty: every linear layer of the language model except the output layer "
        "(experts that a model stacks in one tensor are no such layers)",
    )
    use_dora: bool = option(False, "train magnitudes beside the update, as DoRA does (capability lora_variants)")
    use_rslora: bool = option(False, "scale by alpha / sqrt(rank), as rsLoRA does (capability lora_variants)")
    publish: Literal["adapter", "merged"] = option(
        "adapter", "what replicas get: the adapter, or the model with the adapter merged (capability lora_merged)"
    )


@attrs.frozen(kw_only=True)
class ModelSpec:
    """The settings of the model that is loaded."""

    path: str = option(help="a Hugging Face folder; or OWNER/NAME[@REVISION] of a model on the Hugging Face Hub")
    dtype: str = option("float32", "dtype of the parameters: float32, bfloat16 or float16")
    value_head: bool = option(False, "a scalar head on the last hidden state (a critic)")
    lora: LoraSpec | None = option(None, "train a low-rank adapter; null: train the model's own weights")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    dropout: float = option(
        0.0,
        "probability of every dropout of the model in training passes; dropout in its config.json is not used "
        "(capability dropout)",
        [ge(0.0), lt(1.0)],
    )
    trust_remote_code: bool = option(False, "run Python code from the model's folder")
    freeze: tuple[str, ...] = option(
        (), "regular expressions; parameters in whose names one is found are not trained (capability freeze)"
    )
    router_aux_loss: float = option(
        0.0, "factor of the load-balancing loss of a mixture of experts (capability router_aux_loss)", ge(0.0)
    )
    router_replay: bool = option(
        False, "train a mixture of experts on the experts that generated each token (capability router_replay)"
    )


@attrs.frozen(kw_only=True)
class OptimizerSpec:
    """The optimizer and its learning-rate schedule. All but AdamW with one rate needs the capability ``optimizers``."""

    name: str = option("adamw", "an optimizer of the engine; each has adamw")
    options: Mapping[str, Any] = option(factory=dict, help="further settings of an optimizer other than adamw")
    lr: float = option(1e-6, "peak learning rate of the schedule", ge(0.0))
    betas: tuple[float, float] = option(
        (0.9, 0.999), "decay of the running averages of gradient and square", deep_iterable(and_(ge(0.0), lt(1.0)))
    )
    eps: float = option(1e-8, "added to the denominator of an update", [gt(0.0), le(1.0)])
    weight_decay: float = option(0.01, "decoupled weight decay", [ge(0.0), le(1e3)])
    clip_grad: float | None = option(1.0, "bound of the global gradient norm; null: off", optional(gt(0.0)))
    scheduler: Literal["constant", "linear", "cosine"] = option("constant", "the learning rate after the warm-up")
    warmup_steps: int = option(0, "linear from 0 to lr: step i < warmup_steps uses lr * i / warmup_steps", ge(0))
    total_steps: int | None = option(None, "length of the decay; needed by linear and cosine", gt(0))
    min_lr_ratio: float = option(0.0, "the decay ends at min_lr_ratio * lr", [ge(0.0), le(1.0)])
    no_decay: tuple[Literal["norms", "biases", "embeddings"], ...] = option(
        (), "parameters without weight decay; norms are all vectors that are no biases"
    )
    lr_factors: Mapping[str, float] = option(
        factory=dict, help="factors of lr by regular expression; the first that is found in a parameter's name counts"
    )
    ema_decay: float | None = option(
        None,
        "keep an average of the weights: average = decay * average + (1 - decay) * weights; null: none",
        optional(and_(gt(0.0), lt(1.0))),
    )
    on_nonfinite: Literal["skip", "stop"] = option(
        "stop", "gradients with a norm that is not finite: stop the run, or skip this optimizer step and go on"
    )


@attrs.frozen(kw_only=True)
class EngineContext:
    """The context that a rank gets at its construction, with the plugin's config."""

    role: Literal["actor", "reference", "critic"]
    model: ModelSpec
    optimizer: OptimizerSpec | None = None  #: None: forward passes only
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  #: number of the rank among those of its node; its device is ``device``, whatever this is
    #: torch.distributed init URL; None with one rank. A ``file://`` URL can be used once
    init_method: str | None = None
    device: str = "cpu"
    seed: int = 0
    temperature: float = 1.0  #: logits are divided by it before log-probabilities and entropy
    micro_batch_tokens: int = 16384  #: maximum tokens of one forward pass, padding included (one row may exceed it)
    memory_fraction: float | None = None  #: of the device's memory that this rank may use; None: no limit


@attrs.frozen(kw_only=True)
class EngineLayout:
    """A rank's place in data parallelism: which rows it gets and whether its results are kept."""

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    is_output_rank: bool = True  #: whether the caller keeps this rank's :class:`EngineOutput`


@attrs.frozen(kw_only=True, eq=False)
class TokenOutput:
    """The model's outputs for one micro-batch, ``[b, T]`` over response tokens, for the loss.

    Positions after the end of a row's response are 0. ``log_probs`` and ``values`` carry gradients.
    """

    log_probs: torch.Tensor  #: float ``[b, T]``; zeros for a critic, which has no output layer to compute them
    entropy: torch.Tensor | None = None  #: float ``[b, T]``, only where the loss has ``needs_entropy = True``
    values: torch.Tensor | None = None  #: float ``[b, T]``, only with a value head


#: ``(output, data) -> (loss, metrics)``. ``data`` holds the micro-batch's response columns, padded with 0 to
#: ``[b, T]``. The loss is this micro-batch's *share* of the batch's loss (normalised by global counts), so that
#: shares are summed; metrics are summed likewise, except for names that end in ``/max`` or ``/min``.
LossFunction: TypeAlias = Callable[..., tuple[Any, Mapping[str, Any]]]


@attrs.frozen(kw_only=True, eq=False)
class EngineOutput:
    """The result of a forward (and backward) pass over this rank's rows, in their order.

    Per-token tensors are jagged (``torch.nested``, ``[B, j]``, response tokens only), float32, detached, on the CPU.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    loss: float | None = None  #: this rank's share of the batch's loss; None without a loss function
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SaveCheckpointRequest:
    """A request to save into ``folder``, which is empty or absent. Every rank makes it."""

    folder: str
    #: ``huggingface`` can be loaded with ``from_pretrained``: weights, config and the model folder's tokenizer files
    format: Literal["native", "huggingface"] = "native"
    merge_adapter: bool = False  #: with ``huggingface``: write base model and adapter as one model
    averaged: bool = False  #: with ``huggingface``: the average of ``OptimizerSpec.ema_decay`` instead of the weights
    #: with ``native``: return once the state is copied; :meth:`BaseEngine.finish_checkpoint` waits for the files. Only
    #: sent to engines with the capability ``checkpoint_background``
    background: bool = False


@attrs.frozen(kw_only=True)
class SaveCheckpointResult:
    """The folder and files that were saved."""

    folder: str
    files: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class LoadCheckpointRequest:
    """A request to load a checkpoint in native format. Every rank makes it."""

    folder: str
    model_only: bool = False  #: leave optimizer, scheduler and random state as they are


@attrs.frozen(kw_only=True)
class LoadCheckpointResult:
    """The folder that was loaded."""

    folder: str


@attrs.frozen(kw_only=True)
class Box:
    """A part of a tensor, which a rank or a worker has; all tuples are by dimension."""

    name: str
    shape: tuple[int, ...]  #: of the whole tensor
    start: tuple[int, ...]
    length: tuple[int, ...]

    def __str__(self) -> str:
        """Return a name of the part, such as ``q_proj.weight[0:512, 0:1024]``."""
        ranges = zip(self.start, self.length, strict=True)
        return f"{self.name}[{', '.join(f'{start}:{start + length}' for start, length in ranges)}]"


class BaseEngine(ABC):
    """A model, its optimizer and its parallelism, on one rank.

    Invariants, each checked by the conformance suite:

    * gradients are the *sum* of the loss function's gradients over micro-batches and data-parallel ranks: they do not
      depend on the split of the rows or the number of ranks;
    * exported names are Hugging Face names and exported values are bit-exact;
    * save, load, step is bitwise equal to step; moving to another device and back changes nothing;
    * two engines with the same seed and context are equal.

    The constructor only stores its arguments; :meth:`initialize` loads the model. One thread at a time calls methods.
    """

    abi_version: ClassVar[str] = "1.1"

    def __init__(self, config: Any, context: EngineContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def initialize(self) -> None:
        """Load the model, and create the optimizer and the learning-rate scheduler.

        A model folder that is missing or unusable is refused (``engine.model``).
        """

    @property
    @abstractmethod
    def layout(self) -> EngineLayout:
        """This rank's layout, valid after :meth:`initialize`."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Return a context for training passes (dropout of ``ModelSpec.dropout``, weights on the device)."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Return a context for inference passes (dropout off, no gradients)."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Discard accumulated gradients."""

    @abstractmethod
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Run this rank's rows through the model, split into micro-batches, and accumulate gradients.

        ``data`` has the batch size ``[B]``; jagged int64 columns ``prompt_ids`` and ``response_ids``, and any
        response-aligned jagged columns that the loss reads (``response_mask``, ``advantages``, ``old_log_probs``, …) or
        dense row columns ``[B]``. With the capability ``multi_modal``, also ``multi_modal_inputs`` where the run has
        it: jagged uint8 rows (or a NonTensor of ``bytes``), the model's inputs beside tokens by name, to be read by
        :func:`jackfield.sdk.arrays.unpack`, and an empty mapping for a row without any. The arrays of a micro-batch
        are concatenated along their first dimension. With ``ModelSpec.router_replay``, the array ``routed_experts``,
        int16 ``[prompt + response - 1, layers with experts, experts per token]``, has the experts of each token but the
        last; -1: the router chooses.

        With ``forward_only`` no gradients are computed; a loss function, which may then be None, is still evaluated.
        Outside of :meth:`train_mode` and :meth:`eval_mode` it raises ``engine.state``.
        """

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip and apply gradients; return their norm before clipping. A norm that is not finite skips the step."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step and return the learning rate of the next step."""

    @abstractmethod
    def get_per_tensor_param(self) -> tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]:
        """Return the weights to publish, one full tensor at a time, under Hugging Face names.

        With an adapter, return the adapter's tensors under PEFT's names and the PEFT config (the base does not change);
        without one, all of the model's tensors and None. Tied tensors are yielded once. Every rank must exhaust the
        generator. A tensor is valid until the one after the next is drawn.
        """

    def get_local_param(self) -> Generator[tuple[Box, torch.Tensor], None, None] | None:
        """Return what this rank has of the weights to publish, without a collective operation; None: not sharded.

        Names and values are those of :meth:`get_per_tensor_param`. A name occurs once, and its boxes on all ranks cover
        the tensor; ranks may have the same box. Boxes do not change between calls. A tensor is valid until the one
        after the next is drawn. Since ABI 1.1.
        """
        return None

    @abstractmethod
    def get_per_tensor_grad(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield each trainable parameter's full gradient, summed over ranks; zeros if it got no gradient."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the chosen state to ``device`` (``cpu`` to free memory, the engine's own device to compute)."""

    @abstractmethod
    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        """Write model, optimizer, schedule and random state (native) or only weights (huggingface)."""

    def finish_checkpoint(self) -> None:
        """Wait until checkpoints that are written in the background are on disk, or raise why one is not.

        Every rank calls it. Since ABI 1.1.
        """
        return

    @abstractmethod
    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Load a native checkpoint, which a different number of ranks may have written."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the adapter is off (reference policy of a LoRA actor), if there is one."""

    def close(self) -> None:
        """Release process groups, memory and files. The engine is not used again."""
        return
