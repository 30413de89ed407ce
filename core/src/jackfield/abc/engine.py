"""Contract of a training engine: one object per SPMD rank.

The caller never learns how an engine is parallel. It hands every rank of one data-parallel group the same rows, as
:attr:`BaseEngine.layout` says, and gets per-token results back in the order of the rows.
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
    """A low-rank adapter, in the terms of PEFT's ``LoraConfig``."""

    rank: int = option(8, "rank of the update", gt(0))
    alpha: float = option(16.0, "the update is scaled by alpha / rank", gt(0.0))
    dropout: float = option(0.0, "dropout on the adapter's input, while training", [ge(0.0), lt(1.0)])
    target_modules: tuple[str, ...] = option(
        (), "names of the adapted layers; empty: every linear layer of the language model except the output layer"
    )


@attrs.frozen(kw_only=True)
class ModelSpec:
    """Which model is loaded and in which form."""

    path: str = option(help="a Hugging Face folder")
    dtype: str = option("float32", "of the parameters: float32, bfloat16 or float16")
    value_head: bool = option(False, "a scalar head on the last hidden state (a critic)")
    lora: LoraSpec | None = option(None, "train a low-rank adapter; null: train the model's own weights")
    gradient_checkpointing: bool = option(False, "compute activations again in the backward pass, for less memory")
    dropout: float = option(
        0.0,
        "probability of every dropout of the model in training passes; dropout in its config.json is not used "
        "(capability dropout)",
        [ge(0.0), lt(1.0)],
    )
    trust_remote_code: bool = option(False, "run Python code that the model's folder brings")


@attrs.frozen(kw_only=True)
class OptimizerSpec:
    """AdamW and its learning-rate schedule."""

    lr: float = option(1e-6, "learning rate, the schedule's highest", ge(0.0))
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


@attrs.frozen(kw_only=True)
class EngineContext:
    """What a rank gets at its construction, beside the plugin's own config."""

    role: Literal["actor", "reference", "critic"]
    model: ModelSpec
    optimizer: OptimizerSpec | None = None  #: None: forward passes only
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    #: where the ranks meet (a torch.distributed URL); None with one rank. A ``file://`` place is good for one meeting
    init_method: str | None = None
    device: str = "cpu"
    seed: int = 0
    temperature: float = 1.0  #: logits are divided by it before log-probabilities and entropy
    micro_batch_tokens: int = 16384  #: padded tokens of one forward pass, at most (one row may exceed it)


@attrs.frozen(kw_only=True)
class EngineLayout:
    """Where a rank stands: how the caller splits rows and whose results it keeps."""

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    is_output_rank: bool = True  #: whether this rank's :class:`EngineOutput` is the group's


@attrs.frozen(kw_only=True, eq=False)
class TokenOutput:
    """What a loss function gets from the model for one micro-batch: ``[b, T]`` over response tokens.

    Positions past a row's response hold 0. ``log_probs`` and ``values`` carry gradients.
    """

    log_probs: torch.Tensor  #: float ``[b, T]``; zeros for a critic, which has no output layer to compute them
    entropy: torch.Tensor | None = None  #: float ``[b, T]``, only where the loss has ``needs_entropy = True``
    values: torch.Tensor | None = None  #: float ``[b, T]``, only with a value head


#: ``(output, data) -> (loss, metrics)``. ``data`` holds the micro-batch's response columns, padded with 0 to
#: ``[b, T]``. The loss is this micro-batch's *share* of the batch's loss (normalised by global counts), so
#: shares add up; metrics add up likewise, but for names that end in ``/max`` or ``/min``.
LossFunction: TypeAlias = Callable[..., tuple[Any, Mapping[str, Any]]]


@attrs.frozen(kw_only=True, eq=False)
class EngineOutput:
    """Result of a forward (and backward) pass over this rank's rows, in the order of the rows.

    Per-token tensors are jagged (``torch.nested``, ``[B, j]``, response tokens only), float32, detached, on the CPU.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    loss: float | None = None  #: this rank's share of the batch's loss; None without a loss function
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SaveCheckpointRequest:
    """Save into ``folder`` (empty or absent). Every rank calls it."""

    folder: str
    #: ``huggingface``: for ``from_pretrained``: weights, config, and the tokenizer's files of the model's folder
    format: Literal["native", "huggingface"] = "native"
    merge_adapter: bool = False  #: with ``huggingface``: write base model and adapter as one model


@attrs.frozen(kw_only=True)
class SaveCheckpointResult:
    """What was saved."""

    folder: str
    files: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class LoadCheckpointRequest:
    """Load what :meth:`BaseEngine.save_checkpoint` wrote in native format. Every rank calls it."""

    folder: str
    model_only: bool = False  #: leave optimizer, scheduler and random state as they are


@attrs.frozen(kw_only=True)
class LoadCheckpointResult:
    """What was loaded."""

    folder: str


class BaseEngine(ABC):
    """A model, its optimizer and its parallelism, on one rank.

    Invariants, each checked by the conformance suite:

    * gradients are the *sum* over micro-batches and data-parallel ranks of the loss function's gradients:
      no split of the rows and no number of ranks changes them;
    * exported names are Hugging Face names and exported values are bit-exact;
    * save, load, step is bitwise equal to step; moving to another device and back changes nothing;
    * two engines of one seed and one context are equal.

    The constructor only stores; :meth:`initialize` loads. Methods are called by one thread at a time.
    """

    abi_version: ClassVar[str] = "1.0"

    def __init__(self, config: Any, context: EngineContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def initialize(self) -> None:
        """Load the model, and make optimizer and learning-rate scheduler.

        Raises:
            EngineError: ``engine.model`` when the model folder is missing or unusable.
        """

    @property
    @abstractmethod
    def layout(self) -> EngineLayout:
        """This rank's place; valid after :meth:`initialize`."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """A context in which training passes run (dropout of ``ModelSpec.dropout``, weights on the device)."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """A context in which inference passes run (dropout off, no gradients)."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forget accumulated gradients."""

    @abstractmethod
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Run this rank's rows through the model, split into micro-batches, and accumulate gradients.

        Args:
            data: batch size ``[B]``; jagged int64 columns ``prompt_ids`` and ``response_ids``, and any response-aligned
                jagged columns that the loss reads (``response_mask``, ``advantages``, ``old_log_probs``, …) or dense
                row columns ``[B]``.
            loss_function: see :data:`LossFunction`; None only with ``forward_only``.
            forward_only: no gradients; a loss function, if given, is still evaluated.

        Raises:
            EngineError: ``engine.state`` outside of :meth:`train_mode` or :meth:`eval_mode`.
        """

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip, apply and return the global gradient norm before clipping; a norm that is not finite skips the step."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step; return the learning rate that the next step will use."""

    @abstractmethod
    def get_per_tensor_param(self) -> tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]:
        """The weights to publish, one full tensor at a time, under Hugging Face names.

        With an adapter: the adapter's tensors under PEFT's names and the PEFT config (the base does not change);
        without: all of the model's tensors and None. Tied tensors come once. Every rank must exhaust the generator.
        A tensor keeps its values until the next but one is drawn.
        """

    @abstractmethod
    def get_per_tensor_grad(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Gradients, full tensors summed over ranks, by trainable parameter; zeros for one that got no gradient."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the chosen state to ``device`` (``cpu`` to make room, the engine's own device to work)."""

    @abstractmethod
    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        """Write model, optimizer, schedule and random state (native) or weights alone (huggingface)."""

    @abstractmethod
    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Read a native checkpoint; another number of ranks may have written it."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the adapter is off (the reference policy of a LoRA actor); no adapter: no effect."""

    def close(self) -> None:
        """Release processes groups, memory and files. The engine is not used again."""
        return
