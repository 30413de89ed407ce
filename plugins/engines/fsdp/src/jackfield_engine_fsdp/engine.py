"""The engine: one rank of a model sharded with FSDP2."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from jackfield_engine_fsdp.checkpointing import Checkpoints
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.experts import Experts
from jackfield_engine_fsdp.grid import spread
from jackfield_engine_fsdp.memory import offloading
from jackfield_engine_fsdp.model import Dropout, TokenModel, has_adapter
from jackfield_engine_fsdp.operators import keep_freed_memory, speed_up_norms, speed_up_products
from jackfield_engine_fsdp.optimization import Optimization, Placement
from jackfield_engine_fsdp.process_group import RandomStreams, Ranks, device_of
from jackfield_engine_fsdp.row_attention import choose_packer
from jackfield_engine_fsdp.sharding import decoder_layers
from jackfield_engine_fsdp.threads import Threads
from jackfield_engine_fsdp.trained import freeze, full, name_of
from jackfield_engines import failures, output_layer
from jackfield_huggingface.adapters import merge_folder
from jackfield_huggingface.images import ImageInputs
from jackfield_huggingface.names import CheckpointNames

_misused = functools.partial(EngineError, code="engine.state")


class FSDPEngine(BaseEngine):
    """A Hugging Face model, trained on text and sharded by ``torch.distributed.fsdp.fully_shard``.

    Vision-language models work, too. Ranks beyond those of sequence and tensor parallelism are data-parallel. With the
    role ``critic`` and a value head no output layer runs: loss functions get ``log_probs`` of zeros, and the results
    have none.
    """

    config: Config

    def __init__(self, config: Config, context: EngineContext) -> None:
        super().__init__(config, context)
        self._ranks: Ranks | None = None
        self._model: TokenModel | None = None
        self._optimization: Optimization | None = None
        self._mode: str | None = None
        self._watch = failures.Watch()
        self._damaged = False  # a pass failed and its leftovers cannot be cleared

    # ---- life

    def initialize(self) -> None:
        """Load, adapt and shard the model. Every rank loads all of it on the CPU, then keeps its part."""
        if self._model is not None:
            raise _misused("the engine is initialized already")
        context, config = self.context, self.config
        self._check(context)
        self._sizes = config.sizes(context.world_size)
        device = device_of(context)
        if device.type == "cpu":
            keep_freed_memory()
        model = self._build()
        self._ranks = Ranks(context, device, config.collective_timeout, self._sizes)
        try:
            with self._ranks.during("sharding the model"):
                self._sharded: FSDPModule = spread(model, self._ranks.mesh, config)
            if context.optimizer is not None:
                self._optimization = Optimization(model, context.optimizer, self._ranks)
        except BaseException:
            self._ranks.leave()
            raise
        model.to(device)  # buffers; parameters are on the device already
        # tensor-parallel ranks draw the same numbers, for dropout of what each of them has whole
        self._streams = RandomStreams(context.seed + context.rank // self._sizes.tensor, device)
        self._placement = Placement(model, self._optimization, device, config)
        seconds = config.collective_timeout
        self._checkpoints = Checkpoints(model, self._optimization, self._streams, self._ranks, seconds)
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        small = trainable <= config.unsharded_max_parameters
        automatic = context.world_size > 1 and small and config.gradient_accumulation == "auto"
        self._unsharded_accumulation = automatic or config.gradient_accumulation == "unsharded"
        self._model = model

    def _check(self, context: EngineContext) -> None:
        self.config.check(context)
        for each in ("temperature", "micro_batch_tokens"):
            if (value := getattr(context, each)) <= 0:
                where = f"EngineContext.{each}"
                raise folders.invalid(f"{each} is not positive", where=where, expected="more than 0", found=value)
        if context.role == "critic" and not context.model.value_head:
            where = "EngineContext.model.value_head"
            raise folders.invalid("a critic has no value head", where=where, expected=True, found=False)

    def _build(self) -> TokenModel:
        spec, seed = self.context.model, self.context.seed
        predicts = self.context.role != "critic"
        causal_lm = folders.load_causal_lm(spec, self.config.attention, seed, predicts=predicts)
        self._names = CheckpointNames(causal_lm, Path(spec.path))
        dropout = Dropout(causal_lm, spec.dropout)
        own = self.config.tensor_parallel == 1 and self.config.compile == "none"  # our operators take plain tensors
        own = own and self.context.device == "cpu" and self.config.mixed_precision == "none"
        if own:
            speed_up_norms(causal_lm)
            speed_up_products(causal_lm)
        packs = choose_packer(causal_lm, self.config, self.context, own=own)
        fused = output_layer.FusedOutput.of(causal_lm) if predicts else None
        self._threads = Threads(self.config.extra_threads, decoder_layers(causal_lm))  # after the trial passes
        images, experts = ImageInputs.of(causal_lm), Experts.of(causal_lm, spec)
        dtype, published = causal_lm.dtype, self._masters(causal_lm)
        language_model = causal_lm if spec.lora is None else folders.add_lora(causal_lm, spec.lora, seed)
        head = None
        if spec.value_head:
            hidden_size = causal_lm.config.get_text_config().hidden_size
            # PEFT keeps adapters of half-precision models in float32, and FSDP needs trainable parameters of one dtype
            head_dtype = torch.float32 if spec.lora is not None or published else dtype
            head = folders.make_value_head(Path(spec.path), hidden_size, head_dtype, seed)
        more: dict[str, Any] = {"dtype": dtype, "published_dtypes": published, "packs": packs, "images": images}
        more |= {"experts": experts, "fused": fused}
        model = TokenModel(language_model, head, self.config, self.context, dropout=dropout, **more)
        if self.context.optimizer is None:
            model.requires_grad_(False)
        else:
            freeze(model, spec.freeze)
        return model.eval()

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
        """Return this rank's place: ranks of a sequence-parallel and tensor-parallel group have the same rows."""
        self._ready()
        return self._sizes.layout(self.context.rank)

    def close(self) -> None:
        """Release model and optimizer, and leave the process group."""
        self._model = self._optimization = self._mode = None
        if "_checkpoints" in self.__dict__:
            self._checkpoints.abandon()
        for name in ("_sharded", "_placement", "_names", "_checkpoints"):
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
        takes: dict[str, Any] = {"packs": model.packs, "images": model.images, "experts": model.experts}
        batch = passes.RowBatch(data, vocabulary, self._ranks.device, model.rotary, **takes)
        rows = self._ranks.sum(torch.tensor(batch.size, device=self._ranks.device)) if model.experts else 1
        rows = max(1, int(rows) // (self._sizes.sequence * self._sizes.tensor))
        run = passes.Pass(model, batch, loss_function, backward=not forward_only, rows=rows)
        micro_batches = batch.plan(self.context.micro_batch_tokens * self._sizes.sequence)
        count = self._ranks.maximum(len(micro_batches), "the start of a pass")
        streams = self._streams.active() if self._mode == "train" else nullcontext()
        threads = self._threads.adapting() if self.config.extra_threads else nullcontext()
        rows, place = torch.zeros(0, dtype=torch.int64), "a pass without rows"
        try:
            offload = offloading() if self.config.activation_offload and not forward_only else nullcontext()
            passing = self._ranks.during("a pass")
            with passing, torch.set_grad_enabled(not forward_only), streams, threads, offload:
                for index in range(count):
                    if self._unsharded_accumulation and not forward_only:
                        last = index == count - 1
                        self._sharded.set_requires_gradient_sync(last)
                        self._sharded.set_is_last_backward(last)
                        self._sharded.set_reshard_after_backward(last)
                    if index < len(micro_batches):
                        rows, place = micro_batches[index], f"micro-batch {index + 1} of {len(micro_batches)}"
                        run.micro_batch(batch.micro_batch(rows), tie=self._ranks.size > 1)
                    else:
                        run.idle(batch.idle_micro_batch())
        except torch.OutOfMemoryError as error:
            self._recover()
            lengths = (batch.prompts.lengths + batch.responses.lengths)[rows].tolist()
            raise failures.out_of_memory(error, self.context, place, rows.tolist(), lengths) from error
        except BaseException:
            self._recover()
            raise
        if forward_only:
            passes.reshard(model)
        output = run.output()
        if not forward_only:
            self._watch.add(data, output)
        return output

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
            with suppress(AttributeError):  # no pass has reached the model yet
                self._sharded.reset_iter_state()
        else:
            self._damaged = True

    def optimizer_zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._optimizing().zero_grad()
        self._watch.clear()

    def optimizer_step(self) -> float:
        """Clip by the global norm, step, and return the norm before clipping.

        If it is not finite, do not step: name the samples in a warning, or raise ``engine.not-finite``, as
        ``OptimizerSpec.on_nonfinite`` says.
        """
        optimization = self._optimizing()
        with self._placement.stepping():
            norm = optimization.step()
        if not math.isfinite(norm):
            assert self._ranks is not None, "initialized"
            failures.report_not_finite(norm, self._watch, self.context, self._ranks)
        self._watch.clear()
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate of the next optimizer step."""
        optimization = self._optimizing()
        return optimization.set_schedule_step(optimization.schedule_step + 1)

    # ---- weights

    def get_per_tensor_param(self) -> tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]:
        """Return copies of the full tensors, in checkpoint form, on the engine's device; no value head."""
        model, names, ranks, lora = self._ready(), self._names, self._ranks, self.context.model.lora
        assert ranks is not None, "initialized"
        merged = lora is None or lora.publish == "merged"

        def tensors() -> Generator[tuple[str, torch.Tensor], None, None]:
            with ranks.during("gathering the weights"):
                yield from folders.published_tensors(model, names) if merged else folders.adapter_tensors(model)

        return tensors(), None if merged else folders.adapter_config(model)

    def get_local_param(self) -> Generator[tuple[Box, torch.Tensor], None, None] | None:
        """Return this rank's rows of each tensor, in checkpoint form; None with an adapter, or stacked experts."""
        return folders.local_tensors(self._ready(), self._names)

    def get_per_tensor_grad(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield full gradients in the order of the parameters; zeros if a parameter got none."""
        model = self._ready()
        for name, parameter in self._optimizing().parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield name_of(model, name), full(gradient)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the chosen state to the CPU or to the engine's own device."""
        self._ready()
        self._placement.move(device, model=model, optimizer=optimizer, grad=grad)

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        """Save model, optimizer, schedule and random state, or a Hugging Face folder of the weights."""
        model = self._ready()
        assert self._ranks is not None, "initialized"
        averages = None if self._optimization is None else self._optimization.averages
        if request.averaged and averages is None:
            what, where = "there is no average of the weights", "OptimizerSpec.ema_decay"
            raise folders.invalid(what, where=where, expected="a decay below 1", found=None)
        folder = checkpointing.make_folder(request.folder, self._ranks)
        if request.format == "native":
            self._checkpoints.save(folder, background=request.background)
            if request.background:
                return SaveCheckpointResult(folder=request.folder)
        else:
            writes, spec = self._ranks.rank == 0, self.context.model
            with averages.in_place() if averages is not None and request.averaged else nullcontext():
                folders.save_folder(model, self._names, Path(spec.path), folder, writes=writes)
            if writes and request.merge_adapter:
                merge_folder(spec, folder)
        self._ranks.barrier()
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return SaveCheckpointResult(folder=request.folder, files=tuple(files))

    def finish_checkpoint(self) -> None:
        """Wait for a checkpoint that is written in the background, and complete it; raise if a rank could not."""
        self._ready()
        self._checkpoints.finish()

    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Load a native checkpoint; random state only if as many ranks wrote it."""
        self._ready()
        self._checkpoints.load(Path(request.folder), model_only=request.model_only)
        return LoadCheckpointResult(folder=request.folder)
