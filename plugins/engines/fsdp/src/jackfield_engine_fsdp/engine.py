"""The engine: one rank of a model sharded with FSDP2."""

from __future__ import annotations

import functools
import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from jackfield.abc.engine import (
    BaseEngine,
    Box,
    EngineContext,
    EngineLayout,
    EngineOutput,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    LossFunction,
    SaveCheckpointRequest,
    SaveCheckpointResult,
)
from jackfield.errors import EngineError
from jackfield_engine_fsdp import checkpointing, folders, passes
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.model import Dropout, Rotary, TokenModel, decoder_layers, has_adapter, shard
from jackfield_engine_fsdp.operators import keep_freed_memory, speed_up_norms, speed_up_products
from jackfield_engine_fsdp.optimization import Optimization, Placement
from jackfield_engine_fsdp.packing import speed_up_attention
from jackfield_engine_fsdp.process_group import RandomStreams, Ranks
from jackfield_engine_fsdp.threads import Threads
from jackfield_huggingface.adapters import merge_folder
from jackfield_huggingface.names import CheckpointNames

_misused = functools.partial(EngineError, code="engine.state")


class FSDPEngine(BaseEngine):
    """A Hugging Face model, trained on text and sharded by ``torch.distributed.fsdp.fully_shard``.

    Vision-language models work, too. Every rank is a data-parallel rank. With the role ``critic`` and a value head no
    output layer runs: loss functions get ``log_probs`` of zeros, and the results have none.
    """

    config: Config

    def __init__(self, config: Config, context: EngineContext) -> None:
        super().__init__(config, context)
        self._ranks: Ranks | None = None
        self._model: TokenModel | None = None
        self._optimization: Optimization | None = None
        self._mode: str | None = None
        self._damaged = False  # a pass failed and its leftovers cannot be cleared

    # ---- life

    def initialize(self) -> None:
        """Load, adapt and shard the model. Every rank loads all of it on the CPU, then keeps its part."""
        if self._model is not None:
            raise _misused("the engine is initialized already")
        context, config = self.context, self.config
        self._check(context)
        device = _device(context)
        if device.type == "cpu":
            keep_freed_memory()
        model = self._build()
        self._ranks = Ranks(context, device, config.collective_timeout)
        try:
            self._sharded: FSDPModule = shard(model, self._ranks.mesh, config)
            trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            if context.optimizer is not None:
                self._optimization = Optimization(trainable, context.optimizer, self._ranks)
        except BaseException:
            self._ranks.leave()
            raise
        model.to(device)  # buffers; parameters are on the device already
        self._streams = RandomStreams(context.seed + context.rank, device)
        self._placement = Placement(model, self._optimization, device, streamed=config.cpu_offload)
        small = sum(parameter.numel() for _, parameter in trainable) <= config.unsharded_max_parameters
        automatic = "unsharded" if context.world_size > 1 and small else "sharded"
        chosen = automatic if config.gradient_accumulation == "auto" else config.gradient_accumulation
        self._unsharded_accumulation = chosen == "unsharded"
        self._model = model

    @staticmethod
    def _check(context: EngineContext) -> None:
        for name, value in (("temperature", context.temperature), ("micro_batch_tokens", context.micro_batch_tokens)):
            if value <= 0:
                where = f"EngineContext.{name}"
                raise folders.invalid(f"{name} is not positive", where=where, expected="more than 0", found=value)
        if context.role == "critic" and not context.model.value_head:
            where = "EngineContext.model.value_head"
            raise folders.invalid("a critic has no value head", where=where, expected=True, found=False)

    def _build(self) -> TokenModel:
        spec, seed = self.context.model, self.context.seed
        causal_lm = folders.load_causal_lm(spec, self.config.attention, seed)
        self._names = CheckpointNames(causal_lm, Path(spec.path))
        dropout = Dropout(causal_lm, spec.dropout)
        packs = False
        if self.context.device == "cpu" and self.config.mixed_precision == "none":
            speed_up_norms(causal_lm)
            speed_up_products(causal_lm)
            packs = self._packs(causal_lm) and speed_up_attention(causal_lm)
        self._threads = Threads(self.config.extra_threads, decoder_layers(causal_lm))
        dtype, published = causal_lm.dtype, self._masters(causal_lm)
        language_model = causal_lm if spec.lora is None else folders.add_lora(causal_lm, spec.lora, seed)
        head = None
        if spec.value_head:
            hidden_size = causal_lm.config.get_text_config().hidden_size
            # PEFT keeps adapters of half-precision models in float32, and FSDP needs trainable parameters of one dtype
            head_dtype = torch.float32 if spec.lora is not None or published else dtype
            head = folders.make_value_head(hidden_size, head_dtype, seed)
        dtypes: dict[str, Any] = {"dtype": dtype, "published_dtypes": published}
        model = TokenModel(language_model, head, self.config, self.context, dropout=dropout, packs=packs, **dtypes)
        if self.context.optimizer is None:
            model.requires_grad_(False)
        return model.eval()

    def _packs(self, causal_lm: PreTrainedModel) -> bool:
        """Return whether rows of a pass may share their prompts' tokens."""
        plain = self.config.attention == "sdpa" and causal_lm.dtype == torch.float32
        return plain and self.context.model.dropout == 0.0 and not Rotary(causal_lm).limits

    def _masters(self, causal_lm: PreTrainedModel) -> dict[str, torch.dtype]:
        """Cast trained weights to float32, or warn; return the previous dtypes (``published_dtypes``).

        An adapter of a half-precision model is already in float32, and its base is not trained.
        """
        spec, optimizer = self.context.model, self.context.optimizer
        if optimizer is None or spec.lora is not None or causal_lm.dtype == torch.float32:
            return {}
        if self.config.master_weights:
            dtypes = {name: parameter.dtype for name, parameter in causal_lm.named_parameters()}
            for parameter in causal_lm.parameters():  # ties are kept
                parameter.data = parameter.data.float()
            return dtypes
        share = folders.changed_by(optimizer.lr, causal_lm.parameters())
        logging.getLogger("jackfield").warning(
            "engine.master_weights is off: an update of %g (optimizer.lr) changes %.2g %% of the weights in %s, and is "
            "lost for the rest",
            optimizer.lr,
            100 * share,
            spec.dtype,
        )
        return {}

    @property
    def layout(self) -> EngineLayout:
        """Return this rank's place: every rank is a data-parallel rank."""
        self._ready()
        return EngineLayout(
            data_parallel_rank=self.context.rank, data_parallel_size=self.context.world_size, is_output_rank=True
        )

    def close(self) -> None:
        """Release model and optimizer, and leave the process group."""
        self._model = self._optimization = self._mode = None
        for name in ("_sharded", "_placement", "_names"):
            self.__dict__.pop(name, None)
        if self._ranks is not None:
            self._ranks.leave()
            self._ranks = None

    def _ready(self) -> TokenModel:
        if self._model is None:
            raise _misused("the engine is not initialized", fix="call initialize() first, and nothing after close()")
        return self._model

    def _optimizing(self) -> Optimization:
        self._ready()
        if self._optimization is None:
            message = f"this engine ({self.context.role}) has no optimizer"
            raise _misused(message, where="EngineContext.optimizer", expected="an OptimizerSpec")
        return self._optimization

    # ---- modes

    def train_mode(self) -> AbstractContextManager[None]:
        """Set up training passes: ``model.dropout``, weights on the device; undo the moves at the end."""
        return self._in_mode("train")

    def eval_mode(self) -> AbstractContextManager[None]:
        """Set up inference passes: no dropout, no gradients, weights on the device."""
        return self._in_mode("eval")

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        model = self._ready()
        before = self._mode
        with self._placement.on_device(training=mode == "train"):
            self._mode = mode
            model.train(mode == "train")
            try:
                yield
            finally:
                self._mode = before
                model.train(before == "train")

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the block; without an adapter, do nothing."""
        language_model = self._ready().language_model
        return language_model.disable_adapter() if has_adapter(language_model) else nullcontext()

    # ---- computing

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Compute a loss and add its gradients, as the contract describes.

        The micro-batch with the longest rows runs first. A rank with fewer micro-batches than another computes dummy
        ones, because gathering weights and reducing gradients are collective.
        """
        model = self._ready()
        self._check_pass(loss_function, forward_only)
        assert self._ranks is not None, "initialized"
        vocabulary = model.causal_lm.get_input_embeddings().num_embeddings
        batch = passes.RowBatch(data, vocabulary, self._ranks.device, model.rotary, packs=model.packs)
        run = passes.Pass(model, batch, loss_function, backward=not forward_only)
        micro_batches = batch.plan(self.context.micro_batch_tokens)
        count = self._ranks.maximum(len(micro_batches))
        streams = self._streams.active() if self._mode == "train" else nullcontext()
        threads = self._threads.adapting() if self.config.extra_threads else nullcontext()
        try:
            with torch.set_grad_enabled(not forward_only), streams, threads:
                for index in range(count):
                    if self._unsharded_accumulation and not forward_only:
                        last = index == count - 1
                        self._sharded.set_requires_gradient_sync(last)
                        self._sharded.set_is_last_backward(last)
                        self._sharded.set_reshard_after_backward(last)
                    if index < len(micro_batches):
                        run.micro_batch(batch.micro_batch(micro_batches[index]), tie=self._ranks.size > 1)
                    else:
                        run.idle(batch.idle_micro_batch())
        except BaseException:
            self._recover()
            raise
        if forward_only:
            passes.reshard(model)
        return run.output()

    def _check_pass(self, loss_function: object, forward_only: bool) -> None:
        if self._mode is None or (self._mode == "eval" and not forward_only):
            raise _misused(
                "a pass outside of its mode",
                expected="engine.train_mode(), or engine.eval_mode() with forward_only",
                found="no mode" if self._mode is None else f"eval_mode with forward_only={forward_only}",
                fix="with engine.train_mode(): engine.forward_backward_batch(...)",
            )
        if self._damaged:
            raise _misused("an earlier pass failed half-way", fix="make a new engine and load a checkpoint")
        if not forward_only:
            self._optimizing()
            if loss_function is None:
                raise EngineError("a backward pass needs a loss function", expected="a callable", found=None)

    def _recover(self) -> None:
        """Clear gathered weights and partial gradients after a failed pass, so the next pass is clean.

        If that is impossible (other ranks wait in a collective, or gradients are held unsharded), later passes are
        refused.
        """
        recovers = hasattr(self._sharded, "reset_iter_state") and not self._unsharded_accumulation
        if recovers and self.context.world_size == 1:
            self._sharded.reset_iter_state()
        else:
            self._damaged = True

    def optimizer_zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._optimizing().zero_grad()

    def optimizer_step(self) -> float:
        """Clip by the global norm, step, and return the norm before clipping. If it is not finite, do not step."""
        return self._optimizing().step()

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate of the next optimizer step."""
        optimization = self._optimizing()
        return optimization.set_schedule_step(optimization.schedule_step + 1)

    # ---- weights

    def get_per_tensor_param(self) -> tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]:
        """Return copies of the full tensors, in checkpoint form, on the engine's device; no value head."""
        model, names = self._ready(), self._names

        def tensors() -> Generator[tuple[str, torch.Tensor], None, None]:
            yield from folders.published_tensors(model, names)

        return tensors(), folders.adapter_config(model)

    def get_local_param(self) -> Generator[tuple[Box, torch.Tensor], None, None] | None:
        """Return this rank's rows of each tensor, in checkpoint form; None with an adapter, or stacked experts."""
        return folders.local_tensors(self._ready(), self._names)

    def get_per_tensor_grad(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield full gradients in the order of the parameters; zeros if a parameter got none."""
        model = self._ready()
        adapter = has_adapter(model.language_model)
        for name, parameter in self._optimizing().parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            inner = name.removeprefix("language_model.")
            yield folders.published_name(inner) if adapter and inner != name else inner, folders.full(gradient)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the chosen state to the CPU or to the engine's own device."""
        self._ready()
        self._placement.move(device, model=model, optimizer=optimizer, grad=grad)

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        """Save model, optimizer, schedule and random state, or a Hugging Face folder of the weights."""
        model = self._ready()
        assert self._ranks is not None, "initialized"
        folder = checkpointing.make_folder(request.folder, self._ranks)
        if request.format == "huggingface":
            writes, spec = self._ranks.rank == 0, self.context.model
            folders.save_folder(model, self._names, Path(spec.path), folder, writes=writes)
            if writes and request.merge_adapter:
                merge_folder(spec, folder)
        else:
            checkpointing.save(folder, model, self._optimization, self._streams, self._ranks)
        self._ranks.barrier()
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return SaveCheckpointResult(folder=request.folder, files=tuple(files))

    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Load a native checkpoint; random state only if as many ranks wrote it."""
        model = self._ready()
        assert self._ranks is not None, "initialized"
        folder = Path(request.folder)
        checkpointing.load(folder, model, self._optimization, self._streams, self._ranks, request.model_only)
        return LoadCheckpointResult(folder=request.folder)


def _device(context: EngineContext) -> torch.device:
    """Return this rank's device; ``cuda`` without a number means that of its local rank."""
    device = torch.device(context.device)
    if device.type == "cuda":
        device = torch.device("cuda", context.local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device
