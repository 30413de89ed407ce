"""The engine: one rank of a model that Megatron-Core parallelises."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from jackfield.abc.engine import (
    BaseEngine,
    EngineContext,
    EngineLayout,
    EngineOutput,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    LossFunction,
    SaveCheckpointRequest,
    SaveCheckpointResult,
)
from jackfield.errors import EngineError, PluginError
from jackfield_engine_megatron import checkpointing, folders, model
from jackfield_engine_megatron.architecture import DTYPES, check_sizes, invalid, read_architecture
from jackfield_engine_megatron.config import Config
from jackfield_engine_megatron.optimization import Optimization, check_spec
from jackfield_engine_megatron.passes import Pass
from jackfield_engine_megatron.placement import Placement
from jackfield_engine_megatron.quiet import quiet
from jackfield_engine_megatron.ranks import Ranks
from jackfield_engine_megatron.rows import RowBatch
from jackfield_engine_megatron.statistics import Vocabulary
from jackfield_engine_megatron.weights import Weights

_misused = functools.partial(EngineError, code="engine.state")


class MegatronEngine(BaseEngine):
    """A Llama, Qwen or Mixtral model, dense or with experts, trained by Megatron-Core.

    The ranks of one data-parallel group get the same rows. Results are computed on the last pipeline stage; the others
    get a copy.
    """

    config: Config

    def __init__(self, config: Config, context: EngineContext) -> None:
        super().__init__(config, context)
        self._ranks: Ranks | None = None
        self._weights: Weights | None = None
        self._optimization: Optimization | None = None
        self._mode: str | None = None
        self._damaged = False  # a pass failed, and other ranks may wait in it

    # ---- life

    def initialize(self) -> None:
        """Make this rank's stages, and read their weights from the model folder."""
        if self._weights is not None:
            raise _misused("the engine is initialized already")
        config, context = self.config, self.context
        _check(context)
        self._architecture = read_architecture(context.model)
        check_sizes(config, self._architecture, context.world_size)
        device = _device(context)
        self._ranks = Ranks(config, context, device)
        try:
            self._chunks = self._build(self._ranks)
            weights = Weights(config, self._architecture, self._ranks, self._chunks)
            with folders.opened(Path(context.model.path), weights) as read:
                weights.load(read, lambda parameter: parameter)
            if context.optimizer is not None:
                more = (weights, self._ranks, self._chunks, DTYPES[context.model.dtype])
                self._optimization = Optimization(config, context.optimizer, *more)
        except BaseException:
            self._ranks.leave()
            raise
        self._placement = Placement(self._chunks, self._optimization, device)
        ranks, size = self._ranks, self._architecture.vocabulary
        self._vocabulary = Vocabulary(ranks, size, context.temperature, config.logits_chunk)
        self._weights = weights

    def _build(self, ranks: Ranks) -> list[Any]:
        with quiet():
            return model.build(self.config, self._architecture, self.context, ranks)

    @property
    def layout(self) -> EngineLayout:
        """Return this rank's place. Of the ranks with the same rows, one on the last stage gives the results."""
        self._ready()
        ranks = self._ranks
        assert ranks is not None, "initialized"
        first = ranks.tensor.rank() == 0 and ranks.context.rank() == 0
        return EngineLayout(
            data_parallel_rank=ranks.data_rank,
            data_parallel_size=ranks.data_size,
            is_output_rank=ranks.is_last_stage and first,
        )

    def close(self) -> None:
        """Release model and optimizer, and leave the process groups."""
        self._weights = self._optimization = self._mode = None
        for name in ("_chunks", "_placement", "_vocabulary"):
            self.__dict__.pop(name, None)
        if self._ranks is not None:
            self._ranks.leave()
            self._ranks = None

    def _ready(self) -> Weights:
        if self._weights is None:
            raise _misused("the engine is not initialized", fix="call initialize() first, and nothing after close()")
        return self._weights

    def _optimizing(self) -> Optimization:
        self._ready()
        if self._optimization is None:
            message = f"this engine ({self.context.role}) has no optimizer"
            raise _misused(message, where="EngineContext.optimizer", expected="an OptimizerSpec")
        return self._optimization

    # ---- modes

    def train_mode(self) -> AbstractContextManager[None]:
        """Set up training passes: everything on the device; undo the moves at the end."""
        return self._in_mode("train")

    def eval_mode(self) -> AbstractContextManager[None]:
        """Set up inference passes: weights on the device, no gradients."""
        return self._in_mode("eval")

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        self._ready()
        before = self._mode
        with self._placement.on_device(training=mode == "train"):
            self._mode = mode
            try:
                yield
            finally:
                self._mode = before

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Do nothing: the engine has no adapters."""
        self._ready()
        return nullcontext()

    # ---- computing

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Compute a loss and add its gradients, as the contract describes.

        Ranks with fewer micro-batches than others compute dummy ones: experts and stages wait for each other.
        """
        self._ready()
        self._check_pass(loss_function, forward_only)
        assert self._ranks is not None, "initialized"
        config = self.config
        multiple = (config.tensor_parallel if config.sequence_parallel else 1) * (
            2 * config.context_parallel if config.context_parallel > 1 else 1
        )
        batch = RowBatch(data, self._architecture.vocabulary, self._ranks, multiple)
        micro_batches = [batch.micro_batch(rows) for rows in batch.plan(self.context.micro_batch_tokens)]
        count = self._ranks.maximum(len(micro_batches))
        if config.virtual_pipeline_stages > 1:  # interleaved stages take micro-batches in groups
            count = -(-count // config.pipeline_parallel) * config.pipeline_parallel
        micro_batches += [batch.dummy() for _ in range(count - len(micro_batches))]
        backward = not forward_only
        run = Pass(self._chunks, batch, self._ranks, self._vocabulary, loss_function, backward=backward)
        if backward:
            self._optimizing().begin_pass()
        try:
            if micro_batches:
                with quiet():
                    run.run(micro_batches)
            return run.output()
        except BaseException:
            self._damaged = self.context.world_size > 1
            raise

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
        """Return copies of the full tensors, in checkpoint form, on the engine's device."""
        weights = self._ready()

        def tensors() -> Generator[tuple[str, torch.Tensor], None, None]:
            with self._placement.on_device(training=False):
                yield from weights.gathered(lambda parameter: parameter, DTYPES[self.context.model.dtype])

        return tensors(), None

    def get_per_tensor_grad(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield full gradients in float32, in the names and shapes of the checkpoint."""
        weights, optimization = self._ready(), self._optimizing()
        optimization.reduce(everywhere=True)
        yield from weights.gathered(optimization.gradient, torch.float32)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the chosen state to the CPU or to the engine's own device."""
        self._ready()
        self._placement.move(device, model=model, optimizer=optimizer, grad=grad)

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        """Save model, optimizer and schedule, or a Hugging Face folder of the weights."""
        weights = self._ready()
        assert self._ranks is not None, "initialized"
        folder = checkpointing.make_folder(request.folder, self._ranks)
        with self._placement.on_device(training=True):
            if request.format == "huggingface":
                spec, writes = self.context.model, self._ranks.rank == 0
                with checkpointing.agreed(self._ranks, "the folder could not be written", folder, "look at the disk"):
                    folders.save_folder(Path(spec.path), folder, weights, DTYPES[spec.dtype], writes=writes)
            else:
                checkpointing.save(folder, weights, self._optimization, self._ranks)
        self._ranks.barrier()
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return SaveCheckpointResult(folder=request.folder, files=tuple(files))

    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Load a native checkpoint, which ranks of other numbers and sizes may have written."""
        weights = self._ready()
        assert self._ranks is not None, "initialized"
        with self._placement.on_device(training=True):
            folder = Path(request.folder)
            checkpointing.load(folder, weights, self._optimization, self._ranks, request.model_only)
        return LoadCheckpointResult(folder=request.folder)


def _check(context: EngineContext) -> None:
    """Refuse what the engine does not have, before anything is loaded."""
    spec = context.model
    for name, value in (("temperature", context.temperature), ("micro_batch_tokens", context.micro_batch_tokens)):
        if value <= 0:
            raise invalid(f"{name} is not positive", where=f"EngineContext.{name}", expected="more than 0", found=value)
    if spec.dtype not in DTYPES:
        expected = " or ".join(sorted(DTYPES))
        raise invalid(f"the dtype {spec.dtype!r}", where="model.dtype", expected=expected, found=spec.dtype)
    for setting, used, capability in (
        ("model.lora", spec.lora is not None, "lora"),
        ("model.value_head", spec.value_head, "value_head"),
        ("model.dropout", spec.dropout > 0, "dropout"),
        ("model.freeze", bool(spec.freeze), "freeze"),
        ("model.router_aux_loss", spec.router_aux_loss > 0, "router_aux_loss"),
        ("model.router_replay", spec.router_replay, "router_replay"),
    ):
        if used:
            raise PluginError(
                f"the engine megatron does not have the capability {capability}",
                code="plugin.capability",
                where=setting,
                expected="the setting's default",
                fix="leave it out, or use engine.name: fsdp",
            )
    if context.role == "critic":
        raise PluginError(
            "the engine megatron has no value head, which a critic needs",
            code="plugin.capability",
            where="critic",
            fix="use engine.name: fsdp for the critic",
        )
    if context.optimizer is not None:
        check_spec(context.optimizer)


def _device(context: EngineContext) -> torch.device:
    """Return this rank's device; refuse one on which Megatron-Core does not make its tensors."""
    wanted = torch.device(context.device)
    if wanted.type == "cuda" and torch.cuda.is_available():
        found = torch.device("cuda", context.local_rank if wanted.index is None else wanted.index)
        torch.cuda.set_device(found)
        if context.memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(context.memory_fraction, found)
        return found
    try:
        current: Any = torch.cuda.current_device()
    except (RuntimeError, AssertionError):
        current = None
    if isinstance(current, torch.device) and current.type == wanted.type:  # redirected, as in the tests
        return current
    raise invalid(
        "Megatron-Core makes its tensors on CUDA devices alone",
        where="cluster.device",
        expected="cuda, on a machine that has it",
        found=context.device,
        fix="use engine.name: fsdp on a CPU",
    )
